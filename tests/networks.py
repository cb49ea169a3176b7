"""Networks of timm to convert, with random weights."""

import importlib
import sys

import torch

_LIBRARIES = []


def build(name, **options):
    """A network with few classes; training needs no more than 32 x 32 pixels."""
    return _timm().create_model(name, pretrained=False, num_classes=5, **options)


def layer(name):
    return getattr(_timm().layers, name)


def norm_act():
    _timm()
    return importlib.import_module("timm.layers.norm_act")


def _timm():
    try:
        return importlib.import_module("timm")
    except RuntimeError as error:  # a torchvision without its own operators, which no network here needs
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)  # its operators live as long as it does
    return importlib.import_module("timm")

"""Networks of timm to convert, with random weights."""

import importlib


def build(name, **options):
    """A network with few classes; training needs no more than 32 x 32 pixels."""
    return _timm().create_model(name, pretrained=False, num_classes=5, **options)


def layer(name):
    return getattr(_timm().layers, name)


def norm_act():
    _timm()
    return importlib.import_module("timm.layers.norm_act")


def _timm():
    importlib.import_module("startup.sitecustomize")
    return importlib.import_module("timm")

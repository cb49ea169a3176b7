"""Run by Python at start-up where this folder is on PYTHONPATH: lets torchvision be imported without its own operators.

timm and Lightning import torchvision, whose import fails where its compiled operators do not fit the torch beside it.
Its networks need none of them, so they are declared and not defined. Nothing happens where they can be loaded.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARIES = []  # operators live as long as their library


def operators_load(folder: Path) -> bool:
    try:
        torch.ops.load_library(folder / "_C.so")
    except OSError:
        return False
    return True


def declare() -> None:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARIES.append(library)


found = find_spec("torchvision")
if found and not hasattr(torch.ops.torchvision, "nms") and not operators_load(Path(found.origin).parent):
    declare()

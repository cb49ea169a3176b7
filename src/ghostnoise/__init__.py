"""Ghost noise, the regularizing noise hidden in Batch Normalization, as exact and switchable PyTorch layers.

After Kosson, Fan and Jaggi, *Ghost Noise for Regularizing Deep Neural Networks*, AAAI 2024.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ghostnoise.version import __version__ as __version__

if TYPE_CHECKING:
    from ghostnoise import functional as functional
    from ghostnoise import layers as layers
    from ghostnoise import meter as meter
    from ghostnoise.calibration import Calibration as Calibration
    from ghostnoise.calibration import calibrate as calibrate
    from ghostnoise.conversion import ConstantSchedule as ConstantSchedule
    from ghostnoise.conversion import CosineSchedule as CosineSchedule
    from ghostnoise.conversion import LinearSchedule as LinearSchedule
    from ghostnoise.conversion import OffAfter as OffAfter
    from ghostnoise.conversion import Schedule as Schedule
    from ghostnoise.conversion import convert as convert  # type: ignore[no-redef]
    from ghostnoise.conversion import revert as revert
    from ghostnoise.conversion import summary as summary  # type: ignore[no-redef]
    from ghostnoise.history import History as History
    from ghostnoise.history import histories as histories
    from ghostnoise.inference import Prediction as Prediction
    from ghostnoise.inference import predict as predict
    from ghostnoise.inference import sampling as sampling
    from ghostnoise.masking import masked as masked
    from ghostnoise.meter import Meter as Meter


# Public names besides those of the methods, which the registry lists, and the modules that define them.
_DEFINED_IN = {
    "Calibration": "calibration",
    "ConstantSchedule": "conversion",
    "CosineSchedule": "conversion",
    "History": "history",
    "LinearSchedule": "conversion",
    "Meter": "meter",
    "OffAfter": "conversion",
    "Prediction": "inference",
    "Schedule": "conversion",
    "calibrate": "calibration",
    "convert": "conversion",
    "histories": "history",
    "masked": "masking",
    "predict": "inference",
    "revert": "conversion",
    "sampling": "inference",
    "summary": "conversion",
}
_MODULES = ("functional", "layers", "meter")
# Functions of methods that are public here too; the others are in `functional`.
_FUNCTIONS = ("Decomposition", "decompose")


def _methods() -> dict[str, Any]:
    """Return the public names of the methods."""
    registry = importlib.import_module("ghostnoise.methods.registry")
    functions = registry.functions()
    found: dict[str, Any] = registry.layers() | {name: functions[name] for name in _FUNCTIONS}
    return found


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ghostnoise.{name}")
    if name == "__all__":
        return sorted([*_DEFINED_IN, *_MODULES, *_methods()])
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f"ghostnoise.{_DEFINED_IN[name]}"), name)
    elif (name[0].isupper() or name in _FUNCTIONS) and name in _methods():  # not for submodules, which methods import
        value = _methods()[name]
    else:
        raise AttributeError(f"module 'ghostnoise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return [*names, "__version__"]

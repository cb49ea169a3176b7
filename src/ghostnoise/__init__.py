"""Ghost noise, the regularizing noise hidden in Batch Normalization, as exact and switchable PyTorch layers.

After Kosson, Fan and Jaggi, *Ghost Noise for Regularizing Deep Neural Networks*, AAAI 2024.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ghostnoise.version import __version__ as __version__

if TYPE_CHECKING:
    # exports: begin, written by tools/exports.py
    from ghostnoise import functional as functional
    from ghostnoise import laws as laws
    from ghostnoise import meter as meter
    from ghostnoise import tables as tables
    from ghostnoise.calibration import Calibration as Calibration
    from ghostnoise.calibration import calibrate as calibrate
    from ghostnoise.conversion.convert import convert as convert
    from ghostnoise.conversion.convert import revert as revert
    from ghostnoise.conversion.schedules import ConstantSchedule as ConstantSchedule
    from ghostnoise.conversion.schedules import CosineSchedule as CosineSchedule
    from ghostnoise.conversion.schedules import LinearSchedule as LinearSchedule
    from ghostnoise.conversion.schedules import OffAfter as OffAfter
    from ghostnoise.conversion.schedules import Schedule as Schedule
    from ghostnoise.conversion.summary import summary as summary
    from ghostnoise.flex import flex_norm as flex_norm
    from ghostnoise.history import History as History
    from ghostnoise.history import histories as histories
    from ghostnoise.inference import Prediction as Prediction
    from ghostnoise.inference import predict as predict
    from ghostnoise.inference import sampling as sampling
    from ghostnoise.masking import masked as masked
    from ghostnoise.meter import Meter as Meter
    from ghostnoise.methods.analytical import AnalyticalGhostNoise as AnalyticalGhostNoise
    from ghostnoise.methods.analytical import AnalyticalGhostNoiseBatchNorm as AnalyticalGhostNoiseBatchNorm
    from ghostnoise.methods.analytical import AnalyticalGhostNoiseBatchNorm1d as AnalyticalGhostNoiseBatchNorm1d
    from ghostnoise.methods.analytical import AnalyticalGhostNoiseBatchNorm2d as AnalyticalGhostNoiseBatchNorm2d
    from ghostnoise.methods.analytical import AnalyticalGhostNoiseBatchNorm3d as AnalyticalGhostNoiseBatchNorm3d
    from ghostnoise.methods.batch_norm import BatchNorm as BatchNorm
    from ghostnoise.methods.batch_norm import BatchNorm1d as BatchNorm1d
    from ghostnoise.methods.batch_norm import BatchNorm2d as BatchNorm2d
    from ghostnoise.methods.batch_norm import BatchNorm3d as BatchNorm3d
    from ghostnoise.methods.batch_renorm import BatchRenorm as BatchRenorm
    from ghostnoise.methods.batch_renorm import BatchRenorm1d as BatchRenorm1d
    from ghostnoise.methods.batch_renorm import BatchRenorm2d as BatchRenorm2d
    from ghostnoise.methods.batch_renorm import BatchRenorm3d as BatchRenorm3d
    from ghostnoise.methods.distribution_uncertainty import DistributionUncertainty as DistributionUncertainty
    from ghostnoise.methods.elementwise import AdditiveGaussianNoise as AdditiveGaussianNoise
    from ghostnoise.methods.elementwise import NoisyDropout as NoisyDropout
    from ghostnoise.methods.eval_norm import EvalNorm as EvalNorm
    from ghostnoise.methods.eval_norm import EvalNorm1d as EvalNorm1d
    from ghostnoise.methods.eval_norm import EvalNorm2d as EvalNorm2d
    from ghostnoise.methods.eval_norm import EvalNorm3d as EvalNorm3d
    from ghostnoise.methods.exclusive_batch_norm import ExclusiveBatchNorm as ExclusiveBatchNorm
    from ghostnoise.methods.exclusive_batch_norm import ExclusiveBatchNorm1d as ExclusiveBatchNorm1d
    from ghostnoise.methods.exclusive_batch_norm import ExclusiveBatchNorm2d as ExclusiveBatchNorm2d
    from ghostnoise.methods.exclusive_batch_norm import ExclusiveBatchNorm3d as ExclusiveBatchNorm3d
    from ghostnoise.methods.ghost_batch_norm import Decomposition as Decomposition
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm as GhostBatchNorm
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm1d as GhostBatchNorm1d
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm2d as GhostBatchNorm2d
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm3d as GhostBatchNorm3d
    from ghostnoise.methods.ghost_batch_norm import decompose as decompose
    from ghostnoise.methods.ghost_noise import GhostNoise as GhostNoise
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm as GhostNoiseBatchNorm
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm1d as GhostNoiseBatchNorm1d
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm2d as GhostNoiseBatchNorm2d
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm3d as GhostNoiseBatchNorm3d
    from ghostnoise.methods.micro_batch_norm import MicroBatchNorm as MicroBatchNorm
    from ghostnoise.methods.micro_batch_norm import MicroBatchNorm1d as MicroBatchNorm1d
    from ghostnoise.methods.micro_batch_norm import MicroBatchNorm2d as MicroBatchNorm2d
    from ghostnoise.methods.micro_batch_norm import MicroBatchNorm3d as MicroBatchNorm3d
    from ghostnoise.methods.mix_style import MixStyle as MixStyle
    from ghostnoise.methods.prediction_time_batch_norm import PredictionTimeBatchNorm as PredictionTimeBatchNorm
    from ghostnoise.methods.prediction_time_batch_norm import PredictionTimeBatchNorm1d as PredictionTimeBatchNorm1d
    from ghostnoise.methods.prediction_time_batch_norm import PredictionTimeBatchNorm2d as PredictionTimeBatchNorm2d
    from ghostnoise.methods.prediction_time_batch_norm import PredictionTimeBatchNorm3d as PredictionTimeBatchNorm3d
    from ghostnoise.methods.shuffled_ghost_batch_norm import ShuffledGhostBatchNorm as ShuffledGhostBatchNorm
    from ghostnoise.methods.shuffled_ghost_batch_norm import ShuffledGhostBatchNorm1d as ShuffledGhostBatchNorm1d
    from ghostnoise.methods.shuffled_ghost_batch_norm import ShuffledGhostBatchNorm2d as ShuffledGhostBatchNorm2d
    from ghostnoise.methods.shuffled_ghost_batch_norm import ShuffledGhostBatchNorm3d as ShuffledGhostBatchNorm3d
    from ghostnoise.methods.weight_standardization import WeightStandardized as WeightStandardized
    from ghostnoise.methods.weight_standardization import WSConv1d as WSConv1d
    from ghostnoise.methods.weight_standardization import WSConv2d as WSConv2d
    from ghostnoise.methods.weight_standardization import WSLinear as WSLinear
    from ghostnoise.tables import Affine as Affine
    from ghostnoise.tables import Moments as Moments
    # exports: end

# Public names besides those of the methods, which the registry lists, and the modules that define them.
# For type checkers and editors, `tools/exports.py` writes the same as imports.
_DEFINED_IN = {
    "Affine": "tables",
    "Calibration": "calibration",
    "ConstantSchedule": "conversion.schedules",
    "CosineSchedule": "conversion.schedules",
    "History": "history",
    "LinearSchedule": "conversion.schedules",
    "Meter": "meter",
    "Moments": "tables",
    "OffAfter": "conversion.schedules",
    "Prediction": "inference",
    "Schedule": "conversion.schedules",
    "calibrate": "calibration",
    "convert": "conversion.convert",
    "flex_norm": "flex",
    "histories": "history",
    "masked": "masking",
    "predict": "inference",
    "revert": "conversion.convert",
    "sampling": "inference",
    "summary": "conversion.summary",
}
_MODULES = ("functional", "laws", "meter", "tables")
# Functions of methods that are public here too; the others are in `functional`.
_FUNCTIONS = ("Decomposition", "decompose")


def _methods() -> dict[str, Any]:
    """Return the public names of the methods."""
    registry = importlib.import_module("ghostnoise.methods.registry")
    functions = registry.functions()
    found: dict[str, Any] = registry.layers() | {name: functions[name] for name in _FUNCTIONS}
    return found


def _find(name: str) -> Any:
    """Return the value of a public name, which is imported when it is used first: importing torch takes a second."""
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
    return [*_find("__all__"), "__version__"]


if not TYPE_CHECKING:  # for type checkers, every other name would exist
    __getattr__ = _find

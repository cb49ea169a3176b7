"""Ghost noise, the regularizing noise hidden in Batch Normalization, as exact and switchable PyTorch layers.

After Kosson, Fan and Jaggi, *Ghost Noise for Regularizing Deep Neural Networks*, AAAI 2024.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ghostnoise.version import __version__ as __version__

if TYPE_CHECKING:
    from ghostnoise import functional, layers, meter
    from ghostnoise.conversion import (
        ConstantSchedule,
        CosineSchedule,
        LinearSchedule,
        OffAfter,
        Schedule,
        convert,
        revert,
        summary,
    )
    from ghostnoise.element import AdditiveGaussianNoise, NoisyDropout
    from ghostnoise.engine.backends import backend
    from ghostnoise.functional import Decomposition, decompose
    from ghostnoise.layers import (
        AnalyticalGhostNoise,
        AnalyticalGhostNoiseBatchNorm1d,
        AnalyticalGhostNoiseBatchNorm2d,
        AnalyticalGhostNoiseBatchNorm3d,
        BatchNorm1d,
        BatchNorm2d,
        BatchNorm3d,
        EvalNorm1d,
        EvalNorm2d,
        EvalNorm3d,
        ExclusiveBatchNorm1d,
        ExclusiveBatchNorm2d,
        ExclusiveBatchNorm3d,
        GhostBatchNorm1d,
        GhostBatchNorm2d,
        GhostBatchNorm3d,
        GhostNoise,
        GhostNoiseBatchNorm1d,
        GhostNoiseBatchNorm2d,
        GhostNoiseBatchNorm3d,
    )
    from ghostnoise.meter import Meter
    from ghostnoise.weights import WSConv2d, WSLinear


__all__ = [
    "AdditiveGaussianNoise",
    "AnalyticalGhostNoise",
    "AnalyticalGhostNoiseBatchNorm1d",
    "AnalyticalGhostNoiseBatchNorm2d",
    "AnalyticalGhostNoiseBatchNorm3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ConstantSchedule",
    "CosineSchedule",
    "Decomposition",
    "EvalNorm1d",
    "EvalNorm2d",
    "EvalNorm3d",
    "ExclusiveBatchNorm1d",
    "ExclusiveBatchNorm2d",
    "ExclusiveBatchNorm3d",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "GhostNoise",
    "GhostNoiseBatchNorm1d",
    "GhostNoiseBatchNorm2d",
    "GhostNoiseBatchNorm3d",
    "LinearSchedule",
    "Meter",
    "NoisyDropout",
    "OffAfter",
    "Schedule",
    "WSConv2d",
    "WSLinear",
    "backend",
    "convert",
    "decompose",
    "functional",
    "layers",
    "meter",
    "revert",
    "summary",
]

_ELSEWHERE = {
    "AdditiveGaussianNoise": "element",
    "ConstantSchedule": "conversion",
    "CosineSchedule": "conversion",
    "Decomposition": "functional",
    "LinearSchedule": "conversion",
    "Meter": "meter",
    "NoisyDropout": "element",
    "OffAfter": "conversion",
    "Schedule": "conversion",
    "WSConv2d": "weights",
    "WSLinear": "weights",
    "backend": "engine.backends",
    "convert": "conversion",
    "decompose": "functional",
    "revert": "conversion",
    "summary": "conversion",
}


def __getattr__(name: str) -> Any:
    if name in ("functional", "layers", "meter"):
        return importlib.import_module(f"ghostnoise.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'ghostnoise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ghostnoise.{_ELSEWHERE.get(name, 'layers')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

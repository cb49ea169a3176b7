"""What users hold: layers with parameters, buffers and a forward that is one call of `ghostnoise.functional`."""

from ghostnoise.layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from ghostnoise.layers.eval_norm import EvalNorm1d, EvalNorm2d, EvalNorm3d
from ghostnoise.layers.exclusive import ExclusiveBatchNorm1d, ExclusiveBatchNorm2d, ExclusiveBatchNorm3d
from ghostnoise.layers.ghost import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from ghostnoise.layers.noise import AnalyticalGhostNoise, GhostNoise
from ghostnoise.layers.noisy_norm import (
    AnalyticalGhostNoiseBatchNorm1d,
    AnalyticalGhostNoiseBatchNorm2d,
    AnalyticalGhostNoiseBatchNorm3d,
    GhostNoiseBatchNorm1d,
    GhostNoiseBatchNorm2d,
    GhostNoiseBatchNorm3d,
)

__all__ = [
    "AnalyticalGhostNoise",
    "AnalyticalGhostNoiseBatchNorm1d",
    "AnalyticalGhostNoiseBatchNorm2d",
    "AnalyticalGhostNoiseBatchNorm3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
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
]

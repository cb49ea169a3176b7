"""Layers with parameters and buffers, whose forward is one call of their function.

Every method defines its own layers (`ghostnoise.methods`); this module collects them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # exports: begin, written by tools/exports.py
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
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm as GhostBatchNorm
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm1d as GhostBatchNorm1d
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm2d as GhostBatchNorm2d
    from ghostnoise.methods.ghost_batch_norm import GhostBatchNorm3d as GhostBatchNorm3d
    from ghostnoise.methods.ghost_noise import GhostNoise as GhostNoise
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm as GhostNoiseBatchNorm
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm1d as GhostNoiseBatchNorm1d
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm2d as GhostNoiseBatchNorm2d
    from ghostnoise.methods.ghost_noise import GhostNoiseBatchNorm3d as GhostNoiseBatchNorm3d
    from ghostnoise.methods.weight_standardization import WeightStandardized as WeightStandardized
    from ghostnoise.methods.weight_standardization import WSConv1d as WSConv1d
    from ghostnoise.methods.weight_standardization import WSConv2d as WSConv2d
    from ghostnoise.methods.weight_standardization import WSLinear as WSLinear
    # exports: end
else:
    from ghostnoise.methods import registry

    __all__ = sorted(registry.layers())

    def __getattr__(name: str) -> Any:
        try:
            return registry.layers()[name]
        except KeyError:
            raise AttributeError(f"module 'ghostnoise.layers' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return __all__

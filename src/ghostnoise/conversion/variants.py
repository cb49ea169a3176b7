"""Forms of our layers that only conversion makes: with timm's drop and act, and still lazy."""

from typing import Any

from torch import Tensor, nn

from ghostnoise.layers import (
    AnalyticalGhostNoiseBatchNorm2d,
    BatchNorm2d,
    EvalNorm2d,
    ExclusiveBatchNorm2d,
    GhostBatchNorm2d,
    GhostNoiseBatchNorm2d,
)
from ghostnoise.layers.batch_norm import BatchNorm


class Activated(BatchNorm):
    """Batch norm, then the `drop` and the `act` that a layer such as timm's BatchNormAct2d has."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, drop, and activate."""
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


class ActivatedBatchNorm2d(Activated, BatchNorm2d):
    """Batch norm, drop and act of (B, C, H, W)."""


class ActivatedGhostBatchNorm2d(Activated, GhostBatchNorm2d):
    """Ghost batch norm, drop and act of (B, C, H, W)."""


class ActivatedExclusiveBatchNorm2d(Activated, ExclusiveBatchNorm2d):
    """Exclusive batch norm, drop and act of (B, C, H, W)."""


class ActivatedEvalNorm2d(Activated, EvalNorm2d):
    """EvalNorm, drop and act of (B, C, H, W)."""


class ActivatedGhostNoiseBatchNorm2d(Activated, GhostNoiseBatchNorm2d):
    """Batch norm with ghost noise, drop and act of (B, C, H, W)."""


class ActivatedAnalyticalGhostNoiseBatchNorm2d(Activated, AnalyticalGhostNoiseBatchNorm2d):
    """Batch norm with analytical ghost noise, drop and act of (B, C, H, W)."""


class Lazy(nn.modules.batchnorm._LazyNormBase):
    """A lazy batch norm that becomes the layer `cls_to_become`, which conversion sets with the options beside it."""

    cls_to_become: Any

    def forward(self, x: Tensor) -> Tensor:
        """Run as the layer that this has become: torch looks `forward` up before the hook that changes the class."""
        y: Tensor = self.cls_to_become.forward(self, x)
        return y

    def initialize_parameters(self, input: Tensor) -> None:
        """Take the number of channels from the input, or from a state_dict that was loaded before."""
        super().initialize_parameters(input)
        known = [tensor.shape[0] for tensor in (self.weight, self.running_mean) if tensor is not None]
        self.num_features = known[0] if known else input.shape[1]


class LazyNorm1d(Lazy, nn.LazyBatchNorm1d):
    """Lazy, of (B, C) and (B, C, L)."""


class LazyNorm2d(Lazy, nn.LazyBatchNorm2d):
    """Lazy, of (B, C, H, W)."""


class LazyNorm3d(Lazy, nn.LazyBatchNorm3d):
    """Lazy, of (B, C, D, H, W)."""

"""Norms with any noise inside or after them, and with the parameters, buffers and keys of the plain norm."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise import functional
from ghostnoise.methods.batch_norm import BatchNorm
from ghostnoise.tracing import Leaf


class Noisy(Leaf):
    """Mixed into a norm: noise between its normalization and its affine if `inside`, else after both."""

    weight: Any
    bias: Any

    def __init__(self, *arguments: Any, noise: nn.Module, inside: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise, self.inside = noise, inside

    def normalize(self, x: Tensor) -> Tensor:
        """The norm without its affine."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, inject noise, and apply the affine, in the order that was asked for."""
        if not self.inside:
            y: Tensor = self.noise(super().forward(x))
            return y
        return self.scale_and_shift(self.noise(self.normalize(x)))

    def scale_and_shift(self, y: Tensor) -> Tensor:
        """Scale and shift each channel; channels come first."""
        shape = (-1, *(1 for _ in range(y.ndim - 2)))
        scaled: Tensor = y * self.weight.view(shape) + self.bias.view(shape)
        return scaled


class NoisyBatchNorm(Noisy, BatchNorm):
    """Batch norm with noise."""

    def normalize(self, x: Tensor) -> Tensor:
        """With the batch's statistics in training, with the running ones in eval."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, None, None, self.training, self.momentum, self.eps,
            num_batches_tracked=self.num_batches_tracked, process_group=self.process_group, uneven=self.uneven,
        )  # fmt: skip


class NoisyBatchNorm1d(NoisyBatchNorm, nn.BatchNorm1d):
    """Batch norm with noise of (B, C)."""

    ndims = (2, 3)


class NoisyBatchNorm2d(NoisyBatchNorm, nn.BatchNorm2d):
    """Batch norm with noise of (B, C, H, W)."""

    ndims = (4,)


class NoisyGroupNorm(Noisy, nn.GroupNorm):
    """Group norm with noise of (B, C, H, W)."""

    def normalize(self, x: Tensor) -> Tensor:
        """Each sample with its own statistics."""
        return F.group_norm(x, self.num_groups, None, None, self.eps)


class NoisyLayerNorm(Noisy, nn.LayerNorm):
    """Layer norm with noise of tokens (B, T, C)."""

    def normalize(self, x: Tensor) -> Tensor:
        """Each token with its own statistics."""
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps)

    def scale_and_shift(self, y: Tensor) -> Tensor:
        """Scale and shift each channel; channels come last."""
        scaled: Tensor = y * self.weight + self.bias
        return scaled

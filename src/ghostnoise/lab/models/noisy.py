"""Norms with any noise layer inside or after them; parameters, buffers and state_dict keys are those of the norm."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise import functional
from ghostnoise.methods.batch_norm import BatchNorm
from ghostnoise.tracing import Leaf


class Noisy(Leaf):
    """Mixin for norms: injects noise between normalization and affine if `inside`, otherwise after both."""

    weight: Any
    bias: Any

    def __init__(self, *arguments: Any, noise: nn.Module, inside: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise, self.inside = noise, inside

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize without the affine."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, inject noise and apply the affine, in the order that `inside` selects."""
        if not self.inside:
            y: Tensor = self.noise(super().forward(x))
            return y
        return self.affine_transform(self.noise(self.normalize(x)))

    def affine_transform(self, y: Tensor) -> Tensor:
        """Apply the affine to (B, C, ...)."""
        shape = (-1, *(1 for _ in range(y.ndim - 2)))
        scaled: Tensor = y * self.weight.view(shape) + self.bias.view(shape)
        return scaled


class NoisyBatchNorm(Noisy, BatchNorm):  # type: ignore[misc]  # forward takes no mask: images are not padded
    """Batch norm with noise, for any number of dimensions."""

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize with batch statistics in training, and with running statistics in evaluation."""
        y: Tensor = functional.batch_norm(
            x, self.running_mean, self.running_var, None, None, self.training, self.momentum, self.eps,
            num_batches_tracked=self.num_batches_tracked, process_group=self.process_group, uneven=self.uneven,
        )  # fmt: skip
        return y


class NoisyBatchNorm1d(NoisyBatchNorm, nn.BatchNorm1d):  # type: ignore[misc]  # forward takes no mask: images are not padded
    """Batch norm with noise for inputs (B, C) or (B, C, L)."""

    ndims = (2, 3)


class NoisyBatchNorm2d(NoisyBatchNorm, nn.BatchNorm2d):  # type: ignore[misc]  # forward takes no mask: images are not padded
    """Batch norm with noise for inputs (B, C, H, W)."""

    ndims = (4,)


class NoisyGroupNorm(Noisy, nn.GroupNorm):
    """Group norm with noise for inputs (B, C, H, W)."""

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize each group of channels of each sample."""
        return F.group_norm(x, self.num_groups, None, None, self.eps)


class NoisyLayerNorm(Noisy, nn.LayerNorm):
    """Layer norm with noise for tokens (B, T, C)."""

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize each token."""
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps)

    def affine_transform(self, y: Tensor) -> Tensor:
        """Apply the affine to (B, T, C)."""
        scaled: Tensor = y * self.weight + self.bias
        return scaled

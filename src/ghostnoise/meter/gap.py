"""Training against inference: what each method makes of a batch, and what the running statistics make of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostnoise import functional
from ghostnoise.ghosts import ghost_sizes
from ghostnoise.meter.curves import largest_normalized
from ghostnoise.meter.histogram import Array

METHODS = ("bn", "gbn", "xbn", "gni")


@dataclass(frozen=True, eq=False)
class Gap:
    """What a method's normalized output (before weight and bias) is in training, against inference.

    Of each channel (C,); against inference NaN for a layer without running statistics.
    """

    difference: Array
    """Mean absolute difference of the two outputs."""
    relative: Array
    """The same over the mean absolute output at inference."""
    largest: Array
    """The largest absolute output in training."""
    range_ratio: Array
    """The same over the largest at inference."""
    bound: float
    """What `largest` cannot exceed, sqrt(n·S - 1) for n samples; infinite where nothing bounds it."""
    self_share: float
    """A sample's share in its own statistics, on average; for random draws, the expected one."""


class GapSums:
    """Sums and maxima of one method over batches."""

    def __init__(self, method: str, channels: int) -> None:
        self.method = method
        self.difference, self.reference = (torch.zeros(channels, dtype=torch.float64) for _ in range(2))
        self.largest, self.largest_reference = (torch.zeros(channels, dtype=torch.float64) for _ in range(2))
        self.values, self.samples, self.share, self.bound = 0, 0, 0.0, 0.0

    def add(self, y: Tensor, inference: "Inference | None", ghost_size: int) -> None:
        """Take a batch's outputs (B, C, S)."""
        samples, _, spatial = y.shape
        sizes = [samples] if self.method in ("bn", "gni") else ghost_sizes(samples, ghost_size)
        self.samples += samples
        self.share += 0 if self.method == "xbn" else len(sizes)
        self.bound = max(self.bound, largest_normalized(max(sizes) * spatial))
        self.largest = torch.maximum(self.largest, _largest(y))
        if inference is not None:
            self.values += samples * spatial
            self.difference += _total(y - inference.y)
            self.reference += inference.total
            self.largest_reference = torch.maximum(self.largest_reference, inference.largest)

    def result(self) -> Gap:
        """What was gathered so far."""
        with np.errstate(divide="ignore", invalid="ignore"):
            difference, reference = self.difference.numpy(), self.reference.numpy()
            largest = self.largest.numpy().copy()
            return Gap(
                difference=difference / self.values if self.values else np.full_like(difference, np.nan),
                relative=difference / reference,
                largest=largest,
                range_ratio=largest / self.largest_reference.numpy() if self.values else np.full_like(largest, np.nan),
                bound=self.bound if self.method in ("bn", "gbn") else float("inf"),
                self_share=self.share / self.samples,
            )


def outputs(
    x: Tensor, channel_dim: int, ghost_size: int, eps: float, indices: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """What makes each method's normalized output of x in training; a call may refuse a batch that is too small."""
    plain = partial(_trained, x, channel_dim=channel_dim, eps=eps)
    return {
        "bn": partial(plain, functional.batch_norm),
        "gbn": partial(plain, functional.ghost_batch_norm, ghost_size=ghost_size),
        "xbn": partial(plain, functional.exclusive_batch_norm, ghost_size=ghost_size),
        "gni": partial(plain, _noisy, ghost_size=ghost_size, indices=indices),
    }


def _trained(x: Tensor, function: Callable[..., Tensor], **options: object) -> Tensor:
    return function(x, None, None, None, None, True, **options)


def _noisy(x: Tensor, *given: Any, ghost_size: int, channel_dim: int, **options: Any) -> Tensor:
    if ghost_size * x.numel() == x.shape[0] * x.shape[channel_dim]:
        raise ValueError(
            f"ghost_size=1 on samples of shape {tuple(x.shape[1:])}: a ghost batch of a single value has no variance, "
            "so gni would divide by sqrt(eps); raise ghost_size"
        )
    return functional.ghost_noise_batch_norm(x, *given, ghost_size=ghost_size, channel_dim=channel_dim, **options)


class Inference(NamedTuple):
    """A batch's normalized output at inference (B, C, S); the sum and the largest of its absolute values (C,)."""

    y: Tensor
    total: Tensor
    largest: Tensor


def inferred(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Inference:
    """What running statistics make of x (B, C, S)."""
    mean, var = (table.to(x)[:, None] for table in (mean, var))
    y = (x - mean).mul_((var + eps).rsqrt())
    return Inference(y, _total(y), _largest(y))


def _total(y: Tensor) -> Tensor:
    """The sum of absolute values, of each channel."""
    sums: Tensor = torch.linalg.vector_norm(y, 1, dim=2)
    return sums.cpu().double().sum(0)


def _largest(y: Tensor) -> Tensor:
    """The largest absolute value, of each channel."""
    found: Tensor = torch.linalg.vector_norm(y, math.inf, dim=(0, 2))
    return found.cpu().double()

"""Difference between training and inference: each method's output on a batch against that of running statistics."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostnoise import functional
from ghostnoise.meter.theory import Array, normalized_bound
from ghostnoise.methods import registry
from ghostnoise.methods.registry import MeterSpec, MethodSpec
from ghostnoise.randomness import draw_rows
from ghostnoise.tables import ghost_sizes

METHODS = {name: spec for name, spec in registry.specs().items() if spec.meter is not None}
"""The methods that are measured: their gaps, and for those with `sampling` their noise."""


def meter_spec(method: MethodSpec) -> MeterSpec:
    """How a method of `METHODS` is measured."""
    assert method.meter is not None
    return method.meter


@dataclass(frozen=True, eq=False, repr=False)
class Gap:
    """Normalized output of a method in training, before weight and bias, compared with inference.

    Arrays have one entry per channel (C,). Comparisons with inference are NaN for layers without running statistics.
    """

    difference: Array
    """Mean absolute difference between the outputs in training and at inference."""
    relative: Array
    """`difference` divided by the mean absolute output at inference."""
    largest: Array
    """Largest absolute output in training."""
    range_ratio: Array
    """`largest` divided by the largest absolute output at inference."""
    systematic: Array
    """Squared difference between the expected output in training, over random ghost batches, and that at inference,
    divided by the squared output at inference; means over all values. An unbiased estimate, which can be below 0."""
    random: Array
    """Variance of the output in training over random ghost batches, divided likewise: `systematic` + `random` is the
    mean squared difference between the outputs in training and at inference."""
    bound: float
    """Upper bound of `largest`: sqrt(n·S - 1) for statistics of n samples; infinite for methods without a bound."""
    self_share: float
    """Average weight of a sample in its own statistics; for random draws, its expectation."""

    def __repr__(self) -> str:
        return (
            f"Gap({len(self.largest)} channels, difference={channel_mean(self.difference):.3g}, "
            f"relative={channel_mean(self.relative):.3g}, largest={self.largest.max(initial=0):.3g}, "
            f"range_ratio={channel_mean(self.range_ratio):.3g}, "
            f"systematic={root_mean(self.systematic):.3g}, random={root_mean(self.random):.3g}, "
            f"bound={self.bound:.3g}, self_share={self.self_share:.3g})"
        )


class Inference(NamedTuple):
    """Normalized output of a batch at inference (B, C, S).

    Also the sum and the maximum of its absolute values, and the sum of its squares, each (C,).
    """

    y: Tensor
    total: Tensor
    largest: Tensor
    squares: Tensor


class GhostBatches(NamedTuple):
    """The ghost batches of one pass: the order of the samples in which methods split them, and those that GNI draws."""

    order: Tensor | None
    """(B,); None is the order of the batch."""
    indices: Tensor
    """(B, N)."""

    @classmethod
    def draw(cls, x: Tensor, ghost_size: int, generator: torch.Generator, shuffle: bool) -> "GhostBatches":
        """Draw ghost batches for the batch x on the CPU, so that they do not depend on its device."""
        order = torch.randperm(x.shape[0], generator=generator).to(x.device) if shuffle else None
        indices = draw_rows(x.shape[0], x.shape[0], ghost_size, torch.device("cpu"), generator)
        return cls(order, indices.to(x.device))


class GapAccumulator:
    """Sums and maxima over the batches that one method has normalized."""

    def __init__(self, method: MethodSpec, channels: int) -> None:
        self.method = method
        self.difference, self.reference = (torch.zeros(channels, dtype=torch.float64) for _ in range(2))
        self.largest, self.largest_reference = (torch.zeros(channels, dtype=torch.float64) for _ in range(2))
        # Sums of squares of the two parts of the difference, and of the output at inference.
        self.systematic, self.random, self.squares = (torch.zeros(channels, dtype=torch.float64) for _ in range(3))
        self.values, self.samples, self.self_weight, self.bound = 0, 0, 0.0, 0.0

    def add(
        self, y: Tensor, again: Tensor, inference: Inference | None, ghost_size: int, counts: Tensor | None = None
    ) -> None:
        """Add the normalized output of a batch in training (B, C, S), and that with other ghost batches, `again`.

        With the samples' numbers of valid positions `counts` (B, 1), all outputs are 0 at all other positions.
        """
        samples, _, spatial = y.shape
        pools = ghost_sizes(samples, ghost_size) if self.method.partitions else [samples]
        values = (
            [size * spatial for size in pools] if counts is None else [int(part.sum()) for part in counts.split(pools)]
        )
        self.samples += samples
        self.self_weight += (
            0 if meter_spec(self.method).excludes_self else len(pools)
        )  # n samples of weight 1/n in each pool
        self.bound = max(self.bound, normalized_bound(max(values)))
        self.largest = torch.maximum(self.largest, _largest(y))
        if inference is not None:
            self.values += sum(values)
            self.difference += _total(y - inference.y)
            self.reference += inference.total
            self.largest_reference = torch.maximum(self.largest_reference, inference.largest)
            # The product of two independent deviations has the squared expected deviation as its expectation.
            self.systematic += _sum((y - inference.y) * (again - inference.y))
            self.random += _sum((y - again).square()) / 2
            self.squares += inference.squares

    def result(self) -> Gap:
        """The gap over all batches so far."""
        difference, reference, squares = self.difference.numpy(), self.reference.numpy(), self.squares.numpy()
        largest, unknown = self.largest.numpy().copy(), np.full(len(difference), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            return Gap(
                difference=difference / self.values if self.values else unknown,
                relative=difference / reference,
                largest=largest,
                range_ratio=largest / self.largest_reference.numpy() if self.values else unknown,
                systematic=self.systematic.numpy() / squares,
                random=self.random.numpy() / squares,
                bound=self.bound if meter_spec(self.method).bounded else math.inf,
                self_share=self.self_weight / self.samples,
            )


def normalize_in_training(
    method: MethodSpec,
    x: Tensor,
    channel_dim: int,
    ghost_size: int,
    eps: float,
    ghosts: GhostBatches,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize x as `method` does in training, with the given ghost batches, and return it as (B, C, S).

    Raises ValueError if the batch has too few values for the method.
    """
    draws = meter_spec(method).sampling == "replacement"
    if draws and ghost_size * _least_values(x, channel_dim, mask) == 1:
        raise ValueError(
            f"ghost_size=1 with samples of shape {tuple(x.shape[1:])}: a ghost batch of one value per channel has no "
            "variance, and ghost noise would divide by sqrt(eps); use a larger ghost_size"
        )
    options: dict[str, Any] = {} if method.ghost_size == "none" else {"ghost_size": ghost_size}
    options |= {"indices": ghosts.indices} if draws else {}
    order = ghosts.order if method.partitions else None
    if order is not None:
        x, mask = x[order], None if mask is None else mask[order]
    assert method.norm is not None
    y = method.norm.function(x, None, None, training=True, eps=eps, channel_dim=channel_dim, mask=mask, **options)
    return fold(y if order is None else y[order.argsort()], channel_dim)


def normalize_at_inference(
    x: Tensor, channel_dim: int, running_mean: Tensor, running_var: Tensor, eps: float, mask: Tensor | None = None
) -> Inference:
    """Normalize x with running statistics (C,), as batch norm does in evaluation mode."""
    running = running_mean.to(x), running_var.to(x)
    y = functional.batch_norm(x, *running, training=False, eps=eps, channel_dim=channel_dim, mask=mask)
    folded = fold(y, channel_dim)
    return Inference(folded, _total(folded), _largest(folded), _sum(folded.square()))


def fold(x: Tensor, channel_dim: int) -> Tensor:
    """Reshape x to (B, C, S)."""
    return x.movedim(channel_dim, 1).flatten(2) if x.ndim > 2 else x.unsqueeze(2)


def channel_mean(values: Array) -> float:
    """Mean over the channels that are not NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def root_mean(values: Array) -> float:
    """Square root of the mean over the channels that are not NaN, 0 if it is negative; NaN if all are."""
    mean = channel_mean(values)
    return 0.0 if mean < 0 else math.sqrt(mean)


def _least_values(x: Tensor, channel_dim: int, mask: Tensor | None) -> int:
    """Return the number of values per channel of the sample that has the fewest."""
    if mask is None:
        return math.prod(x.shape[1:]) // x.shape[channel_dim]
    return int(mask.unsqueeze(1).flatten(1).sum(1).min())


def _total(y: Tensor) -> Tensor:
    """Sum of absolute values, per channel (C,)."""
    sums: Tensor = torch.linalg.vector_norm(y, 1, dim=2)
    return sums.cpu().double().sum(0)


def _sum(y: Tensor) -> Tensor:
    """Sum of the values, per channel (C,)."""
    return y.sum(2).cpu().double().sum(0)


def _largest(y: Tensor) -> Tensor:
    """Largest absolute value, per channel (C,)."""
    largest: Tensor = torch.linalg.vector_norm(y, math.inf, dim=(0, 2))
    return largest.cpu().double()

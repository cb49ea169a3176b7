"""Distributions that are gathered a batch at a time, in memory that does not grow with the batches."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]

BINS = 256
NARROWEST, WIDEST = 0.02, 32.0  # about where bins begin to widen, and where they end, in units of 1/sqrt(ghost_size)
MOMENTS = 4


@dataclass(frozen=True, eq=False)
class Distribution:
    """What was drawn in each channel: a histogram and moments, of NaN for a channel in which nothing was.

    Bins are narrow around `center`, where the noise of a wide image lies, and widen to both sides; the first and the
    last of `counts` (C, K + 2) lie outside of the `edges` (K + 1).
    """

    center: float
    edges: Array
    counts: Array
    mean: Array
    var: Array
    skewness: Array
    kurtosis: Array
    """In excess of a normal distribution's, 0."""

    @property
    def n(self) -> Array:
        """How many were drawn in each channel (C,)."""
        total: Array = self.counts.sum(1)
        return total

    @property
    def std(self) -> Array:
        """The standard deviation (C,)."""
        root: Array = np.sqrt(self.var)
        return root

    def cdf(self) -> Array:
        """The share that was drawn below each edge (C, K + 1)."""
        with np.errstate(invalid="ignore"):
            below: Array = self.counts.cumsum(1)[:, :-1] / self.n[:, None]
        return below

    def density(self) -> Array:
        """The density in each bin between the edges (C, K)."""
        slope: Array = np.diff(self.cdf(), axis=1) / np.diff(self.edges)
        return slope

    def pooled(self) -> "Distribution":
        """The distribution of what was drawn in all channels, as one channel."""
        live = self.n > 0
        if not live.any():
            return Distribution(
                self.center, self.edges, self.counts[:1], self.mean[:1], self.var[:1], self.skewness[:1],
                self.kurtosis[:1],
            )  # fmt: skip
        mean, var = self.mean[live], self.var[live]
        raw = _raw_moments(mean - self.center, var, self.skewness[live], self.kurtosis[live])
        raw = np.average(raw, axis=1, weights=self.n[live], keepdims=True)
        counts = self.counts[live].sum(0, keepdims=True, dtype=np.int64)
        return Distribution(self.center, self.edges, counts, *_central(raw, self.center))


class Gathering:
    """Gathers a `Distribution` of values that lie around `center`, 0 or 1, within about 1/sqrt(ghost_size)."""

    def __init__(self, center: float, ghost_size: int, channels: int) -> None:
        unit = ghost_size**-0.5
        steps = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64) * math.asinh(WIDEST / NARROWEST)
        edges = center + unit * NARROWEST * steps.sinh()
        self.edges = edges if center == 0 else torch.cat([edges.new_zeros(1), edges[edges > 0]])  # no variance is less
        self.center = center
        self.counts = torch.zeros(channels, len(self.edges) + 1, dtype=torch.int64)
        self.sums = torch.zeros(MOMENTS, channels, dtype=torch.float64)  # of powers of what lies beside the center

    def add(self, values: Tensor, live: Tensor, weight: int) -> None:
        """Take values (R, C) of the `live` channels, each as often as `weight` says."""
        places = torch.bucketize(values, self.edges, right=True).add_(torch.arange(len(live)) * self.counts.shape[1])
        found = torch.bincount(places.flatten(), minlength=self.counts.numel()).view_as(self.counts)
        self.counts += found * (weight * live[:, None])
        beside = values - self.center
        power = beside * (weight * live)
        self.sums[0] += power.sum(0)
        for order in range(1, MOMENTS):
            self.sums[order] += power.mul_(beside).sum(0)

    def result(self) -> Distribution:
        """What was gathered so far."""
        n = self.counts.sum(1).double().numpy()
        with np.errstate(invalid="ignore"):
            raw = self.sums.numpy() / n
        return Distribution(self.center, self.edges.numpy(), self.counts.numpy().copy(), *_central(raw, self.center))


def _central(raw: Array, center: float) -> tuple[Array, Array, Array, Array]:
    """Mean, variance, skewness and excess kurtosis, from the mean powers 1 to 4 of what lies beside the center."""
    first, second, third, fourth = raw
    var = np.maximum(second - first**2, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        skewness = (third - 3 * first * second + 2 * first**3) / var**1.5
        kurtosis = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4) / var**2 - 3
    return center + first, var, skewness, kurtosis


def _raw_moments(first: Array, var: Array, skewness: Array, kurtosis: Array) -> Array:
    """`_central` undone; a channel without variance has neither skewness nor kurtosis."""
    third, fourth = np.nan_to_num(skewness) * var**1.5, (np.nan_to_num(kurtosis) + 3) * var**2
    return np.stack(
        [
            first,
            var + first**2,
            third + 3 * first * var + first**3,
            fourth + 4 * first * third + 6 * first**2 * var + first**4,
        ]
    )

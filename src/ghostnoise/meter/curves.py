"""The analytical laws of ghost noise as cumulative distributions, to hold what was measured against.

`laws` has the laws themselves, and draws from them. All are those of a channel of unit variance.
"""

import math
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import torch

from ghostnoise.laws import Dof, Kind
from ghostnoise.meter.histogram import Array

Part: TypeAlias = Literal["shift", "scale"]
LAWS: dict[str, tuple[Kind, Dof]] = {
    "fc": ("fc", "paper"), "fc-exact": ("fc", "exact"), "conv": ("conv", "paper"), "conv-exact": ("conv", "exact"),
}  # fmt: skip
SMOOTH = 8  # degrees of freedom of a smooth distribution
NODES, QUANTILES = 24, 200
TABLE = 8192  # places of an interpolated distribution


def law_cdf(
    law: str, part: Part, at: Array, ghost_size: int, spatial: float = 1, within: Array | None = None,
    between: Array | None = None,
) -> Array:  # fmt: skip
    """The share of ghost batches whose mean (`part` "shift") or variance ("scale") lies below `at` (K,): (C, K).

    `law` is one of `LAWS`: "fc" and "conv" are the paper's (eqs. 11-12, 15-16), "…-exact" take squares around the ghost
    batch's own mean. The convolutional ones need the channels' variances `within` and `between` samples (C,), in
    samples of `spatial` positions. The shift has the same law either way.
    """
    kind, dof = LAWS[law]
    if kind == "fc" or within is None or between is None:
        within, between = np.zeros(1), np.ones(1)
    terms = ghost_size * spatial
    if part == "shift":
        below = _normal_cdf(at, np.sqrt(within / terms + between / ghost_size))
    elif dof == "paper":
        below = _mixture_cdf(at, within / terms, terms, between / ghost_size, ghost_size)
    else:
        around = (between + within / spatial) / ghost_size
        below = _mixture_cdf(at, within / terms, terms - ghost_size, around, ghost_size - 1)
    below[np.isnan(within + between)] = np.nan
    return below


def distance(measured: Array, law: Array) -> Array:
    """The Kolmogorov-Smirnov distance of two cumulative distributions at the same places (..., K): (...)."""
    largest: Array = np.abs(measured - law).max(-1)
    return largest


def _normal_cdf(at: Array, std: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(std[:, None] > 0, at / std[:, None], np.sign(at) * np.inf)
    below: Array = torch.special.ndtr(torch.from_numpy(np.nan_to_num(scaled, nan=0.0))).numpy()
    return below


def _mixture_cdf(at: Array, a: Array, a_degrees: float, b: Array, b_degrees: float) -> Array:
    """Of a·χ²(a_degrees) + b·χ²(b_degrees), for each channel (C, K).

    The narrower of the two is integrated out: by Gauss quadrature, and where the wider one has few degrees of freedom,
    and so no smooth distribution, by its quantiles.
    """
    out = np.empty((len(a), len(at)))
    a_is_wider = a**2 * a_degrees > b**2 * b_degrees
    for wider, factors, degrees, others, other_degrees in (
        (a_is_wider, a, a_degrees, b, b_degrees),
        (~a_is_wider, b, b_degrees, a, a_degrees),
    ):
        if wider.any():
            out[wider] = _integrated(at, factors[wider], degrees, others[wider], other_degrees)
    return out


def _integrated(at: Array, factor: Array, degrees: float, other: Array, other_degrees: float) -> Array:
    total = np.zeros((len(factor), len(at)))
    nodes, weights = _nodes(other_degrees, degrees >= SMOOTH) if other.any() else (np.zeros(1), np.ones(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        for node, weight in zip(nodes, weights, strict=True):
            rest = (at - other[:, None] * node) / factor[:, None]
            total += weight * _chi_square_cdf(np.nan_to_num(rest, nan=0.0), degrees)
    return total


def _chi_square_cdf(at: Array, degrees: float) -> Array:
    if degrees <= 0:  # always 0, which is not below 0
        return (at > 0).astype(float)
    return np.interp(at, *_chi_square_table(degrees), left=0, right=1)


@lru_cache(maxsize=64)
def _chi_square_table(degrees: float) -> tuple[Array, Array]:
    """The distribution on a grid from 0 to where nothing is left; finest at 0, where few degrees of freedom rise."""
    width = math.sqrt(2 * degrees)
    low, high = max(degrees - 12 * width, 0) ** 0.5, (degrees + 12 * width + 50) ** 0.5
    grid = torch.linspace(low, high, TABLE, dtype=torch.float64).square()
    return grid.numpy(), torch.special.gammainc(torch.full_like(grid, degrees / 2), grid / 2).numpy()


@lru_cache(maxsize=64)
def _nodes(degrees: float, smooth: bool) -> tuple[Array, Array]:
    """Where to evaluate an average under χ²(degrees), and with which weights.

    For a `smooth` function, these are the nodes of Gauss quadrature as Golub and Welsch (1969) find them.
    """
    if degrees <= 0:
        return np.zeros(1), np.ones(1)
    if not smooth:
        grid, below = _chi_square_table(degrees)
        return np.interp((np.arange(QUANTILES) + 0.5) / QUANTILES, below, grid), np.full(QUANTILES, 1 / QUANTILES)
    alpha, order = degrees / 2 - 1, np.arange(NODES)
    beside = np.sqrt(order[1:] * (order[1:] + alpha))
    nodes, vectors = np.linalg.eigh(np.diag(2 * order + alpha + 1) + np.diag(beside, 1) + np.diag(beside, -1))
    return 2 * np.maximum(nodes, 0), vectors[0] ** 2


def effective_size(part: Part, var: Array, dof: Dof = "exact") -> Array:
    """The N at which the fully connected law is as strong as noise of this variance; NaN where none is.

    Shift noise has the variance 1/N, scale noise 2·(N-1)/N², which is 1/2 at most; in the paper 2/N.
    """
    var = np.asarray(var, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        if part == "shift":
            return 1 / var
        if dof == "paper":
            return 2 / var
        size: Array = (1 + np.sqrt(1 - 2 * var)) / var
    return size


def largest_normalized(values: float) -> float:
    """The bound of what is normalized with `values` values that it is one of: sqrt(values - 1)."""
    return math.sqrt(max(values - 1, 0))

"""Theoretical distributions of ghost noise, as cumulative distribution functions to compare measurements with.

Ghost noise has two components. For a ghost batch with mean m and variance s², drawn from a batch with mean μ and
variance σ², they are

    shift = (m - μ) / σ        scale = s² / σ²

The distributions below are those of a channel with unit variance. `ghostnoise.laws` samples from the same
laws; this module evaluates them.
"""

import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ghostnoise.laws import Dof

Array: TypeAlias = NDArray[Any]
Component: TypeAlias = Literal["shift", "scale"]

COMPONENTS: tuple[Component, Component] = ("shift", "scale")
# The name of each law, and the `law=` and `dof=` arguments of analytical ghost noise that it corresponds to.
LAWS: dict[str, tuple[Literal["fc", "conv"], Dof]] = {
    "fc": ("fc", "paper"), "fc-exact": ("fc", "exact"), "conv": ("conv", "paper"), "conv-exact": ("conv", "exact"),
}  # fmt: skip

SMOOTH_DEGREES = 8  # a χ² distribution with this many degrees of freedom is smooth enough for Gauss quadrature
QUADRATURE_NODES, QUANTILES = 24, 200
TABLE_SIZE = 8192  # grid points of a tabulated χ² distribution


def laws_of(component: Component) -> tuple[str, ...]:
    """Names of the laws that apply to a component.

    The "exact" laws differ from the paper's in the variance of a ghost batch only, so the shift has no separate one.
    """
    return tuple(law for law, (_, dof) in LAWS.items() if component == "scale" or dof == "paper")


def law_cdf(
    law: str,
    component: Component,
    at: Array,
    ghost_size: int,
    spatial: float = 1,
    within: Array | None = None,
    between: Array | None = None,
) -> Array:
    """Evaluate the cumulative distribution function of a noise component.

    Args:
        law: a key of `LAWS`. "fc" and "conv" are the paper's laws (eqs. 11-12 and 15-16), which measure squares around
            the true mean; "fc-exact" and "conv-exact" measure them around the mean of the ghost batch.
        component: "shift" or "scale".
        at: points at which to evaluate the function (K,).
        ghost_size: samples in a ghost batch, N.
        spatial: positions in a sample, S.
        within: variance inside samples, per channel (C,). Required by the convolutional laws, as is `between`.
        between: variance between samples, per channel (C,).

    Returns:
        Probabilities (C, K); (1, K) for the fully connected laws, which are the same for every channel. Channels with
        NaN variances get NaN.
    """
    kind, dof = LAWS[law]
    if kind == "fc" or within is None or between is None:
        within, between = np.zeros(1), np.ones(1)
    values = ghost_size * spatial
    if component == "shift":
        cdf = _normal_cdf(at, np.sqrt(within / values + between / ghost_size))
    elif dof == "paper":
        cdf = _chi_square_sum_cdf(at, within / values, values, between / ghost_size, ghost_size)
    else:
        around = (between + within / spatial) / ghost_size
        cdf = _chi_square_sum_cdf(at, within / values, values - ghost_size, around, ghost_size - 1)
    cdf[np.isnan(within + between)] = np.nan
    return cdf


def kolmogorov_smirnov(cdf: Array, other: Array) -> Array:
    """Kolmogorov-Smirnov distance of two distributions, given their CDFs at the same points (..., K): (...)."""
    distance: Array = np.abs(cdf - other).max(-1)
    return distance


def effective_size(component: Component, var: Array, dof: Dof = "exact") -> Array:
    """Ghost size N at which a fully connected layer has noise of variance `var`; NaN if there is none.

    The variance of the shift is 1/N. That of the scale is 2·(N-1)/N², which is at most 1/2, or 2/N in the paper.
    """
    var = np.asarray(var, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        if component == "shift":
            return 1 / var
        if dof == "paper":
            return 2 / var
        size: Array = (1 + np.sqrt(1 - 2 * var)) / var
    return size


def normalized_bound(values: float) -> float:
    """Largest absolute value that normalization with the statistics of `values` values can give to one of them."""
    return math.sqrt(max(values - 1, 0))


def _normal_cdf(at: Array, std: Array) -> Array:
    """CDF of N(0, std²) for each of the standard deviations (C,): (C, K)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        standardized = np.where(std[:, None] > 0, at / std[:, None], np.sign(at) * np.inf)
    cdf: Array = torch.special.ndtr(torch.from_numpy(np.nan_to_num(standardized, nan=0.0))).numpy()
    return cdf


def _chi_square_sum_cdf(at: Array, a: Array, a_degrees: float, b: Array, b_degrees: float) -> Array:
    """CDF of a·χ²(a_degrees) + b·χ²(b_degrees) for each channel: (C, K).

    The term with the smaller variance is integrated out numerically, since the CDF of the other one then varies little
    between the nodes.
    """
    cdf = np.empty((len(a), len(at)))
    a_is_wider = a**2 * a_degrees > b**2 * b_degrees
    for channels, wide, wide_degrees, narrow, narrow_degrees in (
        (a_is_wider, a, a_degrees, b, b_degrees),
        (~a_is_wider, b, b_degrees, a, a_degrees),
    ):
        if channels.any():
            cdf[channels] = _integrate_out(at, wide[channels], wide_degrees, narrow[channels], narrow_degrees)
    return cdf


def _integrate_out(at: Array, wide: Array, wide_degrees: float, narrow: Array, narrow_degrees: float) -> Array:
    """CDF of wide·χ²(wide_degrees) + narrow·χ²(narrow_degrees), averaged over the second term."""
    cdf = np.zeros((len(wide), len(at)))
    smooth = wide_degrees >= SMOOTH_DEGREES
    nodes, weights = _integration_nodes(narrow_degrees, smooth) if narrow.any() else (np.zeros(1), np.ones(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        for node, weight in zip(nodes, weights, strict=True):
            remainder = (at - narrow[:, None] * node) / wide[:, None]
            cdf += weight * _chi_square_cdf(np.nan_to_num(remainder, nan=0.0), wide_degrees)
    return cdf


def _chi_square_cdf(at: Array, degrees: float) -> Array:
    if degrees <= 0:  # the constant 0: the probability of a value strictly below 0 is 0
        return (at > 0).astype(float)
    return np.interp(at, *_chi_square_table(degrees), left=0, right=1)


@lru_cache(maxsize=64)
def _chi_square_table(degrees: float) -> tuple[Array, Array]:
    """Grid and CDF of χ²(degrees). The grid is finest at 0, where the CDF is steep for few degrees of freedom."""
    std = math.sqrt(2 * degrees)
    low, high = max(degrees - 12 * std, 0) ** 0.5, (degrees + 12 * std + 50) ** 0.5
    grid = torch.linspace(low, high, TABLE_SIZE, dtype=torch.float64).square()
    return grid.numpy(), torch.special.gammainc(torch.full_like(grid, degrees / 2), grid / 2).numpy()


@lru_cache(maxsize=64)
def _integration_nodes(degrees: float, smooth: bool) -> tuple[Array, Array]:
    """Nodes and weights for the expectation of a function of a χ²(degrees) variable.

    For a `smooth` function these are generalized Gauss-Laguerre nodes, computed as eigenvalues (Golub and Welsch,
    1969). For others, which Gauss quadrature does not approximate well, they are quantiles of equal weight.
    """
    if degrees <= 0:
        return np.zeros(1), np.ones(1)
    if not smooth:
        grid, cdf = _chi_square_table(degrees)
        return np.interp((np.arange(QUANTILES) + 0.5) / QUANTILES, cdf, grid), np.full(QUANTILES, 1 / QUANTILES)
    alpha, order = degrees / 2 - 1, np.arange(QUADRATURE_NODES)
    off_diagonal = np.sqrt(order[1:] * (order[1:] + alpha))
    jacobi = np.diag(2 * order + alpha + 1) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return 2 * np.maximum(nodes, 0), vectors[0] ** 2

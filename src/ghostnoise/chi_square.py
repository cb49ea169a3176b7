"""χ² numbers as a function of standard normal ones: the quantile of χ² at the normal number's probability.

The function is tabulated once for each number of degrees of freedom, as a piecewise cubic polynomial, so that every
device computes it with a few operations. It is monotonic and has no rejections, so every draw takes equally long.
"""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.floating[Any]]

# Also in `engine/native/src/law.h`. Normal numbers that are computed from uniform ones of 32 bits lie within ±6.7.
LOWEST, PER_UNIT, INTERVALS = -7, 16, 224
EXPANDED = 2000  # degrees of freedom from which on the expansion of the quantile errs by at most 2e-8 of its deviation


def chi_square_mean(z: Tensor, degrees: int) -> Tensor:
    """Return the quantile of χ² with these degrees of freedom, divided by its mean, at standard normal numbers."""
    table = torch.as_tensor(root_table(degrees), dtype=z.dtype, device=z.device)
    place = (z - LOWEST) * PER_UNIT
    interval = place.long().clamp(0, INTERVALS - 1)
    at = place - interval
    constant, first, second, third = (row[interval] for row in table)
    root: Tensor = ((third * at + second) * at + first) * at + constant
    return root * root * root


@functools.lru_cache(maxsize=1024)
def root_table(degrees: int) -> Floats:
    """Return the coefficients (4, INTERVALS) of the cube root of the quantile over its mean, which is nearly linear.

    A row has those of one power of the place in the interval, from 0 to 1, the constant one first. Each cubic goes
    through four values of the function; the error is less than 1e-8.
    """
    thirds = np.arange(4) / 3
    z = LOWEST + (np.arange(INTERVALS) + thirds[:, None]) / PER_UNIT
    values = np.cbrt(_quantile(z.ravel(), degrees) / degrees).reshape(z.shape)
    return np.linalg.solve(np.vander(thirds, increasing=True), values)


def _quantile(z: Floats, degrees: int) -> Floats:
    """Return the quantile of χ² at the probability of standard normal numbers."""
    if degrees >= EXPANDED:
        return _expansion(z, degrees)
    # Newton's method for the logarithm of the smaller tail's probability, which is concave in log(x).
    tail = np.log([0.5 * math.erfc(abs(each) / math.sqrt(2)) for each in z])
    half, lower = degrees / 2, z < 0
    # Two approximations (Wilson and Hilferty; close to 0), either of which may be too small.
    near = np.maximum(1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees)), 0.0) ** 3 * half
    close = np.exp((tail + math.lgamma(half + 1)) / half)
    log_x = np.log(np.where(lower, np.maximum(near, close), near))
    for _ in range(50):
        log_probability, log_density = _log_tail(half, np.exp(log_x), lower)
        step = (log_probability - tail) * np.exp(log_probability - log_density)
        log_x -= np.where(lower, step, -step).clip(-1, 1)
        if np.abs(step).max() < 1e-13:
            break
    quantile: Floats = 2 * np.exp(log_x)
    return quantile


def _log_tail(half: float, x: Floats, lower: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the logarithms of the lower or upper tail of the gamma distribution at x, and of x times its density."""
    log_density = half * np.log(x) - x - math.lgamma(half)
    term = total = np.full_like(x, 1 / half)  # the series of the lower tail
    count = 0
    while (term > 1e-17 * total).any():
        count += 1
        term = term * x / (half + count)
        total = total + term
    below = log_density + np.log(total)
    # The continued fraction of the upper tail (Lentz); where x is small, the complement is accurate.
    fraction = _upper_fraction(half, np.maximum(x, half + 1))
    above = np.where(x > half + 1, log_density + np.log(fraction), np.log1p(-np.exp(np.minimum(below, -1e-16))))
    return np.where(lower, below, above), log_density


def _upper_fraction(half: float, x: Floats) -> Floats:
    b = x + 1 - half
    c, d = np.full_like(x, 1e300), 1 / b
    value = d
    for count in range(1, 10_000):
        a = -count * (count - half)
        b = b + 2
        d, c = 1 / (a * d + b), b + a / c
        change = c * d
        value = value * change
        if np.abs(change - 1).max() < 1e-15:
            break
    return value


def _expansion(z: Floats, degrees: int) -> Floats:
    """Expand the quantile in powers of degrees**-0.5 (Cornish and Fisher)."""
    root = math.sqrt(2 / degrees)
    terms = (
        np.ones_like(z),
        z,
        (z**2 - 1) / 3,
        (z**3 - 7 * z) / 36,
        -(3 * z**4 + 7 * z**2 - 16) / 810,
        (9 * z**5 + 256 * z**3 - 433 * z) / 38880,
        (12 * z**6 - 243 * z**4 - 923 * z**2 + 1472) / 204120,
    )
    quantile: Floats = degrees * (root ** np.arange(len(terms)) @ np.stack(terms))
    return quantile

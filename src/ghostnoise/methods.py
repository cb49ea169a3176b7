"""Decide: one short pure function per method, from the batch's Moments (B, C) to the Affine that is applied to it.

A method sees nothing but these tables, so every backend serves it. To add one, write it here: instance
normalization, say, is `return standardize(moments, eps)`.
"""

from typing import NamedTuple

from torch import Tensor

from ghostnoise.ghosts import blocks, draws, everyone, others
from ghostnoise.laws import Law, LawDraws
from ghostnoise.moments import Affine, Moments


def standardize(stats: Moments, eps: float, min_std: float = 0.0) -> Affine:
    """To zero mean and unit variance under `stats`: `(x - mean) / max(sqrt(var + eps), min_std)`."""
    var = stats.var + eps
    if min_std > 0:
        var = var.clamp_min(min_std**2)  # before the root, whose gradient at 0 is not finite
    return Affine(stats.mean, var.rsqrt(), stats.mean.new_zeros(()))


def batch(moments: Moments, eps: float) -> Affine:
    """Batch normalization: everyone counts in everyone's statistics."""
    return standardize(everyone(moments), eps)


def ghost(moments: Moments, eps: float, ghost_size: int) -> Affine:
    """Ghost batch normalization (eq. 1): one's own ghost batch counts."""
    return standardize(blocks(moments, ghost_size), eps)


def exclusive(moments: Moments, eps: float, ghost_size: int | None, min_std: float) -> Affine:
    """Exclusive batch normalization (eqs. 7-8): one's own ghost batch without oneself counts."""
    return standardize(blocks(moments, ghost_size or moments.mean.shape[0], others), eps, min_std)


def mix_into(moments: Moments, eps: float, population: Moments, alpha: float) -> Affine:
    """EvalNorm at inference: the population, with oneself as the share `alpha` of it."""
    mean = (1 - alpha) * population.mean + alpha * moments.mean
    spread = alpha * (1 - alpha) * (moments.mean - population.mean).square()
    return standardize(Moments(mean, (1 - alpha) * population.var + alpha * moments.var + spread), eps)


class Injection(NamedTuple):
    """How the noise of a ghost batch enters: through its shift, its scale or both."""

    eps: float
    shift: bool
    scale: bool

    def of(self, ghost: Moments, var: Tensor) -> Affine:
        """`(x - m) / sqrt((s² + eps) / (var + eps))`, m and s² being the ghost batch's, m around the batch mean."""
        zero = var.new_zeros(())
        ratio = ((var + self.eps) / (ghost.var + self.eps)).sqrt()
        return Affine(ghost.mean if self.shift else zero, ratio if self.scale else zero + 1, zero)


def ghost_noise(moments: Moments, inject: Injection, indices: Tensor) -> Affine:
    """Ghost noise injection (eq. 10): what a random ghost batch would have done beyond the batch, as constants."""
    moments = moments.detach()
    whole, drawn = everyone(moments), draws(moments, indices)
    return inject.of(Moments(drawn.mean - whole.mean, drawn.var), whole.var)


def ghost_noise_batch(moments: Moments, eps: float, inject: Injection, indices: Tensor) -> Affine:
    """Batch normalization, then ghost noise on its output x̂ (eq. 9): constant as a function of x̂, not of x."""
    norm = batch(moments, eps)
    return norm.then(ghost_noise(norm.moments(moments), inject, indices))


def analytical_noise(moments: Moments, inject: Injection, law: Law, draws: LawDraws) -> Affine:
    """Analytical ghost noise (eqs. 11-16) in units of the batch's own variance, as constants."""
    moments = moments.detach()
    var = everyone(moments).var
    return inject.of(law.ghost_moments(draws, *law.variances(moments, var)), var)


def analytical_noise_batch(moments: Moments, eps: float, inject: Injection, law: Law, draws: LawDraws) -> Affine:
    """Batch normalization, then analytical ghost noise on its output x̂, whose variance counts as 1 (eqs. 11-16)."""
    norm = batch(moments, eps)
    hat = norm.moments(moments).detach()
    unit = hat.var.new_ones(1, hat.var.shape[1])
    return norm.then(inject.of(law.ghost_moments(draws, *law.variances(hat, unit)), unit))

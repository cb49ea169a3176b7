"""Decide: each method in one short pure function, citing its equation.

A normalizer says who counts in whose statistics. Noise says where ghost batches come from. Both see
small tables only, so every backend serves them. To add a normalizer, name who counts: instance normalization, say,
is `Normalizer(Itself(), eps)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ghostnoise.ghosts import Among, GhostBatch, Others, Who
from ghostnoise.laws import Law, LawDraws
from ghostnoise.moments import Moments


@dataclass(frozen=True)
class Normalizer:
    """Give each sample zero mean and unit variance under the statistics of who counts for it.

    y = (x - mean) · rstd        rstd = 1 / max(sqrt(var + eps), min_std)
    """

    who: Who
    eps: float
    min_std: float = 0.0

    def rstd(self, var: Tensor) -> Tensor:
        """The factor of a variance, differentiable."""
        return self._floored(var).rsqrt()

    def var_gradient(self, var: Tensor, rstd: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the variance, given that of its factor."""
        slope = -0.5 * rstd * rstd.square() * gradient
        return slope.where(var + self.eps >= self.min_std**2, 0) if self.min_std > 0 else slope

    def _floored(self, var: Tensor) -> Tensor:
        var = var + self.eps
        return (
            var.clamp_min(self.min_std**2) if self.min_std > 0 else var
        )  # before the root: its slope at 0 is infinite


def batch(eps: float) -> Normalizer:
    """Batch normalization: everyone counts for everyone."""
    return Normalizer(GhostBatch(), eps)


def ghost(eps: float, ghost_size: int | None) -> Normalizer:
    """Ghost batch normalization (eq. 1): one's own ghost batch counts."""
    return Normalizer(GhostBatch(ghost_size), eps)


def exclusive(eps: float, ghost_size: int | None, min_std: float) -> Normalizer:
    """Exclusive batch normalization (eqs. 7-8): one's own ghost batch counts, without oneself."""
    return Normalizer(Others(ghost_size), eps, min_std)


def mixed(eps: float, population: Moments, alpha: float) -> Normalizer:
    """EvalNorm at inference: the population counts, with oneself as the share `alpha` of it."""
    return Normalizer(Among(population, alpha), eps)


class Batch(NamedTuple):
    """A batch as noise sees it: the moments of its samples (B, C) and as a whole (1, C).

    `unit` is the variance that counts as 1 in what follows, where x is normalized. `draws` pools drawn samples.
    """

    moments: Moments
    whole: Moments
    unit: Tensor
    draws: Callable[[Moments, Tensor, Tensor], Moments]


@dataclass(frozen=True)
class Noise:
    """Shift and scale x as the statistics of a ghost batch would have, beyond the batch's own.

    y = (x - m) / sqrt((s² + eps) / (var + eps))        m and s²: the moments of `ghost`, m around the batch's mean

    All are constants for the gradient. Where x is `normalized`, its variance counts as 1.
    """

    ghost: Callable[[Batch], Moments]
    eps: float
    shift: bool
    scale: bool
    normalized: bool = False
    indices: Tensor | None = None  # of the drawn samples, where `ghost` draws: a backend may do both at once

    def var(self, batch: Batch) -> Tensor:
        """The batch's variance (1, C)."""
        return batch.unit if self.normalized else batch.whole.var


def ghost_noise(eps: float, shift: bool, scale: bool, indices: Tensor) -> Noise:
    """Ghost noise injection (eqs. 9-10): what a random ghost batch would have done beyond the batch."""

    def ghost(batch: Batch) -> Moments:
        return batch.draws(batch.moments, batch.whole.mean, indices)

    return Noise(ghost, eps, shift, scale, indices=indices)


def analytical_noise(
    eps: float, shift: bool, scale: bool, law: Law, law_draws: LawDraws, *, normalized: bool = False
) -> Noise:
    """Analytical ghost noise (eqs. 11-16): the ghost batch's moments come from its law."""

    def ghost(batch: Batch) -> Moments:
        return law.ghost_moments(law_draws, *law.variances(batch.moments, noise.var(batch)))

    noise = Noise(ghost, eps, shift, scale, normalized)
    return noise

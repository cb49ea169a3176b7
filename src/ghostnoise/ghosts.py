"""Who counts in whose statistics: one's ghost batch, the others in it, oneself among a population, or random draws.

Each pools per-sample moments with one row-stochastic matrix W (who looks x who is seen), in that matrix' cheap form,
by the law of total variance: with d = mean - c for any offset c,

    pooled mean = c + W d        pooled var = W (var + d²) - (W d)²

The offset decides how many digits survive, so each chooses one that is near every pool it serves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise.moments import Moments
from ghostnoise.randomness import drawn_by


class Pools(Protocol):
    """What a backend pools by itself: in consecutive ghost batches, or with `ghost_size=None` in the whole batch."""

    def everyone(self, moments: Moments, ghost_size: int | None) -> Moments:
        """The moments of each ghost batch (G, C)."""

    def others(self, moments: Moments, ghost_size: int | None) -> Moments:
        """The moments of the others in each sample's ghost batch (B, C)."""

    def everyone_ramp(
        self, pooled: Tensor, gradient: Moments, ghost_size: int | None, batch_size: int, spatial: int
    ) -> "Ramp":
        """The gradient of x through the moments of its ghost batch, given their means (G, C)."""

    def others_ramp(
        self, mean: Tensor, pooled: Tensor, gradient: Moments, ghost_size: int | None, spatial: int
    ) -> "Ramp":
        """The gradient of x through those of the others, given the samples' own means and the others' (B, C)."""


class Ramp(NamedTuple):
    """The gradient of x through its statistics: `slope * (x - center) + offset`, a row for each pool (R, C)."""

    center: Tensor
    slope: Tensor
    offset: Tensor


class Who:
    """Who counts: pools the moments of the samples (B, C) into statistics, a row for each pool (R, C).

    A new one needs `pool` alone, in differentiable PyTorch; the rest is for pools that samples share, and for closed
    forms.
    """

    def pool(self, moments: Moments, pools: Pools | None = None) -> Moments:
        """The statistics (R, C), differentiable; or by the `pools` of a backend, if it has what is needed."""
        raise NotImplementedError

    def keep(self, moments: Moments, stats: Moments) -> Moments:
        """What the gradient needs, of the moments and of the statistics that `pool` made of them."""
        return moments

    def recall(self, kept: Moments, pools: Pools) -> Moments:
        """The statistics again, from what was kept."""
        return self.pool(kept, pools)

    def each(self, batch_size: int) -> int:
        """How many consecutive samples look at the same pool; those left over look at the last one."""
        return 1

    def ramp(
        self, kept: Moments, stats: Moments, gradient: Moments, batch_size: int, spatial: int, pools: Pools
    ) -> Ramp:
        """The gradient of x, given that of the statistics (R, C); here by differentiating `pool`."""
        pull = torch.func.vjp(self.pool, kept)[1]
        ((g_mean, g_var),) = pull(Moments(*(table.to(stats.mean.dtype) for table in gradient)))
        return Ramp(kept.mean, g_var * (2 / spatial), g_mean / spatial)


@dataclass(frozen=True)
class GhostBatch(Who):
    """Everyone in one's ghost batch of `ghost_size` consecutive samples; None is the whole batch."""

    ghost_size: int | None = None

    def pool(self, moments: Moments, pools: Pools | None = None) -> Moments:
        """The moments of each ghost batch (G, C)."""
        if pools is None:
            return _in_ghost_batches(everyone, self.ghost_size, moments)
        return pools.everyone(moments, self.ghost_size)

    def keep(self, moments: Moments, stats: Moments) -> Moments:
        """The statistics alone: the samples' own moments cancel from the gradient."""
        return stats

    def recall(self, kept: Moments, pools: Pools) -> Moments:
        """The statistics, which were kept."""
        return kept

    def each(self, batch_size: int) -> int:
        """The size of a ghost batch."""
        return _first_and_last(batch_size, self.ghost_size)[0]

    def average(self, table: Tensor, batch_size: int) -> Tensor:
        """The average over samples of the row of their ghost batch (1, C)."""
        size, last = _first_and_last(batch_size, self.ghost_size)
        if size == last:
            return table.mean(0, keepdim=True)
        return (table.sum(0, keepdim=True) * size + table[-1:] * (last - size)) / batch_size

    def ramp(
        self, kept: Moments, stats: Moments, gradient: Moments, batch_size: int, spatial: int, pools: Pools
    ) -> Ramp:
        """Around the ghost batch's mean, where each of its n·S values has the same share."""
        return pools.everyone_ramp(stats.mean, gradient, self.ghost_size, batch_size, spatial)


@dataclass(frozen=True)
class Others(Who):
    """Everyone in one's ghost batch but oneself; None is the whole batch."""

    ghost_size: int | None = None

    def pool(self, moments: Moments, pools: Pools | None = None) -> Moments:
        """The moments of the others, for each sample (B, C)."""
        if pools is None:
            return _in_ghost_batches(others, self.ghost_size, moments)
        return pools.others(moments, self.ghost_size)

    def ramp(
        self, kept: Moments, stats: Moments, gradient: Moments, batch_size: int, spatial: int, pools: Pools
    ) -> Ramp:
        """Around the sample's own mean, since it may be far from the others."""
        return pools.others_ramp(kept.mean, stats.mean, gradient, self.ghost_size, spatial)


@dataclass(frozen=True)
class Itself(Who):
    """Oneself alone, as in instance normalization."""

    def pool(self, moments: Moments, pools: Pools | None = None) -> Moments:
        """The sample's own moments (B, C)."""
        return moments


@dataclass(frozen=True)
class Among(Who):
    """Oneself with the share `alpha`, in a population with moments (C,) or (1, C) for the rest."""

    population: Moments
    alpha: float

    def pool(self, moments: Moments, pools: Pools | None = None) -> Moments:
        """The moments of the mixture, for each sample (B, C)."""
        alpha, (mean, var) = self.alpha, self.population
        spread = alpha * (1 - alpha) * (moments.mean - mean).square()
        return Moments((1 - alpha) * mean + alpha * moments.mean, (1 - alpha) * var + alpha * moments.var + spread)


def everyone(mean: Tensor, var: Tensor) -> Moments:
    """Pool the n samples of tables (..., n, C): (..., 1, C)."""
    pooled = mean.mean(-2, keepdim=True)
    return Moments(pooled, (var + (mean - pooled).square()).mean(-2, keepdim=True))


def others(mean: Tensor, var: Tensor) -> Moments:
    """Pool, for each of the n samples of tables (..., n, C), all but itself: (..., n, C).

    "Total minus self" cancels when self is the outlier that dominates the total. So the most extreme sample is kept
    out of the total, and added for everyone but itself: what is then subtracted is never larger than what stays.
    """
    n = mean.shape[-2]
    if n == 2:  # the other one's own moments: a pool of one sample may be far from any offset
        return Moments(mean.flip(-2), var.flip(-2))
    extreme, center = _extreme_and_center(mean, var)

    def sum_of_others(table: Tensor) -> Tensor:
        most = table.where(extreme, 0).sum(-2, keepdim=True)
        rest = table.where(~extreme, 0).sum(-2, keepdim=True)
        return rest.where(extreme, rest - table + most)

    d = mean - center
    shift = sum_of_others(d) / (n - 1)
    pooled = sum_of_others(var + d.square()) / (n - 1) - shift.square()
    return Moments(center + shift, pooled.clamp_min(0))


def everyone_ramp(pooled: Tensor, gradient: Moments, ghost_size: int | None, batch_size: int, spatial: int) -> Ramp:
    """The gradient of x through the moments of its ghost batch (G, C)."""
    size, last = _first_and_last(batch_size, ghost_size)
    if size == last:
        values = size * spatial
        return Ramp(pooled, gradient.var * (2 / values), gradient.mean / values)
    share = gradient.mean.new_full((pooled.shape[0], 1), 1 / (size * spatial))
    share[-1] = 1 / (last * spatial)
    return Ramp(pooled, gradient.var * (2 * share), gradient.mean * share)


def others_ramp(mean: Tensor, pooled: Tensor, gradient: Moments, ghost_size: int | None, spatial: int) -> Ramp:
    """The gradient of x through the moments of the others (B, C): W transposed, with 0 on self."""

    def pull(mean: Tensor, pooled: Tensor, g_mean: Tensor, g_var: Tensor) -> Moments:
        def from_others(table: Tensor) -> Tensor:
            return (table.sum(-2, keepdim=True) - table) / (table.shape[-2] - 1)

        center = mean.mean(-2, keepdim=True)
        own_var = from_others(g_var)
        own_mean = from_others(g_mean - 2 * g_var * (pooled - center)) + 2 * (mean - center) * own_var
        return Moments(own_mean, own_var)

    tables = (table.to(pooled.dtype) for table in (mean, pooled, *gradient))
    own = _in_ghost_batches(pull, ghost_size, tuple(tables))
    return Ramp(mean, own.var * (2 / spatial), own.mean / spatial)


def draws(moments: Moments, around: Tensor, indices: Tensor) -> Moments:
    """Pool, for each row of `indices` (B, N), the N samples drawn, with repetitions; the mean `around` a (1, C) one.

    Every drawn row is read once for both moments, and nothing of size B x N x C is made.
    """
    _, center = _extreme_and_center(*moments)
    d = moments.mean - center
    rows = torch.cat([d, moments.var + d.square()], dim=1)
    mean, square = F.embedding_bag(indices, rows, mode="mean").chunk(2, dim=1)
    return Moments(center - around + mean, (square - mean.square()).clamp_min(0))


def draw_indices(
    batch_size: int, ghost_size: int, device: torch.device, generator: torch.Generator | None, rows: int | None = None
) -> Tensor:
    """Draw a fresh ghost batch for each sample, or for `rows` of them, uniformly and with replacement: (B, N)."""
    shape = (batch_size if rows is None else rows, ghost_size)
    return torch.randint(batch_size, shape, device=device, **drawn_by(generator))


def ghost_sizes(batch_size: int, ghost_size: int) -> list[int]:
    """Sizes of the consecutive ghost batches: all `ghost_size`, the last one with the left-over samples too."""
    count = max(batch_size // ghost_size, 1)
    return [ghost_size] * (count - 1) + [batch_size - (count - 1) * ghost_size]


def _first_and_last(batch_size: int, ghost_size: int | None) -> tuple[int, int]:
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return sizes[0], sizes[-1]


def _ghost_batches(table: Tensor, ghost_size: int | None) -> list[Tensor]:
    """Views of a table of samples (B, C) as ghost batches (G, n, C): a ragged last one apart from the even ones."""
    batch_size = table.shape[0]
    size, last = _first_and_last(batch_size, ghost_size)
    if size == last:
        return [table.unflatten(0, (-1, size))]
    return [table[:-last].unflatten(0, (-1, size)), table[-last:].unsqueeze(0)]


def _in_ghost_batches(pool: Callable[..., Moments], ghost_size: int | None, tables: Sequence[Tensor]) -> Moments:
    """Run `pool` on the ghost batches of tables (B, C), and join what it returns to tables (R, C)."""
    blocks = zip(*(_ghost_batches(table, ghost_size) for table in tables), strict=True)
    parts = [pool(*block) for block in blocks]
    return Moments(*(_join([table.flatten(0, 1) for table in kind]) for kind in zip(*parts, strict=True)))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _extreme_and_center(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Which sample is the most extreme (one-hot over n), and the mean of the rest: an offset no outlier can move.

    Both are arbitrary choices for the sake of rounding: the pooled moments, and so their gradients, do not depend on
    them, and they are constants.
    """
    mean, var = mean.detach(), var.detach()
    n = mean.shape[-2]
    energy = var + (mean - mean.mean(-2, keepdim=True)).square()
    extreme = torch.arange(n, device=mean.device).unsqueeze(-1) == energy.argmax(-2, keepdim=True)
    rest = mean if n == 1 else mean.where(~extreme, 0)
    return extreme, rest.sum(-2, keepdim=True) / max(n - 1, 1)

"""Which samples contribute to each sample's statistics: its ghost batch, the rest of its ghost batch, or draws.

Each choice pools per-sample moments with a row-stochastic matrix W (pools x contributing samples), in the cheap form of
that matrix, by the law of total variance. With d = mean - c for any offset c:

    pooled mean = c + W d        pooled var = W (var + d²) - (W d)²

The result does not depend on the offset, but its rounding error does, so each function chooses an offset close to every
pool that it serves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise.randomness import draw_rows, drawn_by
from ghostnoise.statistics.moments import Moments, expand_pools, sum_pools, table_dtype


class LinearTerm(NamedTuple):
    """The gradient of x through its statistics, `slope * (x - center) + offset`, with one row per pool (R, C)."""

    center: Tensor
    slope: Tensor
    offset: Tensor


class Contributors:
    """The samples that contribute to each statistic.

    A subclass is a frozen dataclass whose fields are numbers or None, and needs only `pool`, in differentiable PyTorch.
    The other methods serve pools that several samples share, and gradients in closed form.
    """

    kinds: ClassVar[dict[str, type["Contributors"]]] = {}

    def __init_subclass__(cls) -> None:
        known = Contributors.kinds.setdefault(cls.__name__, cls)
        if known.__module__ != cls.__module__:
            raise ValueError(f"{cls.__name__} is defined in {known.__module__} and {cls.__module__}: rename one")
        Contributors.kinds[cls.__name__] = cls

    def numbers(self) -> tuple[list[int | None], list[float]]:
        """Return the fields in their order: integers, which may be None, and floats."""
        integers: list[int | None] = []
        floats: list[float] = []
        for name, kind in type(self).__annotations__.items():
            if kind in (float, "float"):
                floats.append(float(getattr(self, name)))
            else:
                integers.append(getattr(self, name))
        return integers, floats

    @classmethod
    def from_numbers(cls, integers: Sequence[int | None], floats: Sequence[float]) -> "Contributors":
        """Return the choice with these fields, as `numbers` returns them."""
        left = iter(integers), iter(floats)
        return cls(*(next(left[kind in (float, "float")]) for kind in cls.__annotations__.values()))

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Pool the moments of the samples (B, C) into statistics, one row per pool (R, C); differentiable.

        `reference` holds the running statistics (C,) for the choices that use them. `counts` (B, 1) are the samples'
        numbers of values, by which they weigh; None is the same for all.
        """
        raise NotImplementedError

    def samples_per_pool(self, batch_size: int) -> int:
        """Return how many consecutive samples share a pool; the last pool also serves the remaining samples."""
        return 1

    def pools(self, batch_size: int) -> int:
        """Return the number of pools, R."""
        return batch_size

    @property
    def keeps_moments(self) -> bool:
        """Whether the backward pass needs the moments of the samples, or only the pooled statistics."""
        return True

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Return the gradient of x through the pooled statistics, given their gradient (R, C).

        `kept` are the moments of the samples. This default differentiates `pool` with `torch.func`, which dispatch
        modes such as `FakeTensorMode` do not support: give a closed form where they matter.
        """
        weighted = () if counts is None else (counts,)
        vjp = torch.func.vjp(lambda moments: self.pool(moments, reference, *weighted), kept)[1]
        ((g_mean, g_var),) = vjp(Moments(*(table.to(pooled.mean.dtype) for table in gradient)))
        values = _values(spatial, counts)
        return LinearTerm(kept.mean, g_var * (2 / values), g_mean / values)


@dataclass(frozen=True)
class GhostBatch(Contributors):
    """All samples of the ghost batch, which is `ghost_size` consecutive samples; None is the whole batch."""

    ghost_size: int | None = None

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Pool each ghost batch (G, C)."""
        return _per_ghost_batch(pool_all, self.ghost_size, moments if counts is None else (*moments, counts))

    def samples_per_pool(self, batch_size: int) -> int:
        """Return the size of all ghost batches but the last."""
        return first_and_last_size(batch_size, self.ghost_size)[0]

    def pools(self, batch_size: int) -> int:
        """Return the number of ghost batches, G."""
        return 1 if self.ghost_size is None else max(batch_size // self.ghost_size, 1)

    @property
    def keeps_moments(self) -> bool:
        """The moments of the samples cancel from the gradient."""
        return False

    def values(self, counts: Tensor) -> Tensor:
        """Return the numbers of values of the ghost batches (G, 1), given those of the samples (B, 1)."""
        batch_size = counts.shape[0]
        return sum_pools(counts, self.pools(batch_size), self.samples_per_pool(batch_size))

    def average(self, table: Tensor, batch_size: int, counts: Tensor | None = None) -> Tensor:
        """Average over the samples the row of their ghost batch (1, C)."""
        if counts is not None:
            return (self.values(counts) * table).sum(0, keepdim=True) / counts.sum().clamp_min(1)
        size, last = first_and_last_size(batch_size, self.ghost_size)
        if size == last:
            return table.mean(0, keepdim=True)
        return (table.sum(0, keepdim=True) * size + table[-1:] * (last - size)) / batch_size

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Expand around the mean of the ghost batch, to which each of its values contributes equally."""
        if counts is not None:
            share = self.values(counts).clamp_min(1).reciprocal()
            return LinearTerm(pooled.mean, gradient.var * (2 * share), gradient.mean * share)
        size, last = first_and_last_size(batch_size, self.ghost_size)
        if size == last:
            values = size * spatial
            return LinearTerm(pooled.mean, gradient.var * (2 / values), gradient.mean / values)
        share = gradient.mean.new_full((pooled.mean.shape[0], 1), 1 / (size * spatial))
        share[-1] = 1 / (last * spatial)
        return LinearTerm(pooled.mean, gradient.var * (2 * share), gradient.mean * share)


@dataclass(frozen=True)
class Exclusive(Contributors):
    """All samples of the ghost batch except the sample itself; None is the whole batch."""

    ghost_size: int | None = None

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Pool, for each sample, the other samples of its ghost batch (B, C)."""
        tables = moments if counts is None else (*moments, counts)
        return _per_ghost_batch(pool_excluding_self, self.ghost_size, tables)

    def values(self, counts: Tensor) -> Tensor:
        """Return the numbers of values that contribute to each sample, given those of the samples: (B, 1)."""
        batch_size, ghosts = counts.shape[0], GhostBatch(self.ghost_size)
        return expand_pools(ghosts.values(counts), batch_size, ghosts.samples_per_pool(batch_size)) - counts

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Apply the transpose of W, and expand around the sample's own mean, which may be far from its pool's."""

        def transposed(
            mean: Tensor, pooled: Tensor, g_mean: Tensor, g_var: Tensor, counts: Tensor | None = None
        ) -> Moments:
            def from_others(table: Tensor) -> Tensor:
                if counts is None:
                    return (table.sum(-2, keepdim=True) - table) / (table.shape[-2] - 1)
                table = table / _of_others(counts)  # each value of a sample weighs 1 / the number of values in the pool
                return table.sum(-2, keepdim=True) - table

            center = mean.mean(-2, keepdim=True) if counts is None else pool_all(mean, mean, counts).mean
            own_var = from_others(g_var)
            own_mean = from_others(g_mean - 2 * g_var * (pooled - center)) + 2 * (mean - center) * own_var
            return Moments(own_mean, own_var)

        tables = tuple(table.to(pooled.mean.dtype) for table in (kept.mean, pooled.mean, *gradient))
        own = _per_ghost_batch(transposed, self.ghost_size, tables if counts is None else (*tables, counts))
        if counts is not None:
            return LinearTerm(kept.mean, own.var * 2, own.mean)
        return LinearTerm(kept.mean, own.var * (2 / spatial), own.mean / spatial)


@dataclass(frozen=True)
class SampleItself(Contributors):
    """Only the sample itself, as in instance normalization."""

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Return the sample's own moments (B, C)."""
        return moments

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Expand around the sample's own mean."""
        values = _values(spatial, counts)
        return LinearTerm(kept.mean, gradient.var * (2 / values), gradient.mean / values)


@dataclass(frozen=True)
class Mixture(Contributors):
    """The sample itself with weight `share`, and the running statistics with the rest."""

    share: float

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Return the moments of the mixture, for each sample (B, C)."""
        assert reference is not None
        share, (mean, var) = self.share, reference
        between = share * (1 - share) * (moments.mean - mean).square()
        return Moments((1 - share) * mean + share * moments.mean, (1 - share) * var + share * moments.var + between)

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Expand around the sample's own mean; the running statistics are constants."""
        assert reference is not None
        share, values = self.share, _values(spatial, counts)
        own_mean = share * gradient.mean + 2 * share * (1 - share) * (kept.mean - reference.mean) * gradient.var
        return LinearTerm(kept.mean, gradient.var * (2 * share / values), own_mean / values)


@dataclass(frozen=True)
class ExclusiveMixture(Contributors):
    """The sample itself with weight `share`, and the other samples of its ghost batch with the rest."""

    ghost_size: int | None
    share: float

    def pool(self, moments: Moments, reference: Moments | None, counts: Tensor | None = None) -> Moments:
        """Return the moments of the mixture, for each sample (B, C).

        The sample itself contributes to its statistics, so that "total minus self" need not be avoided: what is
        subtracted is at most 1/`share` times what remains.
        """

        def mixed(mean: Tensor, var: Tensor, counts: Tensor | None = None) -> Moments:
            center = mean.detach().mean(-2, keepdim=True)
            d = mean - center
            shift = self._weigh(d, counts)
            return Moments(center + shift, (self._weigh(var + d.square(), counts) - shift.square()).clamp_min(0))

        mean = moments.mean.to(moments.var.dtype)  # that of a single position may come in the dtype of x
        tables = (mean, moments.var) if counts is None else (mean, moments.var, counts)
        return _per_ghost_batch(mixed, self.ghost_size, tables)

    def linear_term(
        self,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Apply the transpose of W, and expand around the sample's own mean."""

        def transposed(
            mean: Tensor, pooled: Tensor, g_mean: Tensor, g_var: Tensor, counts: Tensor | None = None
        ) -> Moments:
            center = mean.mean(-2, keepdim=True)
            own_var = self._weigh_transposed(g_var, counts)
            own_mean = self._weigh_transposed(g_mean - 2 * g_var * (pooled - center), counts)
            return Moments(own_mean + 2 * (mean - center) * own_var, own_var)

        tables = tuple(table.to(pooled.mean.dtype) for table in (kept.mean, pooled.mean, *gradient))
        own = _per_ghost_batch(transposed, self.ghost_size, tables if counts is None else (*tables, counts))
        values = _values(spatial, counts)
        return LinearTerm(kept.mean, own.var * (2 / values), own.mean / values)

    def _weigh(self, table: Tensor, counts: Tensor | None) -> Tensor:
        """Apply W to the samples of ghost batches (..., n, C)."""
        if counts is None:
            other = (1 - self.share) / (table.shape[-2] - 1)
            return other * table.sum(-2, keepdim=True) + (self.share - other) * table
        weighted = counts * table
        others = (weighted.sum(-2, keepdim=True) - weighted) / _of_others(counts)
        # If no other sample has values, the sample itself is all there is.
        return torch.where(counts.sum(-2, keepdim=True) > counts, self.share * table + (1 - self.share) * others, table)

    def _weigh_transposed(self, table: Tensor, counts: Tensor | None) -> Tensor:
        """Apply the transpose of W, which is W itself if all samples have as many values."""
        if counts is None:
            return self._weigh(table, None)
        alone = counts.sum(-2, keepdim=True) <= counts
        scaled = ((1 - self.share) * table / _of_others(counts)).where(~alone, 0)
        return torch.where(alone, table, self.share * table) + counts * (scaled.sum(-2, keepdim=True) - scaled)


def pool_all(mean: Tensor, var: Tensor, counts: Tensor | None = None) -> Moments:
    """Pool the n samples of tables (..., n, C): (..., 1, C).

    `counts` (..., n, 1) are the samples' numbers of values, by which they weigh; None is the same for all. A sample
    with a count of 0 contributes nothing, and its moments must be finite. If all counts are 0, the moments are 0.
    """
    if counts is None:
        pooled = mean.mean(-2, keepdim=True)
        return Moments(pooled, (var + (mean - pooled).square()).mean(-2, keepdim=True))
    weights = counts / counts.sum(-2, keepdim=True).clamp_min(1)
    pooled = (weights * mean).sum(-2, keepdim=True)
    return Moments(pooled, (weights * (var + (mean - pooled).square())).sum(-2, keepdim=True))


def pool_excluding_self(mean: Tensor, var: Tensor, counts: Tensor | None = None) -> Moments:
    """Pool, for each of the n samples of tables (..., n, C), all samples except itself: (..., n, C).

    `counts` are those of `pool_all`. If all other counts are 0, the moments are finite and have no meaning.

    "Total minus self" cancels when the sample itself is the outlier that dominates the total. So the most extreme
    sample is left out of the total and added for every sample except itself: what is then subtracted is never larger
    than what remains. A non-finite sample is the most extreme one, so that its own statistics stay finite.
    """
    n = mean.shape[-2]
    if n == 2:  # the moments of the other sample: a pool of one sample may be far from any offset
        return Moments(mean.flip(-2), var.flip(-2))
    extreme, center = _extreme_and_center(mean, var, counts)
    others = n - 1 if counts is None else _of_others(counts)

    def sum_of_others(table: Tensor) -> Tensor:
        table = table if counts is None else counts * table
        most = table.where(extreme, 0).sum(-2, keepdim=True)
        rest = table.where(~extreme, 0).sum(-2, keepdim=True)
        return rest.where(extreme, rest - table + most)

    d = mean - center
    shift = sum_of_others(d) / others
    pooled = sum_of_others(var + d.square()) / others - shift.square()
    return Moments(center + shift, pooled.clamp_min(0))


def pool_drawn(moments: Moments, around: Tensor, indices: Tensor, counts: Tensor | None = None) -> Moments:
    """Pool, for each row of `indices` (B, N), the N samples drawn; the mean is relative to `around` (1, C).

    `counts` (n,) are the samples' numbers of values, by which they weigh; None is the same for all. A row whose drawn
    samples have no values gets the moments 0. Every drawn row is read once for both moments, and nothing of size
    B x N x C is allocated.
    """
    _, center = _extreme_and_center(*moments, None if counts is None else counts.unsqueeze(1))
    d = moments.mean - center
    rows = torch.cat([d, moments.var + d.square()], dim=1)
    if counts is None:
        mean, square = F.embedding_bag(indices, rows, mode="mean").chunk(2, dim=1)
    else:
        weights = counts.to(rows.dtype)[indices]
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
        mean, square = F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights).chunk(2, dim=1)
    return Moments(center - around + mean, (square - mean.square()).clamp_min(0))


def draw_indices(
    batch_size: int, ghost_size: int, device: torch.device, generator: torch.Generator | None, rows: int | None = None
) -> Tensor:
    """Draw a ghost batch for each of `rows` samples (default: all), uniformly with replacement: (B, N)."""
    return draw_rows(batch_size, batch_size if rows is None else rows, ghost_size, device, generator)


def draw_present(counts: Tensor, ghost_size: int, rows: int, generator: torch.Generator | None) -> Tensor:
    """Draw a ghost batch for each of `rows` samples out of those with a count (n,) above 0: (rows, N).

    Does not synchronize with the device. If there is no such sample, the result is an arbitrary valid index.
    """
    device = counts.device
    present = (counts > 0).cumsum(0)
    uniform = torch.rand(rows, ghost_size, dtype=table_dtype(device), device=device, **drawn_by(generator))
    rank = (uniform * present[-1]).long().clamp_max((present[-1] - 1).clamp_min(0))  # a product may be rounded up
    return torch.searchsorted(present, rank + 1).clamp_max(counts.shape[0] - 1)


def ghost_sizes(batch_size: int, ghost_size: int) -> list[int]:
    """Return the sizes of the consecutive ghost batches; the last one also takes the remaining samples."""
    count = max(batch_size // ghost_size, 1)
    return [ghost_size] * (count - 1) + [batch_size - (count - 1) * ghost_size]


def first_and_last_size(batch_size: int, ghost_size: int | None) -> tuple[int, int]:
    """Return the size of the first ghost batch, which all but the last one share, and of the last one."""
    if ghost_size is None or batch_size < 2 * ghost_size:
        return batch_size, batch_size
    return ghost_size, ghost_size + batch_size % ghost_size


def _ghost_batches(table: Tensor, ghost_size: int | None) -> list[Tensor]:
    """View a table of samples (B, C) as ghost batches (G, n, C); a last one of another size is separate."""
    size, last = first_and_last_size(table.shape[0], ghost_size)
    if size == last:
        return [table.unflatten(0, (-1, size))]
    return [table[:-last].unflatten(0, (-1, size)), table[-last:].unsqueeze(0)]


def _per_ghost_batch(pool: Callable[..., Moments], ghost_size: int | None, tables: Sequence[Tensor]) -> Moments:
    """Run `pool` on the ghost batches of tables (B, C), and concatenate the results to tables (R, C)."""
    blocks = zip(*(_ghost_batches(table, ghost_size) for table in tables), strict=True)
    parts = [pool(*block) for block in blocks]
    return Moments(*(_concatenate([table.flatten(0, 1) for table in kind]) for kind in zip(*parts, strict=True)))


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _values(spatial: int, counts: Tensor | None) -> "int | Tensor":
    """Return the numbers of values of the samples, or 1 for a sample without values, whose gradient is 0."""
    return spatial if counts is None else counts.clamp_min(1)


def _of_others(counts: Tensor) -> Tensor:
    """Return the number of values of all samples except the sample itself, or 1 if there are none: (..., n, 1)."""
    return (counts.sum(-2, keepdim=True) - counts).clamp_min(1)


def _extreme_and_center(mean: Tensor, var: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the most extreme sample (one-hot over n) and the mean of the rest, an offset that no outlier can move.

    Both only control rounding: the pooled moments, and so their gradients, do not depend on them. They are constants.
    """
    mean, var = mean.detach(), var.detach()
    n = mean.shape[-2]
    finite = torch.isfinite(mean) & torch.isfinite(var)
    numbers = torch.arange(n, device=mean.device).unsqueeze(-1)
    if counts is not None:
        average = pool_all(mean.where(finite, 0), var, counts).mean
        energy = (counts * (var + (mean - average).square())).where(finite, torch.inf)
        extreme = numbers == energy.argmax(-2, keepdim=True)
        rest = counts.where(~extreme, 0)
        rest = rest.where(rest.sum(-2, keepdim=True) > 0, counts)
        return extreme, pool_all(mean.where(rest > 0, 0), var, rest).mean
    average = mean.where(finite, 0).sum(-2, keepdim=True) / n
    energy = (var + (mean - average).square()).where(finite, torch.inf)
    extreme = numbers == energy.argmax(-2, keepdim=True)
    rest = mean if n == 1 else mean.where(~extreme, 0)
    return extreme, rest.sum(-2, keepdim=True) / max(n - 1, 1)

"""The operations on small tables as calls of the C++ library."""

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import Aten
from ghostnoise.engine.backends.base import Affine, Coefficients, NoiseTables
from ghostnoise.engine.backends.native.fused import COVERED, SeededLaw
from ghostnoise.engine.backends.native.gate import (
    TABLE_DTYPES,
    NotAdmitted,
    addresses,
    consecutive,
    empty,
    optional,
    or_aten,
    sample_moments,
    table,
    updatable,
)
from ghostnoise.engine.backends.native.geometry import group_starts
from ghostnoise.engine.backends.native.library import DTYPES, run, threads
from ghostnoise.engine.plan import Batch, Drawn, Noise, Normalizer, Tables
from ghostnoise.statistics.laws import LawDraws
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Contributors, Exclusive, LinearTerm

LAW = 16  # the work of a draw from a law, in elements that are only copied; as in fused.cpp


class NativeTables(Aten):
    """`Aten` with native operations on tables."""

    @or_aten
    def pool(
        self,
        contributors: Contributors,
        moments: Moments,
        reference: Moments | None = None,
        counts: Tensor | None = None,
    ) -> Moments:
        """Pool ghost batches and exclusive ghost batches, if samples weigh equally."""
        if counts is not None or not isinstance(contributors, COVERED) or 0 in moments.mean.shape:
            raise NotAdmitted
        mean, var = sample_moments(moments)
        batch_size, channels = mean.shape
        exclusive = isinstance(contributors, Exclusive)
        count, starts = group_starts(batch_size, contributors.ghost_size)
        made = empty((2, batch_size if exclusive else count, channels), torch.float64).unbind()
        sizes = (DTYPES[mean.dtype], int(exclusive), threads(mean.numel()), count, starts, channels)
        run("pool", *sizes, *addresses(mean, var, *made))
        return Moments(*made)

    @or_aten
    def pool_drawn(
        self, moments: Moments, around: Tensor, indices: Tensor, counts: Tensor | None, dtype: torch.dtype
    ) -> Moments:
        """Pool the samples in each row of `indices`, if they weigh equally."""
        if counts is not None:
            raise NotAdmitted
        drawn = _Drawn(moments, around, indices, dtype)
        made = empty((2, drawn.rows, drawn.channels), dtype).unbind()
        run("pool_drawn", *drawn.sizes, *drawn.addresses, *addresses(*made))
        return Moments(*made)

    @or_aten
    def coefficients(
        self, normalizer: Normalizer, pooled: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Coefficients:
        """Compute the per-pool coefficients; the five tables lie one after another in memory."""
        rows, channels = _table_shape(pooled.mean, dtype)
        mean, var = (table(one, torch.float64, (rows, channels)) for one in pooled)
        given = [optional(one, dtype, (channels,)) for one in (weight, bias)]
        made = empty((5, rows, channels), dtype)
        sizes = (DTYPES[dtype], threads(mean.numel()), rows, channels)
        run("coefficients", *sizes, *addresses(mean, var), *_floor(normalizer), *addresses(*given, made))
        return Coefficients(*made.unbind())

    @or_aten
    def noise_tables(self, noise: Noise, batch: Batch, dtype: torch.dtype) -> NoiseTables:
        """Compute the noise; drawn samples are pooled in the same call."""
        m, k, _, _ = self._noise(noise, batch, dtype)
        return NoiseTables(m, k)

    @or_aten
    def noisy_affine(
        self,
        noise: Noise,
        batch: Batch,
        coefficients: Coefficients,
        weight: Tensor | None,
        bias: Tensor | None,
        samples_per_pool: int = 1,
    ) -> tuple[NoiseTables, Affine]:
        """Compute the noise on the normalized x and the transformation of x, if all samples share one pool."""
        if batch.normalized or coefficients.rstd.shape[0] != 1:
            raise NotAdmitted
        m, k, scale, shift = self._noise(noise, batch, coefficients.rstd.dtype, coefficients, weight, bias)
        assert scale is not None
        assert shift is not None
        return NoiseTables(m, k), Affine(coefficients.center, scale, shift)

    def _noise(
        self,
        noise: Noise,
        batch: Batch,
        dtype: torch.dtype,
        coefficients: Coefficients | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Return m and k; with coefficients also the scale and shift of x, else None for these."""
        samples, channels = _table_shape(batch.moments.mean, dtype)
        if isinstance(noise, Drawn) and batch.counts is None:
            drawn = _Drawn(batch.moments, batch.whole.mean, noise.indices, dtype)
            sizes, given, rows = drawn.sizes, (*drawn.addresses, 0, 0, 0, 0, 0), drawn.rows
        elif isinstance(noise, Tables) and not isinstance(noise.draws, LawDraws) and isinstance(batch.spatial, int):
            law, rows = SeededLaw(noise, batch.spatial, dtype), samples
            mean, own_var = sample_moments(batch.moments)
            around = table(batch.whole.mean, torch.float64, (1, channels))
            sizes = (DTYPES[mean.dtype], DTYPES[dtype], threads(LAW * rows * channels), samples, channels, rows, 0)
            given = (*addresses(mean, own_var, None, around), 0, 0, *law.addresses)
        else:
            ghost = noise.ghost_moments(batch)
            rows, _ = _table_shape(ghost.mean, dtype)
            tables = [table(one, dtype, (rows, channels)) for one in ghost]
            sizes = (0, DTYPES[dtype], threads(rows * channels), samples, channels, rows, 0)
            given = (0, 0, 0, 0, *addresses(*tables), 0, 0, 0)
        var, margin = (table(one, torch.float64, (1, channels)) for one in (noise.var(batch), noise.eps * batch.unit))
        pool = None if coefficients is None else consecutive(coefficients, dtype, (1, channels))
        parameters = [optional(one, dtype, (channels,)) for one in (weight, bias)]
        wanted = (noise.shifts, noise.scales, pool is not None, pool is not None)
        made = [empty((rows, channels), dtype) if wants else None for wants in wanted]
        ends = (var, margin, pool, *parameters, *made)
        run("noise_tables", *sizes, *given, int(noise.shifts), int(noise.scales), *addresses(*ends), 0)
        return made

    @or_aten
    def statistics_gradient(
        self,
        normalizer: Normalizer,
        coefficients: Coefficients,
        var: Tensor,
        weight: Tensor | None,
        total: Tensor,
        moment: Tensor,
        noise: NoiseTables,
        samples_per_pool: int = 1,
    ) -> tuple[Tensor, Tensor, Moments]:
        """Return the gradients of weight, bias and the pooled statistics, from the sums over positions."""
        dtype, rows = total.dtype, var.shape[0]
        samples, channels = _table_shape(total, dtype)
        if not 0 < (rows - 1) * samples_per_pool + 1 <= samples:
            raise NotAdmitted
        sums = [optional(one, dtype, (samples, channels)) for one in (total, moment, *noise)]
        pools = consecutive(coefficients, dtype, (rows, channels))
        var = table(var, torch.float64, (rows, channels))
        made = (*empty((2, channels), dtype).unbind(), *empty((2, rows, channels), dtype).unbind())
        sizes = (DTYPES[dtype], threads(total.numel()), samples, channels, rows, samples_per_pool)
        given = addresses(*sums, pools, var)
        run("statistics_gradient", *sizes, *given, *_floor(normalizer), *addresses(*made), 0)
        return made[0], made[1], Moments(*made[2:])

    @or_aten
    def linear_term(
        self,
        contributors: Contributors,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Return the gradient of x through the statistics of ghost batches, in the dtype of their gradient."""
        if counts is not None or not isinstance(contributors, COVERED):
            raise NotAdmitted
        dtype, exclusive = gradient.mean.dtype, isinstance(contributors, Exclusive)
        count, starts = group_starts(batch_size, contributors.ghost_size)
        shape = (batch_size if exclusive else count, _table_shape(pooled.mean, dtype)[1])
        tables = [table(pooled.mean, torch.float64, shape), *(table(one, dtype, shape) for one in gradient)]
        made = empty((3, *shape), dtype).unbind()
        sizes = (threads(shape[0] * shape[1]), count, starts, shape[1], spatial)
        if exclusive:
            mean, _ = sample_moments(kept, shape)
            codes, ends = (DTYPES[dtype], DTYPES[mean.dtype]), (mean, *tables, *made)
            run("exclusive_linear_term", *codes, *sizes, *addresses(*ends))
        else:
            run("linear_term", DTYPES[dtype], *sizes, *addresses(*tables, *made))
        return LinearTerm(*made)

    @or_aten
    def update_running(
        self, mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
    ) -> None:
        """Update the buffers in place."""
        channels = stats.mean.shape[-1]
        dtype = updatable(mean, var, count, channels)
        if dtype is None or (momentum is None and count is None):
            raise NotAdmitted
        tables = [table(one, torch.float64, (1, channels)) for one in stats]
        factor = -1.0 if momentum is None else float(momentum)
        run("update_running", DTYPES[dtype], channels, *addresses(mean, var, count, *tables), factor)
        torch.autograd.graph.increment_version([one for one in (mean, var, count) if one is not None])


def _floor(normalizer: Normalizer) -> tuple[float, float]:
    """Return eps, and the least value of var + eps."""
    return float(normalizer.eps), float(normalizer.min_std) ** 2


def _table_shape(given: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the shape of a table that is not empty, for tables of this dtype."""
    if dtype not in TABLE_DTYPES or given.ndim != 2 or given.numel() == 0:
        raise NotAdmitted
    rows, channels = given.shape
    return rows, channels


class _Drawn:
    """Drawn samples as arguments of the library; `alive` owns their memory."""

    def __init__(self, moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> None:
        samples, self.channels = _table_shape(moments.mean, dtype)
        mean, var = sample_moments(moments)
        if indices.ndim != 2 or indices.numel() == 0:
            raise NotAdmitted
        self.rows, drawn = indices.shape
        indices = table(indices, torch.int64, (self.rows, drawn))
        around = table(around, torch.float64, (1, self.channels))
        self.alive = (mean, var, indices, around)
        many = threads(indices.numel() * self.channels)
        self.sizes = (DTYPES[mean.dtype], DTYPES[dtype], many, samples, self.channels, self.rows, drawn)
        self.addresses = tuple(addresses(*self.alive))

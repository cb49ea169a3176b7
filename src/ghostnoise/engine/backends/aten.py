"""The reference backend, in plain PyTorch, for any device and floating dtype.

`measure`, `apply` and all operations on tables are differentiable. The passes over x treat samples independently, so
they run over slices of the batch: apart from the result, only a slice is materialized.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import (
    Affine,
    Backend,
    Capabilities,
    Coefficients,
    NoiseTables,
)
from ghostnoise.engine.plan import Batch, Noise, Normalizer
from ghostnoise.statistics.moments import Moments, arithmetic_dtype, expand_pools, sum_pools, table_dtype
from ghostnoise.statistics.samples import Contributors, LinearTerm, pool_drawn

# Elements of x in a slice. On a CPU, a slice stays in a core's cache from one step of a pass to the next.
SLICE_ON_CPU = 2**18
SLICE = 2**24


def measure(x: Tensor) -> Moments:
    """Measure per-sample moments (B, C), differentiable, in two passes: a sum of raw squares would cancel."""
    positions = tuple(range(2, x.ndim))
    x = x.to(arithmetic_dtype(x))
    rough = x.detach().mean(positions, keepdim=True)  # any offset near the mean: the result does not depend on it
    d = x - rough
    table = table_dtype(x.device)
    rest = d.mean(positions).to(table)
    var = d.square().mean(positions).to(table) - rest.square()
    return Moments(rough.flatten(1).to(table) + rest, var.clamp_min(0))


def apply(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `scale * (x - center) + shift` in the dtype of the arithmetic, differentiable."""
    return torch.addcmul(_like(shift, x), x - _like(center, x), _like(scale, x))


def rescale(dy: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * dy` in the dtype of the arithmetic, differentiable."""
    return dy * _like(scale, dy)


class Aten(Backend):
    """The reference implementation that other backends must equal."""

    name = "aten"
    capabilities = Capabilities()

    def moments(self, x: Tensor) -> Moments:
        """Run `measure` one slice at a time."""
        return Moments(*_in_slices(measure, x))

    def transform(self, x: Tensor, affine: Affine, samples_per_pool: int = 1) -> Tensor:
        """Run `apply` one slice at a time."""
        return _fill(x, apply, x, *(expand_pools(table, x.shape[0], samples_per_pool) for table in affine))

    def gradient_sums(self, dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[Tensor, Tensor]:
        """Sum over the positions of each sample."""
        positions = tuple(range(2, x.ndim))

        def sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
            dy = dy.to(center.dtype)
            return dy.sum(positions), (x - _like(center, x)).mul_(dy).sum(positions)

        total, moment = _in_slices(sums, dy, x, expand_pools(center, x.shape[0], samples_per_pool))
        return total, moment

    def input_gradient(
        self, dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, term: LinearTerm, samples_per_pool: int = 1
    ) -> Tensor:
        """Add the path through y and the path through the statistics."""
        scale, *rest = (expand_pools(table, x.shape[0], samples_per_pool) for table in (scale, *term))

        def gradient(dy: Tensor, x: Tensor, scale: Tensor, *term: Tensor) -> Tensor:
            return apply(x, *term).addcmul_(dy, _like(scale, x))

        return _fill(x, gradient, dy, x, scale if gain is None else scale * gain, *rest)

    def scale_gradient(self, dy: Tensor, scale: Tensor) -> Tensor:
        """Run `rescale` one slice at a time."""
        return _fill(dy, rescale, dy, expand_pools(scale, dy.shape[0]))

    def pool(
        self,
        contributors: Contributors,
        moments: Moments,
        reference: Moments | None = None,
        counts: Tensor | None = None,
    ) -> Moments:
        """Pool with the contributors' own definition."""
        weighted = () if counts is None else (counts,)
        return contributors.pool(moments, reference, *weighted)

    def pool_drawn(
        self, moments: Moments, around: Tensor, indices: Tensor, counts: Tensor | None, dtype: torch.dtype
    ) -> Moments:
        """Pool the drawn samples with `embedding_bag`."""
        mean, var = pool_drawn(moments, around, indices, counts)
        return Moments(mean.to(dtype), var.to(dtype))

    def coefficients(
        self, normalizer: Normalizer, pooled: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Coefficients:
        """Compute the coefficients; differentiable.

        x - mean is computed in the arithmetic of x with a rounded mean; the shift compensates for the rounding.
        """
        rstd, center = normalizer.rstd(pooled.var.to(dtype)), pooled.mean.to(dtype)
        rounding = (center - pooled.mean).to(dtype)
        factor = rstd if weight is None else rstd * weight.to(dtype)
        shift = factor * rounding
        return Coefficients(center, rounding, rstd, factor, shift if bias is None else shift + bias.to(dtype))

    def noise_tables(self, noise: Noise, batch: Batch, dtype: torch.dtype) -> NoiseTables:
        """Compute m and k from the moments of ghost batches (B, C)."""
        ghost, var, margin = noise.ghost_moments(batch), noise.var(batch), noise.eps * batch.unit
        m = ghost.mean.to(dtype) if noise.shifts else None
        if not noise.scales:
            return NoiseTables(m, None)
        k = (ghost.var.to(dtype) + margin.to(dtype)).rsqrt_().mul_((var + margin).sqrt().to(dtype))
        return NoiseTables(m, k)

    def noisy_affine(
        self,
        noise: Noise,
        batch: Batch,
        coefficients: Coefficients,
        weight: Tensor | None,
        bias: Tensor | None,
        samples_per_pool: int = 1,
    ) -> tuple[NoiseTables, Affine]:
        """Compute the noise and the transformation; differentiable except for the noise."""
        dtype = coefficients.rstd.dtype
        m, k = self.noise_tables(noise, batch, dtype)
        rows = next((table.shape[0] for table in (m, k) if table is not None), batch.moments.mean.shape[0])
        center, rounding, rstd, factor = (
            table if table.shape[0] == 1 else expand_pools(table, rows, samples_per_pool) for table in coefficients[:4]
        )
        shift, scale = rstd * rounding, factor
        if m is not None:
            m = m if batch.normalized else m * rstd.detach()
            shift = shift - m
        if k is not None:
            shift, scale = shift * k, scale * k
        shift = shift if weight is None else shift * weight.to(dtype)
        return NoiseTables(m, k), Affine(center, scale, shift if bias is None else shift + bias.to(dtype))

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
        """Evaluate the closed form that `engine.op` derives."""
        rows, g_bias, (m, k) = var.shape[0], total.sum(0), noise
        if k is not None:
            total, moment = total * k, moment * k
        a, d = sum_pools(total, rows, samples_per_pool), sum_pools(moment, rows, samples_per_pool)
        d = d + coefficients.rounding * a
        g_weight = (coefficients.rstd * d).sum(0)
        g_rstd = d if weight is None else d * weight.to(d.dtype)
        g_var = normalizer.var_gradient(var.to(d.dtype), coefficients.rstd, g_rstd)
        gradient = Moments(-coefficients.factor * a, g_var)
        return g_weight if m is None else g_weight - (total * m).sum(0), g_bias, gradient

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
        """Use the contributors' own gradient."""
        weighted = () if counts is None else (counts,)
        return contributors.linear_term(kept, pooled, gradient, reference, batch_size, spatial, *weighted)

    def update_running(
        self, mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
    ) -> None:
        """Update the buffers with `lerp`."""
        with torch.no_grad():
            pairs = [(old, stat) for old, stat in zip((mean, var), stats, strict=True) if old is not None]
            updated = [old.lerp(stat.to(old.dtype).flatten(), _weight(momentum, count, old)) for old, stat in pairs]
            # A sum is finite if and only if its terms are; the updated buffers are finite only if the statistics are.
            sums = [table.sum(dtype=stats.mean.dtype) for table in (updated or stats)]
            finite = torch.isfinite(sums[0] + sums[-1])
            for (old, _), new in zip(pairs, updated, strict=True):
                old.copy_(torch.where(finite, new, old))
            if count is not None:
                count.add_(finite)


ATEN = Aten()


def _weight(momentum: float | None, count: Tensor | None, buffer: Tensor) -> float | Tensor:
    if momentum is not None:
        return momentum
    assert count is not None
    return (count + 1).to(buffer.dtype).reciprocal()


def _like(table: Tensor, x: Tensor) -> Tensor:
    """View a (B, C) table with the number of dimensions of x."""
    return table[(...,) + (None,) * (x.ndim - 2)]


def _slices(x: Tensor) -> Iterator[slice]:
    sample = max(x[:1].numel(), 1)
    rows = max((SLICE_ON_CPU if x.device.type == "cpu" else SLICE) // sample, 1)
    return (slice(start, start + rows) for start in range(0, max(x.shape[0], 1), rows))


def _in_slices(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Concatenate the tables that `run` returns for slices of the batch."""
    parts = [run(*(tensor[rows] for tensor in tensors)) for rows in _slices(tensors[0])]
    return tuple(torch.cat(tables) for tables in zip(*parts, strict=True))


def _fill(like: Tensor, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Fill a tensor with the shape and memory format of `like` by running `run` on slices of the batch."""
    out = torch.empty_like(like)
    for rows in _slices(like):
        out[rows] = run(*(tensor[rows] for tensor in tensors))
    return out

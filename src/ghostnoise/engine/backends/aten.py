"""The passes in plain PyTorch, for any device and floating dtype: the reference that other backends must equal.

x is (B, C, *spatial) with one spatial dimension or more, in any strides; S is the number of positions. Moments are in
float64, other tables in the dtype of the arithmetic. A table is (R, C): each row serves `each` consecutive samples, the
last those left over too. All passes treat samples independently, so they run over slices of the batch: what is
materialised beside the result is a slice.

    moments           mean = Σ x / S        var = Σ (x - mean)² / S
    transform         y = scale·(x - center) + shift
    gradient_sums     Σ dy                  Σ dy·(x - center)
    input_gradient    dx = gain·scale·dy + slope·(x - center) + offset
    scale_gradient    dx = scale·dy

Between them, on tables alone:

    everyone, others  the moments of ghost batches, and of the others in them (`ghosts`); their ramps, gradients
    draws             the moments of the samples drawn for each sample
    standardize       what is applied to x, from statistics; pull, the gradient of both
    inject, blend     noise from the moments of ghost batches, and what is applied to x with it
    follow            running statistics
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ghostnoise import ghosts
from ghostnoise.ghosts import everyone_ramp as everyone_ramp
from ghostnoise.ghosts import others_ramp as others_ramp
from ghostnoise.methods import Batch, Noise, Normalizer
from ghostnoise.moments import Affine, Moments, Standard, arithmetic_dtype, spread, table_dtype
from ghostnoise.moments import total as total_of

# Elements of x in a slice: on a CPU, few enough to stay in a core's cache from one step of a pass to the next.
SLICE_ON_CPU = 2**18
SLICE = 2**24

# The shift m and the scale k of noise (B, C); None where there is none.
NoiseTables: TypeAlias = tuple[Tensor | None, Tensor | None]


def measure(x: Tensor) -> Moments:
    """Per-sample moments (B, C), differentiable; two passes, and no sum of raw squares, which would cancel."""
    positions = tuple(range(2, x.ndim))
    x = x.to(arithmetic_dtype(x))
    rough = x.detach().mean(positions, keepdim=True)  # any offset near the mean: the result does not depend on it
    d = x - rough
    table = table_dtype(x.device)
    rest = d.mean(positions).to(table)
    var = d.square().mean(positions).to(table) - rest.square()
    return Moments(rough.flatten(1).to(table) + rest, var.clamp_min(0))


def apply(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale * (x - center) + shift` in the dtype of the arithmetic, differentiable."""
    return torch.addcmul(_beside(shift, x), x - _beside(center, x), _beside(scale, x))


def rescale(dy: Tensor, scale: Tensor) -> Tensor:
    """scale·dy in the dtype of the arithmetic, differentiable."""
    return dy * _beside(scale, dy)


def moments(x: Tensor) -> Moments:
    """`measure`, a slice at a time."""
    return Moments(*_tables(measure, x))


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, each: int = 1) -> Tensor:
    """`apply`, a slice at a time, into a tensor of x's memory format."""
    return _fill(x, apply, x, *(spread(table, x.shape[0], each) for table in (center, scale, shift)))


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    """Σ dy and Σ dy·(x - center) over the positions of each sample (B, C)."""
    positions = tuple(range(2, x.ndim))

    def sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        dy = dy.to(center.dtype)
        return dy.sum(positions), (x - _beside(center, x)).mul_(dy).sum(positions)

    total, moment = _tables(sums, dy, x, spread(center, x.shape[0], each))
    return total, moment


def input_gradient(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    center: Tensor,
    slope: Tensor,
    offset: Tensor,
    each: int = 1,
    gain: Tensor | None = None,
) -> Tensor:
    """The gradient of x: through y, and through the statistics."""
    scale, *ramp = (spread(table, x.shape[0], each) for table in (scale, center, slope, offset))

    def gradient(dy: Tensor, x: Tensor, scale: Tensor, *ramp: Tensor) -> Tensor:
        return apply(x, *ramp).addcmul_(dy, _beside(scale, x))

    return _fill(x, gradient, dy, x, scale if gain is None else scale * gain, *ramp)


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`rescale`, a slice at a time: the gradient of x where nothing else depends on it."""
    return _fill(dy, rescale, dy, spread(scale, dy.shape[0]))


def everyone(moments: Moments, ghost_size: int | None) -> Moments:
    """The moments of each ghost batch (G, C)."""
    return ghosts.GhostBatch(ghost_size).pool(moments)


def others(moments: Moments, ghost_size: int | None) -> Moments:
    """The moments of the others in each sample's ghost batch (B, C)."""
    return ghosts.Others(ghost_size).pool(moments)


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """The moments of the samples in each row of `indices` (B, N), the mean `around` a (1, C) one; in `dtype`."""
    mean, var = ghosts.draws(moments, around, indices)
    return Moments(mean.to(dtype), var.to(dtype))


def standardize(
    normalizer: Normalizer, stats: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Standard:
    """What is applied to x, from the statistics (R, C); differentiable.

    x - mean is taken in the arithmetic of x, with a rounded mean; what rounding takes from it goes into the shift.
    """
    rstd, center = normalizer.rstd(stats.var.to(dtype)), stats.mean.to(dtype)
    lost = (center - stats.mean).to(dtype)
    factor = rstd if weight is None else rstd * weight.to(dtype)
    shift = factor * lost
    return Standard(center, lost, rstd, factor, shift if bias is None else shift + bias.to(dtype))


def inject(noise: Noise, batch: Batch, dtype: torch.dtype) -> NoiseTables:
    """The noise m and k of `(x - m)·k`, from the moments of ghost batches (B, C)."""
    ghost, var, margin = noise.ghost(batch), noise.var(batch), noise.eps * batch.unit
    m = ghost.mean.to(dtype) if noise.shift else None
    if not noise.scale:
        return m, None
    return m, (ghost.var.to(dtype) + margin.to(dtype)).rsqrt_().mul_((var + margin).sqrt().to(dtype))


def blend(
    noise: Noise,
    batch: Batch,
    standard: Standard,
    weight: Tensor | None,
    bias: Tensor | None,
    each: int = 1,
) -> tuple[NoiseTables, Affine]:
    """Noise m and k on the normalized x, and what is then applied to x; differentiable but for the noise.

    y = weight·k·((x - mean)·rstd - m) + bias
    """
    dtype = standard.rstd.dtype
    m, k = inject(noise, batch, dtype)
    rows = next((table.shape[0] for table in (m, k) if table is not None), batch.moments.mean.shape[0])
    center, lost, rstd, factor = (table if table.shape[0] == 1 else spread(table, rows, each) for table in standard[:4])
    shift, scale = rstd * lost, factor
    if m is not None:
        m = m * rstd.detach()
        shift = shift - m
    if k is not None:
        shift, scale = shift * k, scale * k
    shift = shift if weight is None else shift * weight.to(dtype)
    return (m, k), Affine(center, scale, shift if bias is None else shift + bias.to(dtype))


def pull(
    normalizer: Normalizer,
    standard: Standard,
    var: Tensor,
    weight: Tensor | None,
    total: Tensor,
    moment: Tensor,
    noise: NoiseTables,
    each: int = 1,
) -> tuple[Tensor, Tensor, Moments]:
    """The gradients of weight and bias (C,), and of the statistics (R, C), from the sums over positions (B, C)."""
    rows, g_bias, (m, k) = var.shape[0], total.sum(0), noise
    if k is not None:
        total, moment = total * k, moment * k
    a, d = total_of(total, rows, each), total_of(moment, rows, each)
    d = d + standard.lost * a
    g_weight = (standard.rstd * d).sum(0)
    g_rstd = d if weight is None else d * weight.to(d.dtype)
    gradient = Moments(-standard.factor * a, normalizer.var_gradient(var.to(d.dtype), standard.rstd, g_rstd))
    return g_weight if m is None else g_weight - (total * m).sum(0), g_bias, gradient


def follow(
    mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
) -> None:
    """Move running buffers (C,) towards `stats` (1, C) and count, unless they are not finite.

    Without waiting for the device. `momentum=None` is the cumulative average.
    """
    with torch.no_grad():
        pairs = [(old, stat) for old, stat in zip((mean, var), stats, strict=True) if old is not None]
        factors = [_factor(momentum, count, old) for old, _ in pairs]
        moved = [
            old.lerp(stat.to(old.dtype).flatten(), factor) for (old, stat), factor in zip(pairs, factors, strict=True)
        ]
        # A sum is finite if and only if its terms are; the moved buffers tell of the statistics too.
        sums = [table.sum(dtype=stats.mean.dtype) for table in (moved or stats)]
        finite = torch.isfinite(sums[0] + sums[-1])
        for (old, _), new in zip(pairs, moved, strict=True):
            old.copy_(torch.where(finite, new, old))
        if count is not None:
            count.add_(finite)


def _factor(momentum: float | None, count: Tensor | None, buffer: Tensor) -> float | Tensor:
    if momentum is not None:
        return momentum
    assert count is not None
    return (count + 1).to(buffer.dtype).reciprocal()


def _beside(table: Tensor, x: Tensor) -> Tensor:
    """A (B, C) table with x's number of dimensions."""
    return table[(...,) + (None,) * (x.ndim - 2)]


def _slices(x: Tensor) -> Iterator[slice]:
    sample = max(x[:1].numel(), 1)
    rows = max((SLICE_ON_CPU if x.device.type == "cpu" else SLICE) // sample, 1)
    return (slice(start, start + rows) for start in range(0, max(x.shape[0], 1), rows))


def _tables(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tables of the whole batch from `run` on slices of it."""
    parts = [run(*(tensor[rows] for tensor in tensors)) for rows in _slices(tensors[0])]
    return tuple(torch.cat(tables) for tables in zip(*parts, strict=True))


def _fill(like: Tensor, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A tensor like `like`, from `run` on slices of the batch."""
    out = torch.empty_like(like)
    for rows in _slices(like):
        out[rows] = run(*(tensor[rows] for tensor in tensors))
    return out

"""Tables: the moments of samples and pools, the pools themselves, and the affine maps that a method decides on.

A table has one row per sample (B, C), or one row that serves all samples (1, C). The mean and variance of a pool follow
from those of its samples by the law of total variance. With d = mean - c for any offset c, and W the weights of the
samples in the pool:

    pooled mean = c + W d        pooled var = W (var + d²) - (W d)²

The result does not depend on the offset, but its rounding error does, so each function takes an offset close to every
pool that it serves. Everything here is ordinary differentiable PyTorch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise import checks
from ghostnoise.torch_private import eager_apply, has_tangent, needs_operators, transformed

__all__ = [
    "Affine",
    "Moments",
    "counts",
    "drawn_samples",
    "excluding_sample",
    "ghost_batches",
    "ghost_noise",
    "ghost_rows",
    "mix",
    "normalize",
    "over_channels",
    "partition",
    "whole_batch",
]

Components: TypeAlias = Literal["both", "shift", "scale"]
COMPONENTS: tuple[Components, ...] = get_args(Components)


class Moments(NamedTuple):
    """The mean and the biased variance of some values: one row per sample or per pool (B, C), or one for all (1, C).

    `n` is the number of values that each row was computed from: an integer if it is the same for all rows, else a
    tensor (B, 1). A row with n = 0 contributes nothing to a pool.
    """

    mean: Tensor
    var: Tensor
    n: "Tensor | int" = 1

    def detach(self) -> "Moments":
        """Return the same moments as constants for the gradient."""
        return Moments(self.mean.detach(), self.var.detach(), self.n)

    def join(self, other: "Moments") -> "Moments":
        """Return the rows of both, these first."""
        count = self.n
        if isinstance(count, Tensor) or isinstance(other.n, Tensor) or count != other.n:
            count = torch.cat([counts(self), counts(other)])
        pairs = zip(self[:2], other[:2], strict=True)
        mean, var = (torch.cat([own, more.to(own.dtype)]) for own, more in pairs)
        return Moments(mean, var, count)


class Affine(NamedTuple):
    """The map y = scale · (x - center) + shift, as tables (B, C), or (1, C) or numbers for all samples.

    The center is separate because `scale * x + shift` loses the digits of x where |mean| is large compared to std.
    """

    center: Tensor | float
    scale: Tensor | float
    shift: Tensor | float

    def then(self, scale: Tensor | None, shift: Tensor | None) -> "Affine":
        """Return this map followed by a scale and a shift, such as weight and bias; None leaves one out."""
        center, own_scale, own_shift = self
        if scale is None:
            return Affine(center, own_scale, own_shift if shift is None else _plus(own_shift, shift))
        return Affine(center, _times(own_scale, scale), _linear(own_shift, scale, 0.0 if shift is None else shift))

    def before(self, other: "Affine") -> "Affine":
        """Return this map followed by another one."""
        shift = _linear(other.center, other.scale, other.shift, -1)
        return Affine(self.center, _times(self.scale, other.scale), _linear(self.shift, other.scale, shift))

    def moments(self, m: Moments) -> Moments:
        """Return the moments that values with the moments `m` have after this map."""
        center, scale, shift = self
        mean = _plus(_times(m.mean - center, scale), shift)
        no_variance = isinstance(m.n, int) and m.n == 1
        return Moments(mean, m.var if no_variance else m.var * (scale * scale), m.n)  # type: ignore[arg-type]

    def detach(self) -> "Affine":
        """Return the same map as a constant for the gradient."""
        return Affine(*(table.detach() if isinstance(table, Tensor) else table for table in self))

    def as_tables(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return center, scale and shift as tables with the channels of `like`; numbers get its dtype and device."""
        made = (t if isinstance(t, Tensor) else like.new_full((), t) for t in self)
        center, scale, shift = (t if t.ndim == 2 else t.expand(1, like.shape[1]) for t in made)
        return center, scale, shift


# Numbers that change nothing take no operation, which would write a table.


def _times(first: Tensor | float, second: Tensor | float) -> Tensor | float:
    if isinstance(first, float) and first in (0.0, 1.0):
        return second if first else 0.0
    return first if isinstance(second, float) and second == 1.0 else first * second


def _plus(first: Tensor | float, second: Tensor | float) -> Tensor | float:
    if isinstance(first, float) and first == 0.0:
        return second
    return first if isinstance(second, float) and second == 0.0 else first + second


def _linear(x: Tensor | float, scale: Tensor | float, shift: Tensor | float, sign: int = 1) -> Tensor | float:
    """Return shift + sign · scale · x."""
    if isinstance(x, Tensor) and isinstance(scale, Tensor):
        return torch.addcmul(shift if isinstance(shift, Tensor) else x.new_full((), shift), x, scale, value=sign)
    product = _times(x, scale)
    return _plus(product if sign == 1 else _times(-1.0, product), shift)


def normalize(
    stats: Moments,
    eps: float = 1e-5,
    min_std: float = 0.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Affine:
    """Return the map to mean 0 and variance 1: (x - mean) / max(sqrt(var + eps), min_std).

    With weight and bias (C,), they follow, as by `then`, in fewer operations.
    """
    if torch.compiler.is_compiling() or not _takes_operators(stats) or needs_operators(weight):
        scale = _plain_scale(stats.var, weight, eps, min_std)
    else:
        (scale,) = _SCALE(stats.var, weight, given=(eps, min_std))
    return Affine(stats.mean, scale, 0.0 if bias is None else bias)


def ghost_noise(whole: Moments, ghost: Moments, eps: float = 1e-3, components: Components = "both") -> Affine:
    """Return the noise of ghost batches relative to the whole batch, which is constant for the gradient (eq. 10).

    (x - (ghost mean - mean)) / sqrt((ghost var + eps) / (var + eps)). A ghost batch without values gives the identity.
    """
    (mean, var, _), (ghost_mean, ghost_var, count) = whole.detach(), ghost.detach()
    center: Tensor | float = 0.0 if components == "scale" else ghost_mean - mean
    scale: Tensor | float = 1.0
    if components != "shift" and var.shape[0] == 1:
        scale = normalize(ghost.detach(), eps, weight=(var[0] + eps).sqrt()).scale
    elif components != "shift":
        scale = ((var + eps) / (ghost_var + eps)).sqrt()
    if isinstance(count, Tensor):
        center = torch.where(count > 0, center, 0.0) if isinstance(center, Tensor) else center
        scale = torch.where(count > 0, scale, 1.0) if isinstance(scale, Tensor) else scale
    return Affine(center, scale, 0.0)


# Pools: the moments of the samples that contribute to each sample's statistics.


def whole_batch(m: Moments) -> Moments:
    """Pool all samples (1, C)."""
    return ghost_batches(m, None)


def ghost_batches(m: Moments, ghost_size: int | None) -> Moments:
    """Pool, for each sample, its ghost batch of `ghost_size` consecutive samples (B, C); None is the whole batch.

    The last ghost batch also takes the remaining samples.
    """
    return _pool(_GHOST_BATCHES, _pooled, m, ghost_size, 0)


def excluding_sample(m: Moments, ghost_size: int | None = None) -> Moments:
    """Pool, for each sample, the other samples of its ghost batch (B, C); None is the whole batch.

    The statistics of a sample do not depend on the sample itself, even if it is not finite.
    """
    return _pool(_EXCLUDING_SAMPLE, _excluding, m, ghost_size, 1)


def drawn_samples(m: Moments, indices: Tensor) -> Moments:
    """Pool, for each row of `indices` (B, N), the N samples drawn (B, C).

    Every drawn row is read once for both moments, and nothing of size B x N x C is allocated.
    """
    compiled, gradient = torch.compiler.is_compiling(), _needs_gradient(m)
    if isinstance(m.n, Tensor) or (compiled and gradient) or not _takes_operators(m):
        return _drawn(m, indices, not compiled and (gradient or transformed() or has_tangent(m.mean, m.var)))
    mean, var = _DRAWN_SAMPLES(m.mean, m.var, given=(indices,))
    return Moments(mean, var, indices.shape[1] * m.n)


def partition(m: Moments, permutation: Tensor, ghost_size: int) -> Moments:
    """Pool the ghost batches of the shuffled batch (B, C); each serves the samples at its own positions."""
    count = m.n[permutation] if isinstance(m.n, Tensor) else m.n
    return ghost_batches(Moments(m.mean[permutation], m.var[permutation], count), ghost_size)


def over_channels(m: Moments, groups: int = 1) -> Moments:
    """Pool, for each sample, each of `groups` equal groups of consecutive channels (B, C)."""
    channels = m.mean.shape[1]
    if not isinstance(groups, int) or groups < 1 or channels % groups:
        raise ValueError(f"groups={groups!r}: must divide the {channels} channels; use 1 for all of them")
    size = channels // groups
    mean, var = (table.unflatten(1, (groups, size)) for table in m[:2])
    pooled = mean.mean(-1, keepdim=True)
    var = (var + (mean - pooled).square()).mean(-1, keepdim=True)
    mean, var = (table.expand(-1, -1, size).flatten(1) for table in (pooled, var))
    return Moments(mean, var, m.n * size)


def mix(first: Moments, second: Moments, weight: float) -> Moments:
    """Return the moments of a mixture: `second` with this weight, and `first` with the rest."""
    between = weight * (1 - weight) * (second.mean - first.mean).square()
    mean = (1 - weight) * first.mean + weight * second.mean
    return Moments(mean, (1 - weight) * first.var + weight * second.var + between, second.n)


def ghost_rows(m: Moments, ghost_size: int | None) -> Moments:
    """Pool the ghost batches of `ghost_batches`, with one row for each of them (G, C)."""
    pooled = ghost_batches(m, ghost_size)
    if ghost_size is None or pooled.mean.shape[0] == 1:
        return pooled
    starts = slice(0, m.mean.shape[0] // ghost_size * ghost_size, ghost_size)
    count = pooled.n[starts] if isinstance(pooled.n, Tensor) else pooled.n
    return Moments(pooled.mean[starts], pooled.var[starts], count)


def counts(m: Moments) -> Tensor:
    """Return the numbers of values of the rows (B, 1)."""
    return m.n if isinstance(m.n, Tensor) else m.mean.new_full((m.mean.shape[0], 1), m.n)


def mean_count(m: Moments) -> "Tensor | int":
    """Return the mean number of values of the rows that have any: that of the samples of ghost batches drawn from them.

    An integer if all rows have as many values.
    """
    if not isinstance(m.n, Tensor):
        return m.n
    return (m.n.sum() / (m.n > 0).sum().clamp_min(1)).clamp_min(1)


def ghost_sizes(batch_size: int, ghost_size: int) -> list[int]:
    """Return the sizes of the consecutive ghost batches; the last one also takes the remaining samples."""
    number = max(batch_size // ghost_size, 1)
    return [ghost_size] * (number - 1) + [batch_size - (number - 1) * ghost_size]


def table_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of tables: float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _pooled(mean: Tensor, var: Tensor, count: "Tensor | int" = 1) -> Moments:
    """Pool the n samples of tables (..., n, C): (..., 1, C). Samples weigh by `count` (..., n, 1).

    If all counts are 0, the moments are 0.
    """
    if not isinstance(count, Tensor) or count.ndim == 0:  # `torch.jit.trace` records integers as tensors
        pooled = mean.mean(-2, keepdim=True)
        square = (var + (mean - pooled).square()).mean(-2, keepdim=True)
        return Moments(pooled, square, count * mean.shape[-2])
    total = count.sum(-2, keepdim=True)
    weights = count / total.clamp_min(1)
    pooled = (weights * mean).sum(-2, keepdim=True)
    return Moments(pooled, (weights * (var + (mean - pooled).square())).sum(-2, keepdim=True), total)


def _excluding(mean: Tensor, var: Tensor, n: "Tensor | int" = 1) -> Moments:
    """Pool, for each of the samples of tables (..., samples, C), all samples except itself, in the same shape.

    If all other samples have no values, the moments are finite and have no meaning.

    "Total minus self" cancels when the sample itself is the outlier that dominates the total. So the most extreme
    sample is left out of the total and added for every sample except itself: what is then subtracted is never larger
    than what remains. A non-finite sample is the most extreme one, so that its own statistics stay finite.
    """
    samples = mean.shape[-2]
    others: Tensor | int = n.sum(-2, keepdim=True) - n if isinstance(n, Tensor) else n * (samples - 1)
    if samples == 2:  # the moments of the other sample: a pool of one sample may be far from any offset
        return Moments(mean.flip(-2), var.flip(-2), others)
    center = _typical_mean(mean, n)
    d = mean - center
    tables = torch.stack([d, var + d.square()])
    tables = n * tables if isinstance(n, Tensor) else tables
    energy = torch.nan_to_num(tables[1].detach(), nan=torch.inf, posinf=torch.inf)
    extreme = torch.arange(samples, device=mean.device).unsqueeze(-1) == energy.argmax(-2, keepdim=True)
    most = tables.where(extreme, 0).sum(-2, keepdim=True)
    rest = tables.where(~extreme, 0).sum(-2, keepdim=True)
    by = others.clamp_min(1) if isinstance(others, Tensor) else samples - 1
    shift, square = rest.where(extreme, rest - tables + most) / by
    return Moments(center + shift, (square - shift.square()).clamp_min(0), others)


def _drawn(m: Moments, indices: Tensor, by_columns: bool = False) -> Moments:
    """Pool drawn samples in plain PyTorch.

    Without `by_columns`, which takes more operations, it is differentiable only once, and by no `torch.func`.
    """
    center = _typical_mean(m.mean, m.n)
    d = m.mean - center
    rows = torch.cat([d, m.var + d.square()], dim=1)
    count: Tensor | int = indices.shape[1] * m.n if isinstance(m.n, int) else 0
    weights: Tensor | None = None
    if isinstance(m.n, Tensor):
        weights = m.n.flatten().to(rows.dtype)[indices]
        count = weights.sum(1, keepdim=True)
        weights = weights / count.clamp_min(1)
    if by_columns:
        pooled: Any = 0
        for at, column in enumerate(indices.unbind(1)):
            pooled = pooled + rows[column] * (1 / indices.shape[1] if weights is None else weights[:, at : at + 1])
    else:
        mode = "mean" if weights is None else "sum"
        pooled = F.embedding_bag(indices, rows, mode=mode, per_sample_weights=weights)
    mean, square = pooled.chunk(2, dim=1)
    return Moments(center + mean, (square - mean.square()).clamp_min(0), count)


def _typical_mean(mean: Tensor, n: "Tensor | int") -> Tensor:
    """Return the median of three samples of tables (..., samples, C), which no outlier can move: (..., 1, C).

    It only controls rounding: pooled moments, and so their gradients, do not depend on it. It is a constant, and finite
    unless two of the three samples are not. Samples without values do not count.
    """
    samples, mean = mean.shape[-2], mean.detach()
    if isinstance(n, Tensor):
        mean = mean.where(n > 0, torch.nan)
        typical = mean.nanmedian(-2, keepdim=True).values
    elif samples < 3:
        typical = mean[..., :1, :]
    else:
        typical = torch.stack([mean[..., at, :] for at in (0, samples // 2, -1)], -2).nanmedian(-2, keepdim=True).values
    return torch.nan_to_num(typical, nan=0.0, posinf=0.0, neginf=0.0)


def _blocks(batch_size: int, ghost_size: int) -> list[tuple[int, int, int]]:
    """Return the first sample, the end and the ghost size of the samples in ghost batches of the same size."""
    size = batch_size if batch_size < 2 * ghost_size else ghost_size
    first = batch_size - size - batch_size % size  # samples of all ghost batches but the last, which may be larger
    if batch_size % size == 0:
        return [(0, batch_size, size)]
    return [(0, first, size), (first, batch_size, batch_size - first)]


def _per_ghost_batch(run: Callable[..., Sequence[Any]], given: Sequence[Any], ghost_size: int) -> list[Any]:
    """Run a function of the ghost batches of tables (G, n, C), and return its tables for each sample (B, C)."""
    blocks = _blocks(given[0].shape[0], ghost_size)
    parts: list[list[Tensor | int]] = []
    for start, end, n in blocks:
        made = run(*(t[start:end].unflatten(0, (-1, n)) if isinstance(t, Tensor) else t for t in given))
        if len(blocks) > 1:
            made = [t if isinstance(t, Tensor) else given[0].new_full(((end - start) // n, 1, 1), t) for t in made]
        parts.append([t.expand(-1, n, -1).flatten(0, 1) if isinstance(t, Tensor) else t for t in made])
    return parts[0] if len(parts) == 1 else [torch.cat(tables) for tables in zip(*parts, strict=True)]


def _takes_operators(m: Moments) -> bool:
    """Return whether operators run on these tables; `torch.compile` fuses plain PyTorch better on GPUs."""
    mean, var = m[:2]
    if mean.dtype is not torch.float64 or mean.shape != var.shape or not mean.shape[0] or needs_operators(mean, var):
        return False
    return mean.is_cpu or not torch.compiler.is_compiling()


def _needs_gradient(m: Moments) -> bool:
    return torch.is_grad_enabled() and (m.mean.requires_grad or m.var.requires_grad)


def _pool(
    operator: "_Operator", plain: Callable[..., Moments], m: Moments, ghost_size: int | None, absent: int
) -> Moments:
    """Pool ghost batches (G, n, C), each for all of its samples; `absent` of them are not in its pools."""
    batch_size = m.mean.shape[0]
    ghost_size = checks.ghost_size_or_none(ghost_size, 1 + absent) or batch_size or 1
    if not _takes_operators(m) or isinstance(m.n, Tensor):
        return _per_sample(plain, m, ghost_size)
    mean, var = operator(m.mean, m.var, given=(ghost_size,))
    blocks = _blocks(batch_size, ghost_size)
    values: list[Any] = [(n - absent) * m.n for *_, n in blocks]
    if len(blocks) == 1:
        return Moments(mean, var, values[0])
    sizes = [end - start for start, end, _ in blocks]
    return Moments(mean, var, torch.cat([mean.new_full((size, 1), n) for size, n in zip(sizes, values, strict=True)]))


def _per_sample(plain: Callable[..., Moments], m: Moments, ghost_size: int) -> Moments:
    """Pool in plain PyTorch; the pool of all samples is one row (1, C)."""
    if plain is _pooled and m.mean.shape[0] < 2 * ghost_size:
        return _pooled(*m)
    return Moments(*_per_ghost_batch(plain, m, ghost_size))


# Operators on tables of samples that weigh equally. The C++ library has them for CPUs, other devices run plain PyTorch.
# Their gradients are operators, too; what torch itself transforms runs and differentiates plain PyTorch.

_LIBRARY = torch.library.Library("ghostnoise", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def _define(schema: str, plain: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Define an operator by its plain form, and return it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ghostnoise::{name}", fake or plain, lib=_LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.ghostnoise, name).default
    return made


class _Operator:
    """A function of tables, which returns a tuple of tables.

    `plain` is the same in differentiable PyTorch. `gradient` takes the gradients, the tables, the first result, what
    else was given, and which tables need a gradient.
    """

    def __init__(self, run: Callable[..., Any], plain: Callable[..., Any], gradient: Callable[..., Any]) -> None:
        self.run, self.plain, self.gradient = run, plain, gradient

    def __call__(self, *tables: Tensor | None, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run with the tables and what else is given; differentiable."""
        if not torch.is_grad_enabled() or not any(table is not None and table.requires_grad for table in tables):
            made: tuple[Tensor, ...] = self.run(*tables, *given)
        else:
            made = (_Function.apply if torch.compiler.is_compiling() else _apply)(self, given, *tables)
        return made


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: _Operator, given: tuple[Any, ...], *tables: Tensor | None) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = operator.run(*tables, *given)
        ctx.save_for_backward(*tables, made[0])
        ctx.operator, ctx.given = operator, given
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operator, needs, again = ctx.operator, ctx.needs_input_grad[2:], torch.is_grad_enabled()
        *tables, first = ctx.saved_tensors
        if not again and not needs_operators(*gradients):
            return None, None, *operator.gradient(gradients, tables, first, ctx.given, needs)
        plain = operator.plain
        return None, None, *_differentiated(lambda *t: plain(*t, *ctx.given), tables, gradients, needs, again)


_apply = eager_apply(_Function)


def _differentiated(
    run: Callable[..., Any], tables: Sequence[Tensor], gradients: Sequence[Tensor], needs: Sequence[bool], again: bool
) -> list[Tensor | None]:
    """Return the gradients of the tables that need one; differentiable if they are needed `again`."""
    with torch.enable_grad():
        made = run(*tables)
        wanted = [table for table, need in zip(tables, needs, strict=True) if need]
        found = iter(torch.autograd.grad(made, wanted, gradients, create_graph=again))
    return [next(found) if need else None for need in needs]


_POOL = "(Tensor mean, Tensor var, int ghost_size) -> (Tensor mean, Tensor var)"
_POOL_BACKWARD = (
    "_backward(Tensor g_mean, Tensor g_var, Tensor mean, Tensor pooled, int ghost_size, bool needs_var) -> "
    "(Tensor g_mean, Tensor g_var)"
)


def _pool_operator(name: str, plain: Callable[..., Moments], gradient: Callable[..., Any], one_row: bool) -> _Operator:
    """Define a pool of ghost batches (G, n, C), with a formula; with `one_row`, that of all samples is (1, C)."""

    def pool(mean: Tensor, var: Tensor, ghost_size: int) -> tuple[Tensor, Tensor]:
        return _per_sample(plain, Moments(mean, var), ghost_size)[:2]

    def rows(mean: Tensor, ghost_size: int) -> int:
        return 1 if one_row and mean.shape[0] < 2 * ghost_size else mean.shape[0]

    def fake(mean: Tensor, var: Tensor, ghost_size: int) -> tuple[Tensor, Tensor]:
        shape = rows(mean, ghost_size), mean.shape[1]
        return mean.new_empty(shape), mean.new_empty(shape)

    def pool_backward(
        g_mean: Tensor, g_var: Tensor, mean: Tensor, pooled: Tensor, ghost_size: int, needs_var: bool
    ) -> tuple[Tensor, Tensor]:
        tables = g_mean, g_var, mean, pooled
        whole = one_row and mean.shape[0] < 2 * ghost_size
        by_mean, by_var = gradient(*tables) if whole else _per_ghost_batch(gradient, tables, ghost_size)
        return by_mean, by_var if needs_var else by_var.new_empty(0, by_var.shape[1])

    def fake_backward(
        g_mean: Tensor, g_var: Tensor, mean: Tensor, pooled: Tensor, ghost_size: int, needs_var: bool
    ) -> tuple[Tensor, Tensor]:
        shape = rows(mean, ghost_size) if needs_var else 0, mean.shape[1]
        return mean.new_empty(mean.shape), mean.new_empty(shape)

    backward = _define(name + _POOL_BACKWARD, pool_backward, fake_backward)

    def differentiate(gradients: Any, tables: Any, pooled: Tensor, given: Any, needs: Any) -> Any:
        by_mean, by_var = backward(*gradients, tables[0], pooled, *given, needs[1])
        return by_mean, by_var.expand_as(tables[0]) if needs[1] else None  # one row has the gradient of all samples

    return _Operator(_define(name + _POOL, pool, fake), pool, differentiate)


def _ghost_batch_gradient(g_mean: Tensor, g_var: Tensor, mean: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    n = mean.shape[-2]
    by_mean, by_var = g_mean.sum(-2, keepdim=True) / n, g_var.sum(-2, keepdim=True) / n
    return by_mean + 2 * by_var * (mean - pooled[..., :1, :]), by_var


def _excluding_gradient(g_mean: Tensor, g_var: Tensor, mean: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    middle, others = mean.mean(-2, keepdim=True), mean.shape[-2] - 1
    through = g_mean - 2 * g_var * (pooled - middle)  # around the same offset for all pools
    through, by_var = ((table.sum(-2, keepdim=True) - table) / others for table in (through, g_var))
    return through + 2 * by_var * (mean - middle), by_var


_GHOST_BATCHES = _pool_operator("ghost_batches", _pooled, _ghost_batch_gradient, one_row=True)
_EXCLUDING_SAMPLE = _pool_operator("excluding_sample", _excluding, _excluding_gradient, one_row=False)


def _fake_draw(mean: Tensor, var: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    shape = indices.shape[0], mean.shape[1]
    return mean.new_empty(shape), mean.new_empty(shape)


def _differentiate_draw(gradients: Any, tables: Any, pooled: Tensor, given: Any, needs: Any) -> Any:
    return _differentiated(lambda mean, var: _drawn(Moments(mean, var), *given)[:2], tables, gradients, needs, False)


_DRAWN_SAMPLES = _Operator(
    _define(
        "drawn_samples(Tensor mean, Tensor var, Tensor indices) -> (Tensor mean, Tensor var)",
        lambda mean, var, indices: _drawn(Moments(mean, var), indices)[:2],
        _fake_draw,
    ),
    lambda mean, var, indices: _drawn(Moments(mean, var), indices, by_columns=True)[:2],
    _differentiate_draw,
)


def _plain_scale(var: Tensor, weight: Tensor | None, eps: float, min_std: float) -> Tensor:
    var = var + eps
    if min_std > 0:  # before the root, whose slope at 0 is infinite
        var = var.clamp_min(min_std**2)
    return var.rsqrt() if weight is None else var.rsqrt() * weight


def _plain_scale_backward(
    gradient: Tensor, var: Tensor, weight: Tensor | None, eps: float, min_std: float
) -> tuple[Tensor, Tensor]:
    value = var + eps
    rstd = value.clamp_min(min_std**2).rsqrt()
    by_var = (-0.5 * gradient * rstd.pow(3)).where(value >= min_std**2, 0)
    if weight is None:
        return by_var, by_var.new_empty(0)
    return by_var * weight, (gradient * rstd).sum(0)


_scale = _define("normalizing_scale(Tensor var, Tensor? weight, float eps, float min_std) -> Tensor", _plain_scale)
_scale_backward = _define(
    "normalizing_scale_backward(Tensor gradient, Tensor var, Tensor? weight, float eps, float min_std) -> "
    "(Tensor g_var, Tensor g_weight)",
    _plain_scale_backward,
)


def _differentiate_scale(gradients: Any, tables: Any, scale: Tensor, given: Any, needs: Any) -> Any:
    by_var, by_weight = _scale_backward(*gradients, *tables, *given)
    return by_var, by_weight if needs[1] else None


_SCALE = _Operator(lambda *given: (_scale(*given),), lambda *given: (_plain_scale(*given),), _differentiate_scale)

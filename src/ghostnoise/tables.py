"""Tables: the moments of samples and pools, the pools themselves, and the affine maps that a method decides on.

A table has one row per sample (B, C), or one row that serves all samples (1, C). The mean and variance of a pool follow
from those of its samples by the law of total variance. With d = mean - c for any offset c, and W the weights of the
samples in the pool:

    pooled mean = c + W d        pooled var = W (var + d²) - (W d)²

The result does not depend on the offset, but its rounding error does, so each function takes an offset close to every
pool that it serves. Everything here is ordinary differentiable PyTorch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """The map y = scale · (x - center) + shift, as tables (B, C), or (1, C) for all samples.

    The center is separate because `scale * x + shift` loses the digits of x where |mean| is large compared to std.
    """

    center: Tensor
    scale: Tensor
    shift: Tensor

    def then(self, scale: Tensor | None, shift: Tensor | None) -> "Affine":
        """Return this map followed by a scale and a shift, such as weight and bias; None leaves one out."""
        center, own_scale, own_shift = self
        if scale is not None:
            own_scale, own_shift = own_scale * scale, own_shift * scale
        return Affine(center, own_scale, own_shift if shift is None else own_shift + shift)

    def before(self, other: "Affine") -> "Affine":
        """Return this map followed by another one."""
        return Affine(self.center, self.scale * other.scale, (self.shift - other.center) * other.scale + other.shift)

    def moments(self, m: Moments) -> Moments:
        """Return the moments that values with the moments `m` have after this map."""
        return Moments(self.scale * (m.mean - self.center) + self.shift, m.var * self.scale.square(), m.n)

    def detach(self) -> "Affine":
        """Return the same map as a constant for the gradient."""
        return Affine(*(table.detach() for table in self))


def normalize(stats: Moments, eps: float = 1e-5, min_std: float = 0.0) -> Affine:
    """Return the map to mean 0 and variance 1: (x - mean) / max(sqrt(var + eps), min_std)."""
    var = stats.var + eps
    if min_std > 0:  # before the root, whose slope at 0 is infinite
        var = var.clamp_min(min_std**2)
    return Affine(stats.mean, var.rsqrt(), torch.zeros_like(stats.mean[:1]))


def ghost_noise(whole: Moments, ghost: Moments, eps: float = 1e-3, components: Components = "both") -> Affine:
    """Return the noise of ghost batches relative to the whole batch, which is constant for the gradient (eq. 10).

    (x - (ghost mean - mean)) / sqrt((ghost var + eps) / (var + eps)). A ghost batch without values gives the identity.
    """
    (mean, var, _), (ghost_mean, ghost_var, count) = whole.detach(), ghost.detach()
    zero = torch.zeros_like(mean[:1])
    center = zero if components == "scale" else ghost_mean - mean
    scale = torch.ones_like(zero) if components == "shift" else ((var + eps) / (ghost_var + eps)).sqrt()
    if isinstance(count, Tensor):
        center, scale = torch.where(count > 0, center, 0.0), torch.where(count > 0, scale, 1.0)
    return Affine(center, scale, zero)


# Pools: the moments of the samples that contribute to each sample's statistics.


def whole_batch(m: Moments) -> Moments:
    """Pool all samples (1, C)."""
    return _pooled(*m)


def ghost_batches(m: Moments, ghost_size: int | None) -> Moments:
    """Pool, for each sample, its ghost batch of `ghost_size` consecutive samples (B, C); None is the whole batch.

    The last ghost batch also takes the remaining samples.
    """
    if ghost_size is None or m.mean.shape[0] < 2 * ghost_size:
        return whole_batch(m)
    return _per_ghost_batch(_pooled, m, ghost_size)


def excluding_sample(m: Moments, ghost_size: int | None = None) -> Moments:
    """Pool, for each sample, the other samples of its ghost batch (B, C); None is the whole batch.

    The statistics of a sample do not depend on the sample itself, even if it is not finite.
    """
    return _per_ghost_batch(_excluding, m, m.mean.shape[0] if ghost_size is None else ghost_size)


def drawn_samples(m: Moments, indices: Tensor) -> Moments:
    """Pool, for each row of `indices` (B, N), the N samples drawn (B, C).

    Every drawn row is read once for both moments, and nothing of size B x N x C is allocated.
    """
    center = _typical_mean(m.mean, m.n)
    d = m.mean - center
    rows = torch.cat([d, m.var + d.square()], dim=1)
    count: Tensor | int
    if isinstance(m.n, Tensor):
        weights = m.n.flatten().to(rows.dtype)[indices]
        count = weights.sum(1, keepdim=True)
        weights = weights / count.clamp_min(1)
        mean, square = F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights).chunk(2, dim=1)
    else:
        count = indices.shape[1] * m.n
        mean, square = F.embedding_bag(indices, rows, mode="mean").chunk(2, dim=1)
    return Moments(center + mean, (square - mean.square()).clamp_min(0), count)


def partition(m: Moments, permutation: Tensor, ghost_size: int) -> Moments:
    """Pool the ghost batches of the shuffled batch (B, C); each serves the samples at its own positions."""
    count = m.n[permutation] if isinstance(m.n, Tensor) else m.n
    return ghost_batches(Moments(m.mean[permutation], m.var[permutation], count), ghost_size)


def over_channels(m: Moments, groups: int = 1) -> Moments:
    """Pool, for each sample, each of `groups` equal groups of consecutive channels (B, C)."""
    size = m.mean.shape[1] // groups
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


def _per_ghost_batch(pool: Callable[..., Moments], m: Moments, ghost_size: int) -> Moments:
    """Run `pool` on the ghost batches of a batch (G, n, C), and return its result for each sample (B, C)."""
    batch_size = m.mean.shape[0]
    size = batch_size if batch_size < 2 * ghost_size else ghost_size
    first = batch_size - size - batch_size % size  # samples of all ghost batches but the last, which may be larger
    blocks = [(0, batch_size)] if batch_size % size == 0 else [(0, first), (first, batch_size)]
    parts: list[list[Tensor | int]] = []
    for start, end in blocks:
        n = size if len(blocks) == 1 or start < first else end - start
        given = [t[start:end].unflatten(0, (-1, n)) if isinstance(t, Tensor) else t for t in m]
        mean, var, count = pool(*given)
        if not isinstance(count, Tensor) and len(blocks) > 1:
            count = mean.new_full((mean.shape[0], 1, 1), count)
        parts.append([t.expand(-1, n, -1).flatten(0, 1) if isinstance(t, Tensor) else t for t in (mean, var, count)])
    if len(parts) == 1:
        return Moments(*parts[0])  # type: ignore[arg-type]
    return Moments(*(torch.cat(tables) for tables in zip(*parts, strict=True)))

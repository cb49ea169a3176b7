"""Who counts in whose statistics: everyone, the others, everyone or the others in blocks, or random draws.

Each function pools per-sample moments with one row-stochastic matrix W (who looks x who is seen), in that matrix'
cheap form, by the law of total variance: with d = mean - c for any offset c,

    pooled mean = c + W d        pooled var = W (var + d²) - (W d)²

The offset decides how many digits survive, so each function chooses one that is near every pool it serves.
Moments are tables (..., n, C): n samples that can be seen, with ghost batches as a leading dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise.moments import Moments
from ghostnoise.randomness import drawn_by

Who = Callable[[Moments], Moments]


def everyone(moments: Moments) -> Moments:
    """Pool all n samples, as batch normalization does: (..., 1, C)."""
    mean = moments.mean.mean(-2, keepdim=True)
    return Moments(mean, (moments.var + (moments.mean - mean).square()).mean(-2, keepdim=True))


def others(moments: Moments) -> Moments:
    """Pool all samples but oneself (eqs. 7-8): (..., n, C).

    "Total minus self" cancels when self is the outlier that dominates the total. So the most extreme sample is kept
    out of the total, and added for everyone but itself: what is then subtracted is never larger than what stays.
    """
    extreme, center = _extreme_and_center(moments)
    n = moments.mean.shape[-2]

    def sum_of_others(table: Tensor) -> Tensor:
        most = table.where(extreme, 0).sum(-2, keepdim=True)
        rest = table.where(~extreme, 0).sum(-2, keepdim=True)
        return rest.where(extreme, rest - table + most)

    d = moments.mean - center
    mean = sum_of_others(d) / (n - 1)
    var = sum_of_others(moments.var + d.square()) / (n - 1) - mean.square()
    return Moments(center + mean, var.clamp_min(0))


def ghost_sizes(batch_size: int, ghost_size: int) -> list[int]:
    """Sizes of the consecutive ghost batches: all `ghost_size`, the last one with the left-over samples too."""
    count = max(batch_size // ghost_size, 1)
    return [ghost_size] * (count - 1) + [batch_size - (count - 1) * ghost_size]


def blocks(moments: Moments, ghost_size: int, who: Who = everyone) -> Moments:
    """Pool as `who` does, inside consecutive ghost batches (eq. 1): (B, C)."""
    batch_size = moments.mean.shape[0]
    last = ghost_sizes(batch_size, ghost_size)[-1]
    even = batch_size if last == ghost_size else batch_size - last  # a ragged last ghost batch is pooled apart
    parts = [_fold_and_pool(moments, slice(0, even), ghost_size, who)] if even else []
    if even < batch_size:
        parts.append(_fold_and_pool(moments, slice(even, batch_size), last, who))
    return Moments(torch.cat([part.mean for part in parts]), torch.cat([part.var for part in parts]))


def draws(moments: Moments, indices: Tensor) -> Moments:
    """Pool the N samples drawn for each of B samples, `indices` (B, N), with replacement (eq. 9): (B, C).

    Every drawn row is read once for both moments, and nothing of size B x N x C is made.
    """
    _, center = _extreme_and_center(moments)
    d = moments.mean - center
    rows = torch.cat([d, moments.var + d.square()], dim=1)
    mean, square = F.embedding_bag(indices, rows, mode="mean").chunk(2, dim=1)
    return Moments(center + mean, (square - mean.square()).clamp_min(0))


def draw_indices(batch_size: int, ghost_size: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw a fresh ghost batch for each sample, uniformly and with replacement: (B, N)."""
    return torch.randint(batch_size, (batch_size, ghost_size), device=device, **drawn_by(generator))


def _fold_and_pool(moments: Moments, rows: slice, size: int, who: Who) -> Moments:
    folded = Moments(*(table[rows].unflatten(0, (-1, size)) for table in moments))
    return Moments(*(table.expand_as(folded.mean).flatten(0, 1) for table in who(folded)))


def _extreme_and_center(moments: Moments) -> tuple[Tensor, Tensor]:
    """Which sample is the most extreme (one-hot over n), and the mean of the rest: an offset no outlier can move.

    Both are arbitrary choices for the sake of rounding: the pooled moments, and so their gradients, do not depend on
    them, and they are constants.
    """
    mean, var = moments.detach()
    n = mean.shape[-2]
    energy = var + (mean - mean.mean(-2, keepdim=True)).square()
    extreme = torch.arange(n, device=mean.device).unsqueeze(-1) == energy.argmax(-2, keepdim=True)
    rest = mean if n == 1 else mean.where(~extreme, 0)
    return extreme, rest.sum(-2, keepdim=True) / max(n - 1, 1)

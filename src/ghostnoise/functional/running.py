"""Running statistics: what inference uses, updated in place and without waiting for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.ghosts import GhostBatch, everyone
from ghostnoise.moments import Moments


class Running(NamedTuple):
    """The buffers of a batch norm, each of which may be absent, and how far a step moves them."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None = None
    momentum: float | None = 0.1

    @property
    def absent(self) -> bool:
        """There is nothing to normalize with at inference."""
        return self.mean is None and self.var is None

    def update(self, stats: Moments) -> None:
        """Move towards the batch's `stats` (1, C), unless they are not finite: an overflow must not poison them."""
        with torch.no_grad():
            pairs = [(old, stat) for old, stat in zip((self.mean, self.var), stats, strict=True) if old is not None]
            moved = [old.lerp(stat.to(old.dtype).flatten(), self._factor(old)) for old, stat in pairs]
            # A sum is finite if and only if its terms are; the moved buffers tell of the statistics too.
            sums = [table.sum(dtype=stats.mean.dtype) for table in (moved or stats)]
            finite = torch.isfinite(sums[0] + sums[-1])
            for (old, _), new in zip(pairs, moved, strict=True):
                torch.where(finite, new, old, out=old)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(finite)

    def _factor(self, buffer: Tensor) -> float | Tensor:
        if self.momentum is not None:
            return self.momentum
        if self.num_batches_tracked is None:
            raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
        return (self.num_batches_tracked + 1).to(buffer.dtype).reciprocal()


# What the buffers follow, from the moments (B, C) of a batch and the statistics (R, C) that it was normalized with.


def whole_batch(moments: Moments, stats: Moments) -> Moments:
    """The whole batch, the variance biased."""
    return stats if stats.mean.shape[0] == 1 else everyone(*(table.to(stats.mean.dtype) for table in moments))


def whole_batch_unbiased(moments: Moments, stats: Moments, spatial: int) -> Moments:
    """The whole batch, the variance unbiased, as in `nn.BatchNorm*`."""
    count = moments.mean.shape[0] * spatial
    mean, var = whole_batch(moments, stats)
    return Moments(mean, var * (count / (count - 1)))


def ghost_average(moments: Moments, stats: Moments, ghost_size: int | None) -> Moments:
    """The average over samples of their ghost batches' means, which is the batch's, and of their biased variances."""
    who = GhostBatch(ghost_size)
    return Moments(*(who.average(table, moments.mean.shape[0]) for table in stats))

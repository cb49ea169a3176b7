"""Running statistics: what inference uses, updated in place and without waiting for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.ghosts import blocks, everyone
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
            factor = self._factor(stats)
            old = [buffer for buffer in (self.mean, self.var) if buffer is not None]
            towards = [stat for buffer, stat in zip(self[:2], stats, strict=True) if buffer is not None]
            moved = [_move(buffer, stat.flatten(), factor) for buffer, stat in zip(old, towards, strict=True)]
            finite = torch.stack([torch.isfinite(table).all() for table in (*stats, *moved)]).all()
            for buffer, new in zip(old, moved, strict=True):
                buffer.copy_(new.where(finite, buffer))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(finite)

    def _factor(self, stats: Moments) -> Tensor:
        if self.momentum is not None:
            return stats.mean.new_full((), self.momentum)
        if self.num_batches_tracked is None:
            raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
        return (self.num_batches_tracked + 1).to(stats.mean.dtype).reciprocal()


def _move(buffer: Tensor, towards: Tensor, factor: Tensor) -> Tensor:
    return buffer.to(towards.dtype).lerp(towards, factor).to(buffer.dtype)


def whole_batch_unbiased(moments: Moments, spatial: int) -> Moments:
    """The moments of the whole batch, the variance unbiased, as `nn.BatchNorm*` keeps them."""
    count = moments.mean.shape[0] * spatial
    stats = everyone(moments)
    return Moments(stats.mean, stats.var * (count / (count - 1)))


def ghost_average(moments: Moments, ghost_size: int) -> Moments:
    """The mean of the whole batch, and the average over samples of their ghost batches' biased variances."""
    return Moments(everyone(moments).mean, blocks(moments, ghost_size).var.mean(0, keepdim=True))

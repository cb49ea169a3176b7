"""Running statistics: what inference uses, updated in place and without waiting for the device."""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine.op import Seen
from ghostnoise.ghosts import GhostBatch
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

    def update(self, stats: Moments, passes: ModuleType) -> None:
        """Move towards the batch's `stats` (1, C), unless they are not finite: an overflow must not poison them."""
        if self.momentum is None and self.num_batches_tracked is None:
            raise ValueError("momentum=None: needs num_batches_tracked, the count of the cumulative average")
        checks.written_to([self.mean, self.var, self.num_batches_tracked], stats.mean)
        passes.follow(self.mean, self.var, self.num_batches_tracked, self.momentum, stats)


def recomputing() -> bool:
    """This forward pass runs inside a backward one: of activation checkpointing, a second time for the same batch.

    `torch.compile` decides on recomputation after it has seen the update, and runs that once.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


# What the buffers follow, from what a normalizer saw of the batch.


def whole_batch(seen: Seen) -> Moments:
    """The whole batch, the variance biased."""
    stats: Moments = seen.stats if seen.stats.mean.shape[0] == 1 else seen.passes.everyone(seen.moments, None)
    return stats


def whole_batch_unbiased(seen: Seen, spatial: int) -> Moments:
    """The whole batch, the variance unbiased, as in `nn.BatchNorm*`."""
    count = seen.moments.mean.shape[0] * spatial
    mean, var = whole_batch(seen)
    return Moments(mean, var * (count / (count - 1)))


def ghost_average(seen: Seen, ghost_size: int | None) -> Moments:
    """The average over samples of their ghost batches' means, which is the batch's, and of their biased variances."""
    who = GhostBatch(ghost_size)
    return Moments(*(who.average(table, seen.moments.mean.shape[0]) for table in seen.stats))

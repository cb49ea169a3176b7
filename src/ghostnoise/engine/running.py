"""Running statistics: the buffers of a layer, and the moments of a batch that they are updated towards."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.statistics.moments import Moments, table_dtype
from ghostnoise.statistics.samples import Contributors, GhostBatch, first_and_last_size


class Running(NamedTuple):
    """The buffers of a batch norm, each of which may be None, and the momentum of their update."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None = None
    momentum: float | None = 0.1

    @property
    def is_absent(self) -> bool:
        """Whether there are no running statistics to normalize with at inference."""
        return self.mean is None and self.var is None

    def moments(self, device: torch.device) -> Moments | None:
        """Return the running statistics (C,) in the dtype of tables, as they are now; None if one is absent."""
        if self.mean is None or self.var is None:
            return None
        table = table_dtype(device)
        return Moments(self.mean.detach().to(table, copy=True), self.var.detach().to(table, copy=True))


class Population(NamedTuple):
    """The moments of a batch that the running statistics are updated towards.

    They are the moments of the whole batch, or with `ghosts` the average over samples of the means and variances of
    their ghost batches. If `unbiased`, the variance is multiplied by n / (n - 1), as in `nn.BatchNorm*d`.
    """

    ghosts: bool = False
    unbiased: bool = False

    def moments(
        self,
        contributors: Contributors,
        samples: Moments,
        pooled: Moments,
        batch_size: int,
        spatial: int,
        pool: Callable[[Contributors, Moments], Moments],
    ) -> Moments:
        """Return these moments (1, C), given those of the samples (B, C) and of the pools (R, C), and how to pool."""
        if self.ghosts:
            assert isinstance(contributors, GhostBatch)
            return Moments(*(contributors.average(table, batch_size) for table in pooled))
        mean, var = _whole(contributors, samples, pooled, batch_size, pool)
        count = batch_size * spatial
        return Moments(mean, var * (count / (count - 1)) if self.unbiased else var)


class Update(NamedTuple):
    """The update of running statistics that a forward pass makes."""

    running: Running
    population: Population


def _whole(
    contributors: Contributors,
    samples: Moments,
    pooled: Moments,
    batch_size: int,
    pool: Callable[[Contributors, Moments], Moments],
) -> Moments:
    """Return the moments of the whole batch (1, C): from those of ghost batches, or else of samples."""
    if not isinstance(contributors, GhostBatch):
        return pool(GhostBatch(), samples)
    if pooled.mean.shape[0] == 1:
        return pooled
    size, last = first_and_last_size(batch_size, contributors.ghost_size)
    if size == last:
        return pool(GhostBatch(), pooled)
    mean = contributors.average(pooled.mean, batch_size)
    return Moments(mean, contributors.average(pooled.var + (pooled.mean - mean).square(), batch_size))

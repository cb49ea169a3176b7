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
        pool: Callable[..., Moments],
        counts: Tensor | None = None,
    ) -> Moments:
        """Return these moments (1, C), given those of the samples (B, C) and of the pools (R, C), and how to pool.

        `counts` (B, 1) are the numbers of values of the samples, if they may differ. If all are 0, the moments are NaN.
        """
        count: int | Tensor = batch_size * spatial
        if counts is not None:
            count = counts.sum()
            absent = torch.where(count > 0, 0, torch.nan)  # a batch without values does not update anything
            samples, pooled = (each._replace(mean=each.mean + absent) for each in (samples, pooled))
        if self.ghosts:
            assert isinstance(contributors, GhostBatch)
            return Moments(*(contributors.average(table, batch_size, counts) for table in pooled))
        mean, var = _whole(contributors, samples, pooled, batch_size, pool, counts)
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
    pool: Callable[..., Moments],
    counts: Tensor | None,
) -> Moments:
    """Return the moments of the whole batch (1, C): from those of ghost batches, or else of samples."""
    if not isinstance(contributors, GhostBatch):
        return pool(GhostBatch(), samples, counts=counts)
    if pooled.mean.shape[0] == 1:
        return pooled
    size, last = first_and_last_size(batch_size, contributors.ghost_size)
    if size == last and counts is None:
        return pool(GhostBatch(), pooled)
    mean = contributors.average(pooled.mean, batch_size, counts)
    return Moments(mean, contributors.average(pooled.var + (pooled.mean - mean).square(), batch_size, counts))

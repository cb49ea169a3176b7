"""Tables of moments, and the conversion between one row per sample and one row per pool.

Shapes: B samples, C channels, S spatial positions, R pools. A table has shape (B, C), or (R, C) with one row per pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and biased variance: of each sample over its own positions, or pooled over several samples."""

    mean: Tensor
    var: Tensor

    def detach(self) -> "Moments":
        """Return the same moments as constants for the gradient."""
        return Moments(self.mean.detach(), self.var.detach())


class Stored(NamedTuple):
    """Moments of samples from earlier batches (n, C), and their numbers of values (n,); 0 for an absent sample."""

    mean: Tensor
    var: Tensor
    counts: Tensor

    def at(self, rows: Tensor) -> "Stored":
        """Return these rows."""
        return Stored(*(table[rows] for table in self))


def expand_pools(table: Tensor, batch_size: int, samples_per_pool: int = 1) -> Tensor:
    """Expand a table of pools (R, C) to one of samples (B, C).

    Each row serves `samples_per_pool` consecutive samples; the last row also serves the remaining ones.
    """
    rows = table.shape[0]
    if rows == batch_size:
        return table
    if rows == 1:
        return table.expand(batch_size, -1)
    last = batch_size - (rows - 1) * samples_per_pool
    if last == samples_per_pool:
        return table.unsqueeze(1).expand(-1, samples_per_pool, -1).flatten(0, 1)
    even = table[:-1].unsqueeze(1).expand(-1, samples_per_pool, -1).flatten(0, 1)
    return torch.cat([even, table[-1:].expand(last, -1)])


def sum_pools(table: Tensor, rows: int, samples_per_pool: int = 1) -> Tensor:
    """Sum a table of samples (B, C) over the samples of each pool: (R, C). This is the transpose of `expand_pools`."""
    if rows == table.shape[0]:
        return table
    first = (rows - 1) * samples_per_pool
    parts = [table[:first].unflatten(0, (rows - 1, samples_per_pool)).sum(1)] if rows > 1 else []
    return torch.cat([*parts, table[first:].sum(0, keepdim=True)])


def table_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of moments: float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which elements of x are computed: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32

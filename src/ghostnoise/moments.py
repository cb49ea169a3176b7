"""The small tables that a batch is reduced to.

Shapes: B samples, C channels, S spatial positions. A table is (B, C), or (R, C) with a row for each pool of samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and biased variance: of each sample over its own positions, or pooled over several samples."""

    mean: Tensor
    var: Tensor


class Affine(NamedTuple):
    """What is applied to x: `scale * (x - center) + shift`, tables in the dtype of the arithmetic.

    The center stands apart because `scale * x + shift` loses the digits of x when |mean| is large against std.
    """

    center: Tensor
    scale: Tensor
    shift: Tensor


class Standard(NamedTuple):
    """What statistics come to, in the dtype of the arithmetic: (R, C) each.

    `center` is the rounded mean and `lost` what rounding added to it. `rstd` is the factor to unit variance, `factor`
    that times the weight. `shift` is the bias, and what the center lost.
    """

    center: Tensor
    lost: Tensor
    rstd: Tensor
    factor: Tensor
    shift: Tensor


def spread(table: Tensor, batch_size: int, each: int = 1) -> Tensor:
    """A table of pools (R, C) as one of samples (B, C): a row serves `each` samples, the last those left over too."""
    rows = table.shape[0]
    if rows == batch_size:
        return table
    if rows == 1:
        return table.expand(batch_size, -1)
    last = batch_size - (rows - 1) * each
    if last == each:
        return table.unsqueeze(1).expand(-1, each, -1).flatten(0, 1)
    return torch.cat([table[:-1].unsqueeze(1).expand(-1, each, -1).flatten(0, 1), table[-1:].expand(last, -1)])


def total(table: Tensor, rows: int, each: int = 1) -> Tensor:
    """A table of samples (B, C), summed over those that a row serves: (R, C); `spread` transposed."""
    if rows == table.shape[0]:
        return table
    first = (rows - 1) * each
    parts = [table[:first].unflatten(0, (rows - 1, each)).sum(1)] if rows > 1 else []
    return torch.cat([*parts, table[first:].sum(0, keepdim=True)])


def table_dtype(device: torch.device) -> torch.dtype:
    """The dtype of moments: float64, and float32 on the devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """The dtype that elements of x are computed in: float32, and float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)

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
    """What is applied to x: `scale * (x - center) + shift`, tables (B, C) in the dtype of the arithmetic.

    The center stands apart because `scale * x + shift` loses the digits of x when |mean| is large against std.
    """

    center: Tensor
    scale: Tensor
    shift: Tensor


def table_dtype(device: torch.device) -> torch.dtype:
    """The dtype of moments: float64, and float32 on the devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """The dtype that elements of x are computed in: float32, and float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)

"""Masks of valid positions, for padded batches: the values at other positions are replaced before x is measured.

At invalid positions, x is filled with a constant of the sample and channel that is close to the sample's mean, so every
pass over x is that of a batch without a mask. The moments over the n valid of S positions follow from those of the
filled x, without cancelling since the constant c is close to the mean:

    mean = c + S/n·(mean₀ - c)        var = S/n·(var₀ + (mean₀ - c)²) - (mean - c)²

They do not depend on the constant, which is not differentiated. Samples then weigh by their n in pools. The output is
set to 0 at invalid positions, so dy is 0 there, and so is the gradient of x.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.ops import arithmetic_dtype
from ghostnoise.tables import Moments, table_dtype


class Valid(NamedTuple):
    """The numbers of valid positions of the samples of x (B, 1), and the constants that fill x (B, C)."""

    counts: Tensor
    fill: Tensor

    def moments(self, filled: Moments) -> Moments:
        """Return the moments over valid positions, given those of the filled x; differentiable.

        A sample without valid positions has the moments 0.
        """
        share, fill = filled.n / self.counts.clamp_min(1), self.fill
        offset = filled.mean - fill
        rest = share * offset
        var = (share * (filled.var + offset.square()) - rest.square()).clamp_min(0)
        return Moments(fill + rest, var, self.counts)


def fill(x: Tensor, mask: Tensor) -> tuple[Tensor, Valid]:
    """Return x (B, C, *positions) with other values at invalid positions, differentiable, and what describes them."""
    blank, spatial = ~mask.unsqueeze(1), list(range(2, x.ndim))
    given, numbers = torch.where(blank, 0, x.detach()), count(mask)
    total = given.sum(spatial, keepdim=True, dtype=arithmetic_dtype(x)) if spatial else given
    shape = (-1, *(1,) * (x.ndim - 1))
    constants = (total / numbers.clamp_min(1).view(shape).to(total.dtype)).to(x.dtype)
    return torch.where(blank, constants, x), Valid(numbers, constants.flatten(1).to(table_dtype(x.device)))


def zero(y: Tensor, mask: Tensor, channel_dim: int = 1) -> Tensor:
    """Return y with 0 where a mask (B, *positions) is False."""
    return torch.where(mask.unsqueeze(channel_dim % y.ndim), y, 0)  # in the memory format of y, unlike masked_fill


def count(mask: Tensor) -> Tensor:
    """Return the number of valid positions of each sample (B, 1)."""
    return mask.unsqueeze(1).flatten(1).sum(1, keepdim=True).to(table_dtype(mask.device))

"""Masks of valid positions, for padded batches: the values at other positions are replaced before the engine sees them.

At invalid positions, x is filled with a constant of the sample and channel that is close to the sample's mean, so every
pass over x is that of a batch without a mask. The moments over the n valid of S positions follow from those of the
filled x, without cancelling since the constant c is close to the mean:

    mean = c + S/n·(mean₀ - c)        var = S/n·(var₀ + (mean₀ - c)²) - (mean - c)²

They do not depend on the constant, which is not differentiated. Samples then weigh by their n (`Contributors.pool`),
and every value of a pool by one over the number of its values (`Contributors.linear_term`). The output is set to 0 at
invalid positions, so dy is 0 there, and so is the gradient of x.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.statistics.moments import Moments, arithmetic_dtype, table_dtype


class Valid(NamedTuple):
    """The numbers of valid positions of all samples of the batch (B, 1), and the constants that fill x (B, C).

    If the batch is spread over ranks, the numbers are those of all ranks, and the constants those of this rank.
    """

    counts: Tensor
    fill: Tensor

    def moments(self, filled: Moments, spatial: int, counts: Tensor) -> Moments:
        """Return the moments over valid positions, given those of the filled x, and the numbers for its samples.

        Differentiable. A sample without valid positions has the moments 0.
        """
        share, fill = spatial / counts.clamp_min(1), self.fill
        offset = filled.mean - fill
        rest = share * offset
        return Moments(fill + rest, (share * (filled.var + offset.square()) - rest.square()).clamp_min(0))


class Mask(NamedTuple):
    """Valid positions (B, *positions), and their numbers for all samples of the batch (B, 1), those of all ranks."""

    valid: Tensor
    counts: Tensor

    def fill(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Valid]:
        """Return x with other values at invalid positions, differentiable, and the tables that describe them."""
        blank, dim = _blank(x, self.valid, channel_dim), channel_dim % x.ndim
        positions = [each for each in range(1, x.ndim) if each != dim]
        given, numbers = torch.where(blank, 0, x.detach()), (~blank).sum(positions, keepdim=True)
        total = given.sum(positions, keepdim=True, dtype=arithmetic_dtype(x)) if positions else given
        constants = (total / numbers.clamp_min(1)).to(x.dtype)
        filled = torch.where(blank, constants, x)
        return filled, Valid(self.counts, constants.flatten(1).to(table_dtype(x.device)))

    def zero(self, y: Tensor, channel_dim: int) -> Tensor:
        """Return y with 0 at invalid positions."""
        return zero_invalid(y, self.valid, channel_dim)


def zero_invalid(y: Tensor, valid: Tensor, channel_dim: int) -> Tensor:
    """Return y with 0 where a mask (B, *positions) is False."""
    return torch.where(_blank(y, valid, channel_dim), 0, y)  # in the memory format of y, unlike masked_fill


def count(mask: Tensor) -> Tensor:
    """Return the number of valid positions of each sample (B, 1)."""
    return mask.unsqueeze(1).flatten(1).sum(1, keepdim=True).to(table_dtype(mask.device))


def _blank(x: Tensor, valid: Tensor, channel_dim: int) -> Tensor:
    return ~valid.unsqueeze(channel_dim % x.ndim)

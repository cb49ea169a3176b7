"""Inputs for property tests: shapes, layouts, dtypes and ghost sizes that hypothesis chooses."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed")


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    channel_dim: int
    layout: str
    dtype: torch.dtype
    ghost_size: int
    seed: int

    @property
    def batch_size(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    @property
    def spatial(self) -> int:
        return math.prod(self.shape) // (self.batch_size * self.channels)

    def tensor(self, offset: int = 0) -> Tensor:
        """Seeded normal values with a mean that is not zero, in this case's layout."""
        generator = torch.Generator().manual_seed(self.seed + offset)
        values = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        return lay_out(values.mul_(1.5).add_(0.7).to(self.dtype), self.layout)

    def vector(self, offset: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + offset)
        return torch.randn(self.channels, dtype=torch.float64, generator=generator).to(self.dtype)

    def indices(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 9)
        return torch.randint(self.batch_size, (self.batch_size, self.ghost_size), generator=generator)

    def permutation(self) -> Tensor:
        return torch.randperm(self.batch_size, generator=torch.Generator().manual_seed(self.seed + 9))


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "channels_last" and x.ndim > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "sliced":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.contiguous()


@st.composite
def cases(draw, least_batch: int = 1, least_values: int = 2, least_ghost: int = 1, dtypes=(torch.float64,)) -> Case:
    """Cases with at least `least_values` values per channel in the smallest ghost batch."""
    batch_size = draw(st.integers(least_batch, 9))
    channels = draw(st.integers(1, 4))
    spatial = draw(st.lists(st.integers(1, 4), max_size=3))
    ghost_size = draw(st.integers(least_ghost, 12))
    last = draw(st.booleans())
    shape = (batch_size, *spatial, channels) if last else (batch_size, channels, *spatial)
    positions = math.prod(spatial)
    while min(ghost_size, batch_size) * positions < least_values:
        ghost_size, batch_size = max(ghost_size, least_values), max(batch_size, least_values)
        shape = (batch_size, *shape[1:])
    return Case(
        shape,
        -1 if last else 1,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(dtypes)),
        ghost_size,
        draw(st.integers(0, 10**6)),
    )

"""Inputs for property tests: shapes, layouts, dtypes, masks and ghost sizes that hypothesis chooses."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed")
ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    def positions(self) -> tuple[int, ...]:
        return self.shape[1:-1] if self.channel_dim == -1 else self.shape[2:]

    @property
    def spatial(self) -> int:
        return math.prod(self.positions)

    def generator(self, offset: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + offset)

    def tensor(self, offset: int = 0) -> Tensor:
        """Seeded normal values with a mean that is not zero, in this case's layout."""
        values = torch.randn(self.shape, dtype=torch.float64, generator=self.generator(offset))
        return lay_out(values.mul_(1.5).add_(0.7).to(self.dtype), self.layout)

    def vector(self, offset: int) -> Tensor:
        return torch.randn(self.channels, dtype=torch.float64, generator=self.generator(offset)).to(self.dtype)

    def indices(self) -> Tensor:
        return torch.randint(self.batch_size, (self.batch_size, self.ghost_size), generator=self.generator(9))

    def permutation(self) -> Tensor:
        return torch.randperm(self.batch_size, generator=self.generator(9))

    def mask(self) -> Tensor:
        """A mask with two thirds of the positions, some samples without any, and some complete."""
        mask = torch.rand(self.batch_size, *self.positions, generator=self.generator(11)) < 0.67
        mask[::3] = True
        mask[2::5] = False
        return mask


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
    positions = math.prod(spatial)
    while min(ghost_size, batch_size) * positions < least_values:
        ghost_size, batch_size = max(ghost_size, least_values), max(batch_size, least_values)
    return Case(
        (batch_size, *spatial, channels) if last else (batch_size, channels, *spatial),
        -1 if last else 1,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(dtypes)),
        ghost_size,
        draw(st.integers(0, 10**6)),
    )


def enough_values(dtypes=ALL_DTYPES):
    """Cases in which rounding is not amplified by small variances, for all dtypes."""
    return cases(least_batch=8, least_values=16, least_ghost=8, dtypes=dtypes)

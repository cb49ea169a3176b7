"""How tensors lie in memory, as `native` walks them."""

import functools
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """How a tensor lies in memory: its positions or its channels contiguous, and the strides over B and the other."""

    last: bool
    batch_stride: int
    inner_stride: int


def plans(x: Tensor) -> list[Plan]:
    """The ways in which x can be walked, the best one first."""
    return plans_of(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def plans_of(shape: torch.Size, strides: tuple[int, ...]) -> list[Plan]:
    """The ways in which a tensor can be walked: both where there is a single position, or a single channel."""
    batch, channel = strides[:2]
    dims = [(size, stride) for size, stride in zip(shape[2:], strides[2:], strict=True) if size != 1]
    # The positions lie at one stride if each dimension steps over all of the next.
    if any(stride != size * step for (_, stride), (size, step) in pairwise(dims)):
        return []
    position = dims[-1][1] if dims else 1
    plans = [Plan(True, batch, position)] if channel == 1 or shape[1] == 1 else []
    if position == 1:
        plans.insert(0 if dims else len(plans), Plan(False, batch, channel))
    return plans


def planned(x: Tensor, like: Plan | None = None) -> Plan:
    """The best way to walk x, or that which goes `like` another."""
    return next(plan for plan in plans(x) if like is None or plan.last == like.last)


def aligned(dy: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """dy, or a copy of it that lies in memory as x does."""
    fits = dy.dtype == x.dtype and any(other.last == plan.last for other in plans(dy))
    return dy if fits else torch.empty_like(x).copy_(dy)

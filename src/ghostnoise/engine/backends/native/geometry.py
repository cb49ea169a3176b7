"""What a fused call passes to the library beside results: the geometry of the batch, and the addresses of its tensors.

Both are checked and computed once for tensors of the same kind, shape and strides (`gate.Admissions`): with small
inputs, these checks would otherwise take a large part of a layer's time.
"""

import ctypes
import functools
import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import Saved, State
from ghostnoise.engine.backends.native.gate import (
    ARITHMETIC,
    Admissions,
    NotAdmitted,
    addresses,
    admits,
    admitted_gradient,
    empty,
    layouts,
    like,
    optional,
    paired,
    sample_moments,
    single_position,
    table,
    updatable,
)
from ghostnoise.engine.backends.native.library import DTYPES, GRAIN
from ghostnoise.engine.plan import Normalizer
from ghostnoise.engine.running import Running
from ghostnoise.statistics.samples import Contributors, Exclusive, ghost_sizes

ABSENT = tuple(empty((0,), torch.float32) for _ in range(5))  # stand for None where tensors are compared


def layer_tensors(x: Tensor, state: State) -> tuple[Tensor, ...]:
    """Return x and the tensors of a layer, with empty ones for those that are None."""
    weight, bias, mean, var, count = state
    return (
        x,
        ABSENT[0] if weight is None else weight,
        ABSENT[1] if bias is None else bias,
        ABSENT[2] if mean is None else mean,
        ABSENT[3] if var is None else var,
        ABSENT[4] if count is None else count,
    )


class Geometry(NamedTuple):
    """The numbers of the C++ struct of that name, which stay the same from call to call, and some of them by name."""

    numbers: ctypes.Array[ctypes.c_int64]
    at: int  # their address
    batch_size: int
    channels: int
    positions: int
    pools: int
    exclusive: bool
    code: int  # of the dtype of x
    dtype: torch.dtype  # of the arithmetic


_FORWARD = Admissions[tuple[Geometry, int | None]]()
_BACKWARD = Admissions[tuple[Geometry, int]]()


def forward_tensors(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    normalizer: Normalizer,
    alive: list[Tensor | None],
) -> tuple[Geometry, int | None, list[int]]:
    """Return the geometry, the code of the dtype of buffers if they can be updated, and the addresses of all tensors.

    These are 0 for None. `alive` then owns the memory of tensors that had to be copied.
    """
    contributors: Any = normalizer.contributors
    key = type(contributors), contributors.ghost_size, torch.get_num_threads(), x.shape
    mean, var, count, _ = running
    tensors = layer_tensors(x, (weight, bias, mean, var, count))
    found = _FORWARD.get(key, tensors)
    if found is not None:
        return *found[0], found[1]
    _admit(x)
    geometry = _geometry(x, x.stride(), *key[:3])
    dtype, channels = geometry.dtype, geometry.channels
    alive += [optional(weight, dtype, (channels,)), optional(bias, dtype, (channels,))]
    buffers = updatable(mean, var, count, channels)
    if buffers is None:
        return geometry, None, addresses(x, *alive, None, None, None)
    if alive[0] is weight and alive[1] is bias:
        _FORWARD.add(key, tensors, (geometry, DTYPES[buffers]))
    return geometry, DTYPES[buffers], addresses(x, *alive, mean, var, count)


def backward_tensors(
    dy: Tensor, x: Tensor, weight: Tensor | None, saved: Saved, normalizer: Normalizer, alive: list[Tensor | None]
) -> tuple[Geometry, int, list[int]]:
    """Return the geometry, the code of the dtype of means, and addresses as `forward_tensors` does."""
    contributors: Any = normalizer.contributors
    key = type(contributors), contributors.ghost_size, torch.get_num_threads(), x.shape
    (mean, var), (m, k), correction = saved
    r, d = (None, None) if correction is None else correction
    tensors = (
        dy,
        x,
        ABSENT[0] if weight is None else weight,
        mean,
        var,
        ABSENT[1] if m is None else m,
        ABSENT[2] if k is None else k,
        ABSENT[3] if r is None else r,
        ABSENT[4] if d is None else d,
    )
    found = _BACKWARD.get(key, tensors)
    if found is not None:
        return *found[0], found[1]
    _admit(x)
    gradient, strides = admitted_gradient(dy, x, x.shape, x.stride())
    geometry = _geometry(x, strides, *key[:3])
    samples, pools = (geometry.batch_size, geometry.channels), (geometry.pools, geometry.channels)
    taken: tuple[Tensor, Tensor | None]
    if geometry.exclusive:
        left_out = geometry.positions == 1 and not var.numel()  # a registered op does not return x as moments
        taken = sample_moments(single_position(x) if left_out else saved.kept, samples)
    else:
        taken = table(mean, torch.float64, pools), table(var, torch.float64, pools)
    dtype, means = geometry.dtype, DTYPES[taken[0].dtype]
    noise = optional(m, dtype, samples), optional(k, dtype, samples)
    per_channel = (optional(each, dtype, samples[1:]) for each in (weight, r, d))
    alive += [gradient, x, next(per_channel), *taken, *noise, *per_channel]
    if all(one is other for one, other in zip(alive, (dy, x, weight, mean, var, m, k, r, d), strict=True)):
        _BACKWARD.add(key, tensors, (geometry, means))
    return geometry, means, addresses(*alive)


def _admit(x: Tensor) -> None:
    """Check that the library may access x."""
    if not admits(x) or x.dtype not in DTYPES:
        raise NotAdmitted


def _geometry(
    x: Tensor, gradient: tuple[int, ...], kind: type[Contributors], ghost_size: int | None, threads: int
) -> Geometry:
    found = _cached(x.shape, x.stride(), gradient, x.dtype, kind is Exclusive, ghost_size, threads)
    if found is None:
        raise NotAdmitted
    return found


@functools.lru_cache(maxsize=4096)
def _cached(
    shape: torch.Size,
    strides: tuple[int, ...],
    gradient: tuple[int, ...],
    dtype: torch.dtype,
    exclusive: bool,
    ghost_size: int | None,
    threads: int,
) -> Geometry | None:
    """None for an input or a gradient whose layout the library does not take."""
    pair = paired(shape, strides)
    same = None if pair is None else like(layouts(shape, gradient), pair.input)
    if pair is None or same is None:
        return None
    batch_size, channels, positions = *shape[:2], math.prod(shape[2:])
    count, starts = group_starts(batch_size, ghost_size)
    pools = batch_size if exclusive else count
    per_pool = 1 if pools == batch_size else starts[1]
    tensors = [stride for layout in (pair.input, same, pair.result) for stride in layout[1:]]
    sizes = (pair.input.last, threads, GRAIN, channels, positions, *tensors, exclusive, per_pool, batch_size, count)
    numbers = (*sizes, *starts)
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    named = (batch_size, channels, positions, pools, exclusive, DTYPES[dtype], ARITHMETIC[dtype])
    return Geometry(array, ctypes.addressof(array), *named)


@functools.lru_cache(maxsize=256)
def group_starts(batch_size: int, ghost_size: int | None) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Return the number of ghost batches, and an array of their first samples and the number of samples."""
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return len(sizes), (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))

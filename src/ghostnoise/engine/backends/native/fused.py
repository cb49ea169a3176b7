"""All steps of a normalizer's forward pass, or of its backward pass, in one call of the C++ library.

It covers ghost batches and exclusive ghost batches, and if all samples share one pool also drawn noise or a correction
towards running statistics. The library runs the same functions in the same order as the steps, so the results are the
same to the last bit.
"""

import ctypes
import functools
import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import NO_NOISE, Gradients, NoiseTables, Normalized, Saved
from ghostnoise.engine.backends.native.gate import (
    ARITHMETIC,
    Layout,
    NotAdmitted,
    address,
    admitted_gradient,
    admitted_input,
    empty,
    optional,
    sample_moments,
    single_position,
    table,
)
from ghostnoise.engine.backends.native.library import DTYPES, GRAIN, run
from ghostnoise.engine.plan import Correction, Drawn, Noise, Normalizer, Plan
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, GhostBatch, ghost_sizes

COVERED = (GhostBatch, Exclusive)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Run all steps of the forward pass; None for plans that are not covered."""
    normalizer, noise, _ = plan
    if type(normalizer.contributors) not in COVERED or not (noise is None or type(noise) is Drawn):
        return None
    input_layout, result_layout = admitted_input(x)
    geometry = _geometry(x, input_layout, input_layout, result_layout, normalizer)
    batch_size, channels, pools = x.shape[0], x.shape[1], geometry.pools
    if pools != 1 and (noise is not None or plan.corrects):
        return None
    dtype = ARITHMETIC[x.dtype]
    weight, bias = optional(weight, dtype, (channels,)), optional(bias, dtype, (channels,))
    drawn = None if noise is None else _indices(noise, batch_size)
    m, k = NO_NOISE if noise is None else _noise_tables(noise, (batch_size, channels), dtype)
    moments = _sample_tables(x, geometry.positions)
    mean, var = sample_moments(moments)
    pooled, y = empty((2, pools, channels), torch.float64), torch.empty_like(x)
    correction, given = _correction(plan, channels, dtype)
    run(
        *("fused_forward", DTYPES[x.dtype], geometry.numbers, address(x), address(weight), address(bias)),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2),
        *((0, 0, 0.0) if noise is None or drawn is None else (address(drawn), drawn.shape[1], float(noise.eps))),
        *(DTYPES[mean.dtype], address(mean), address(var), address(pooled), address(m), address(k)),
        *(address(one) for one in (*given, *(correction or (None, None)))),
        address(y),
    )
    return Normalized(y, moments, Moments(*pooled.unbind()), NoiseTables(m, k), correction)


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Run all steps of the backward pass; None for plans that are not covered."""
    normalizer = plan.normalizer
    if type(normalizer.contributors) not in COVERED:
        return None
    input_layout, result_layout = admitted_input(x)
    dy, gradient_layout = admitted_gradient(dy, x, input_layout)
    geometry = _geometry(x, input_layout, gradient_layout, result_layout, normalizer)
    (batch_size, channels), dtype = x.shape[:2], ARITHMETIC[x.dtype]
    weight = optional(weight, dtype, (channels,))
    m, k = (optional(one, dtype, (batch_size, channels)) for one in saved.noise)
    if type(normalizer.contributors) is Exclusive:
        mean, var = sample_moments(saved.kept)
        if mean.shape != (batch_size, channels):
            raise NotAdmitted
    else:
        mean, var = (table(one, torch.float64, (geometry.pools, channels)) for one in saved.kept)
    parameters, dx = empty((2, channels), dtype), torch.empty_like(x) if needs_x else None
    run(
        *("fused_backward", DTYPES[x.dtype], geometry.numbers, address(dy), address(x), address(weight)),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2),
        *(DTYPES[mean.dtype], address(mean), address(var), address(m), address(k), address(parameters), address(dx)),
    )
    return Gradients(dx, *parameters.unbind())


class _Geometry(NamedTuple):
    """The numbers of the C++ struct of that name, which stay the same from call to call, and some of them by name."""

    numbers: ctypes.Array[ctypes.c_int64]
    pools: int
    positions: int


def _geometry(x: Tensor, given: Layout, gradient: Layout, result: Layout, normalizer: Normalizer) -> _Geometry:
    contributors: Any = normalizer.contributors
    exclusive = type(contributors) is Exclusive
    return _cached(x.shape, given, gradient, result, exclusive, contributors.ghost_size, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _cached(
    shape: torch.Size,
    given: Layout,
    gradient: Layout,
    result: Layout,
    exclusive: bool,
    ghost_size: int | None,
    threads: int,
) -> _Geometry:
    batch_size, channels, positions = *shape[:2], math.prod(shape[2:])
    count, starts = group_starts(batch_size, ghost_size)
    pools = batch_size if exclusive else count
    per_pool = 1 if pools == batch_size else starts[1]
    strides = [stride for layout in (given, gradient, result) for stride in layout[1:]]
    sizes = (given.last, threads, GRAIN, channels, positions, *strides, exclusive, per_pool, batch_size, count)
    numbers = (*sizes, *starts)
    return _Geometry((ctypes.c_int64 * len(numbers))(*numbers), pools, positions)


@functools.lru_cache(maxsize=256)
def group_starts(batch_size: int, ghost_size: int | None) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Return the number of ghost batches, and an array of their first samples and the number of samples."""
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return len(sizes), (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))


def _indices(noise: Noise, batch_size: int) -> Tensor:
    assert isinstance(noise, Drawn)
    if noise.indices.ndim != 2 or noise.indices.shape[1] == 0:
        raise NotAdmitted
    return table(noise.indices, torch.int64, (batch_size, noise.indices.shape[1]))


def _noise_tables(noise: Noise, shape: tuple[int, int], dtype: torch.dtype) -> NoiseTables:
    made = iter(empty((noise.shifts + noise.scales, *shape), dtype).unbind())
    return NoiseTables(next(made) if noise.shifts else None, next(made) if noise.scales else None)


def _sample_tables(x: Tensor, positions: int) -> Moments:
    if positions == 1:
        return single_position(x)
    return Moments(*empty((2, x.shape[0], x.shape[1]), torch.float64).unbind())


def _correction(plan: Plan, channels: int, dtype: torch.dtype) -> tuple[Correction | None, list[Tensor | None]]:
    """Return the tables of r and d, and the reference's mean, variance and limits; None without a correction."""
    reference = plan.reference
    if reference is None or reference.limits is None:
        return None, [None, None, None]
    given: list[Tensor | None] = [table(one, torch.float64, (channels,)) for one in reference.moments]
    given.append(table(reference.limits, torch.float64, (2,)))
    return Correction(*empty((2, channels), dtype).unbind()), given

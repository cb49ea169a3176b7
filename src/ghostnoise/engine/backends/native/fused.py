"""All steps of a normalizer's forward pass, or of its backward pass, in one call of the C++ library.

It covers ghost batches and exclusive ghost batches, and if all samples share one pool also noise that is drawn from the
batch or, with a seed, from a law, or a correction towards running statistics. The library runs the same functions in
the same order as the steps, so the results are the same to the last bit. It also updates the running statistics.
"""

import ctypes
import functools
import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import Gradients, NoiseTables, Normalized, Saved, folded
from ghostnoise.engine.backends.native.gate import (
    ARITHMETIC,
    CPU,
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
from ghostnoise.engine.backends.native.library import DTYPES, GRAIN, run
from ghostnoise.engine.plan import Correction, Drawn, Noise, Normalizer, Plan, Tables
from ghostnoise.engine.running import Update
from ghostnoise.statistics.chi_square import INTERVALS, root_table
from ghostnoise.statistics.laws import Law, LawDraws
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, GhostBatch, ghost_sizes

COVERED = (GhostBatch, Exclusive)
NOT_MADE = Moments(empty((0, 1), torch.float64), empty((0, 1), torch.float64))


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Run all steps of the forward pass; None for plans that are not covered."""
    plan = plan.evaluated(x.device)
    normalizer, noise, reference = plan.normalizer, plan.noise, plan.known
    if type(normalizer.contributors) not in COVERED or not (noise is None or type(noise) is Drawn or _in_law(noise)):
        return None
    shape, strides = _admitted(x)
    geometry = _geometry(shape, strides, strides, normalizer)
    batch_size, channels, pools = shape[0], shape[1], geometry.pools
    if pools != 1 and (noise is not None or plan.corrects):
        return None
    dtype = ARITHMETIC[x.dtype]
    weight, bias = optional(weight, dtype, (channels,)), optional(bias, dtype, (channels,))
    m, k, correction = None, None, None
    drawn: tuple[float, ...] = 0, 0, 0, 0, 0, 0.0
    corrects: tuple[int, ...] = 0, 0, 0, 0, 0
    if isinstance(noise, Drawn):
        indices = _indices(noise, batch_size)
        drawn = *addresses(indices), indices.shape[1], 0, 0, 0, float(noise.eps)
    elif isinstance(noise, Tables):
        law = SeededLaw(noise, geometry.positions, dtype)
        drawn = 0, 0, *law.addresses, float(noise.eps)
    if noise is not None:
        m, k = _noise_tables(noise, (batch_size, channels), dtype)
    if reference is not None and reference.limits is not None:
        known = [table(one, torch.float64, (channels,)) for one in reference.moments]
        known.append(table(reference.limits, torch.float64, (2,)))
        correction = Correction(*empty((2, channels), dtype).unbind())
        corrects = tuple(addresses(*known, *correction))
    exclusive, moments = type(normalizer.contributors) is Exclusive, NOT_MADE
    if geometry.positions == 1 and not exclusive and x.dtype is dtype and x.is_contiguous():
        means = DTYPES[dtype], *addresses(x), 0
    elif geometry.positions == 1:
        moments = single_position(x)
        means = DTYPES[dtype], *addresses(moments.mean), 0
    elif exclusive:
        moments = Moments(*empty((2, batch_size, channels), torch.float64).unbind())
        means = DTYPES[torch.float64], *addresses(*moments)
    else:
        means = DTYPES[torch.float64], 0, 0
    updated = _updated(plan.update, batch_size * geometry.positions, channels)
    # Of the moments of samples and those of pools, only the ones that the backward pass needs are made.
    pooled = NOT_MADE if exclusive else Moments(*empty((2, pools, channels), torch.float64).unbind())
    y = torch.empty_like(x)
    run(
        "fused_forward", DTYPES[x.dtype], geometry.numbers, *addresses(x, weight, bias),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2, *drawn, *means),
        *(*addresses(None if exclusive else pooled.mean, m, k), *corrects, *updated.arguments, *addresses(y)),
    )  # fmt: skip
    if updated.buffers:
        torch.autograd.graph.increment_version(updated.buffers)
    noisy = NoiseTables(m, k)
    return Normalized(y, moments, pooled, noisy, correction, reference, bool(updated.buffers))


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Run all steps of the backward pass; None for plans that are not covered."""
    normalizer = plan.normalizer
    if type(normalizer.contributors) not in COVERED:
        return None
    shape, strides = _admitted(x)
    dy, gradient_strides = admitted_gradient(dy, x, shape, strides)
    geometry = _geometry(shape, strides, gradient_strides, normalizer)
    batch_size, channels, dtype = shape[0], shape[1], ARITHMETIC[x.dtype]
    weight = optional(folded(saved.correction, weight, None, dtype)[0], dtype, (channels,))
    m, k = saved.noise
    m, k = optional(m, dtype, (batch_size, channels)), optional(k, dtype, (batch_size, channels))
    var: Tensor | None
    if type(normalizer.contributors) is Exclusive:
        kept = single_position(x) if geometry.positions == 1 else saved.kept
        mean, var = sample_moments(kept, (batch_size, channels))
    else:
        mean, var = (table(one, torch.float64, (geometry.pools, channels)) for one in saved.kept)
    parameters, dx = empty((2, channels), dtype), torch.empty_like(x) if needs_x else None
    run(
        "fused_backward", DTYPES[x.dtype], geometry.numbers, *addresses(dy, x, weight),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2, DTYPES[mean.dtype]),
        *addresses(mean, var, m, k, parameters, dx),
    )  # fmt: skip
    return Gradients(dx, *parameters.unbind()).unfolded(saved.correction)


def _admitted(x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape and the strides of an admitted x."""
    if admits(x) and x.dtype in DTYPES:
        return x.shape, x.stride()
    raise NotAdmitted


class _Geometry(NamedTuple):
    """The numbers of the C++ struct of that name, which stay the same from call to call, and some of them by name."""

    numbers: ctypes.Array[ctypes.c_int64]
    pools: int
    positions: int


def _geometry(
    shape: torch.Size, strides: tuple[int, ...], gradient: tuple[int, ...], normalizer: Normalizer
) -> _Geometry:
    contributors: Any = normalizer.contributors
    exclusive = type(contributors) is Exclusive
    found = _cached(shape, strides, gradient, exclusive, contributors.ghost_size, torch.get_num_threads())
    if found is None:
        raise NotAdmitted
    return found


@functools.lru_cache(maxsize=4096)
def _cached(
    shape: torch.Size,
    strides: tuple[int, ...],
    gradient: tuple[int, ...],
    exclusive: bool,
    ghost_size: int | None,
    threads: int,
) -> _Geometry | None:
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


def _in_law(noise: Noise) -> bool:
    """Whether noise is drawn from a law for the normalized x, from a seed."""
    return type(noise) is Tables and noise.normalized and not isinstance(noise.draws, LawDraws)


class SeededLaw:
    """The seed and the law of noise as arguments of the library; `alive` owns their memory."""

    def __init__(self, noise: Tables, spatial: int, dtype: torch.dtype) -> None:
        assert isinstance(noise.draws, Tensor)
        self.alive = table(noise.draws, torch.int64, (1,)), *_law_tables(noise.law, spatial, dtype)
        self.addresses = tuple(addresses(*self.alive))


@functools.lru_cache(maxsize=256)
def _law_tables(law: Law, spatial: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers of the C++ struct Law in their order, and its tables."""
    (between, samples), (within, values) = law.degrees(spatial)
    exact, conv = law.dof == "exact", law.law == "conv"
    shares = (conv / values, 1 / samples, exact / spatial, between / samples, within / values)
    tables = empty((2, 4, INTERVALS), dtype).zero_()
    for made, degrees in zip(tables, (between, within), strict=True):
        if degrees:
            made.copy_(torch.from_numpy(root_table(degrees)))
    return torch.tensor([spatial if conv else 0, *shares], dtype=torch.float64, device=CPU), tables


class _Updated(NamedTuple):
    """The buffers that the library updates, and what it takes for this; no buffers if it leaves them to others."""

    buffers: list[Tensor]
    arguments: tuple[float, ...]


_NOT_UPDATED = _Updated([], (0, 0.0, 0, 0, 0, 0, 0.0))


def _updated(update: Update | None, values: int, channels: int) -> _Updated:
    if update is None:
        return _NOT_UPDATED
    (mean, var, count, momentum), (ghosts, unbiased) = update
    dtype = updatable(mean, var, count, channels)
    if dtype is None or (momentum is None and count is None):
        return _NOT_UPDATED
    bessel = values / (values - 1) if unbiased else 1.0
    factor = -1.0 if momentum is None else float(momentum)
    arguments = (2 if ghosts else 1, bessel, DTYPES[dtype], *addresses(mean, var, count), factor)
    return _Updated([one for one in (mean, var, count) if one is not None], arguments)


def _noise_tables(noise: Noise, shape: tuple[int, int], dtype: torch.dtype) -> NoiseTables:
    # Two tensors rather than parts of one: results of a registered op must not share memory, and would be copied.
    return NoiseTables(*(empty(shape, dtype) if wanted else None for wanted in (noise.shifts, noise.scales)))

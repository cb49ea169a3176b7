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

from ghostnoise.engine.backends.base import NO_NOISE, Gradients, NoiseTables, Normalized, Saved, folded
from ghostnoise.engine.backends.native.gate import (
    ARITHMETIC,
    CPU,
    NotAdmitted,
    address,
    addresses,
    admits,
    admitted_gradient,
    empty,
    layouts,
    like,
    made_at,
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
FLOAT64 = DTYPES[torch.float64]
NO_DRAWS: tuple[float, ...] = (0, 0, 0, 0, 0, 0.0)
NO_CORRECTION: tuple[int, ...] = (0, 0, 0, 0, 0)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Run all steps of the forward pass; None for plans that are not covered."""
    reference = None
    if plan.reference is not None:
        plan = plan.evaluated(x.device)
        reference = plan.known
    normalizer, noise, _, update, _ = plan
    if type(normalizer.contributors) not in COVERED or not (noise is None or type(noise) is Drawn or _in_law(noise)):
        return None
    _admit(x)
    strides = x.stride()
    geometry = _geometry(x.shape, strides, strides, normalizer)
    batch_size, channels, pools = geometry.batch_size, geometry.channels, geometry.pools
    if pools != 1 and (noise is not None or plan.corrects):
        return None
    dtype = ARITHMETIC[x.dtype]
    copies: list[Tensor] = []
    noisy, drawn = NO_NOISE, NO_DRAWS
    correction, corrects = None, NO_CORRECTION
    if noise is not None:
        noisy = _noise_tables(noise, (batch_size, channels), dtype)
        drawn = _draws(noise, geometry, dtype, copies)
    if reference is not None and reference.limits is not None:
        correction = Correction(*empty((2, channels), dtype).unbind())
        known = [address(one, torch.float64, (channels,), copies) for one in reference.moments]
        corrects = *known, address(reference.limits, torch.float64, (2,), copies), *addresses(*correction)
    moments, means = _means(x, geometry, dtype)
    updated = NOT_UPDATED if update is None else _updated(update, batch_size * geometry.positions, channels)
    # Of the moments of samples and those of pools, only the ones that the backward pass needs are made.
    pooled = NOT_MADE if geometry.exclusive else Moments(*empty((2, pools, channels), torch.float64).unbind())
    y = torch.empty_like(x)
    run(
        "fused_forward",
        DTYPES[x.dtype],
        geometry.at,
        made_at(x),
        address(weight, dtype, (channels,), copies),
        address(bias, dtype, (channels,), copies),
        float(normalizer.eps),
        float(normalizer.min_std) ** 2,
        *drawn,
        *means,
        0 if geometry.exclusive else made_at(pooled.mean),
        *((0, 0) if noise is None else addresses(*noisy)),
        *corrects,
        *updated.arguments,
        made_at(y),
    )
    if updated.buffers:
        torch.autograd.graph.increment_version(updated.buffers)
    return Normalized(y, moments, pooled, noisy, correction, reference, bool(updated.buffers))


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Run all steps of the backward pass; None for plans that are not covered."""
    normalizer, (kept, noise, correction) = plan.normalizer, saved
    if type(normalizer.contributors) not in COVERED:
        return None
    _admit(x)
    shape, strides = x.shape, x.stride()
    dy, gradient_strides = admitted_gradient(dy, x, shape, strides)
    geometry = _geometry(shape, strides, gradient_strides, normalizer)
    channels, dtype = geometry.channels, ARITHMETIC[x.dtype]
    copies: list[Tensor] = []
    if correction is not None:
        weight, _ = folded(correction, weight, None, dtype)
    samples, pools = (geometry.batch_size, channels), (geometry.pools, channels)
    if geometry.exclusive:
        mean, var = sample_moments(kept, samples)
        statistics = DTYPES[mean.dtype], *addresses(mean, var)
    else:
        statistics = FLOAT64, *(address(one, torch.float64, pools, copies) for one in kept)
    parameters, dx = empty((2, channels), dtype), torch.empty_like(x) if needs_x else None
    run(
        "fused_backward",
        DTYPES[x.dtype],
        geometry.at,
        made_at(dy),
        made_at(x),
        address(weight, dtype, (channels,), copies),
        float(normalizer.eps),
        float(normalizer.min_std) ** 2,
        *statistics,
        address(noise.m, dtype, samples, copies),
        address(noise.k, dtype, samples, copies),
        made_at(parameters),
        0 if dx is None else made_at(dx),
    )
    made = Gradients(dx, *parameters.unbind())
    return made if correction is None else made.unfolded(correction)


def _admit(x: Tensor) -> None:
    """Check that the library may access x."""
    if not admits(x) or x.dtype not in DTYPES:
        raise NotAdmitted


class _Geometry(NamedTuple):
    """The numbers of the C++ struct of that name, which stay the same from call to call, and some of them by name."""

    numbers: ctypes.Array[ctypes.c_int64]
    at: int  # their address
    batch_size: int
    channels: int
    positions: int
    pools: int
    exclusive: bool


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
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    return _Geometry(array, ctypes.addressof(array), batch_size, channels, positions, pools, exclusive)


@functools.lru_cache(maxsize=256)
def group_starts(batch_size: int, ghost_size: int | None) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Return the number of ghost batches, and an array of their first samples and the number of samples."""
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return len(sizes), (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))


def _means(x: Tensor, geometry: _Geometry, dtype: torch.dtype) -> tuple[Moments, tuple[int, int, int]]:
    """Return the moments of samples that are made, and the dtype and the addresses that the library takes for them."""
    exclusive = geometry.exclusive
    if geometry.positions > 1:
        if not exclusive:
            return NOT_MADE, (FLOAT64, 0, 0)
        moments = Moments(*empty((2, geometry.batch_size, geometry.channels), torch.float64).unbind())
        return moments, (FLOAT64, made_at(moments.mean), made_at(moments.var))
    if not exclusive and x.dtype is dtype and x.is_contiguous():
        return NOT_MADE, (DTYPES[dtype], made_at(x), 0)
    moments = single_position(x)
    return moments, (DTYPES[dtype], made_at(moments.mean), 0)


def _draws(noise: Noise, geometry: _Geometry, dtype: torch.dtype, copies: list[Tensor]) -> tuple[float, ...]:
    """Return the arguments for noise that is drawn from the batch, or from a law."""
    if isinstance(noise, Tables):
        law = SeededLaw(noise, geometry.positions, dtype)
        copies += law.alive
        return 0, 0, *law.addresses, float(noise.eps)
    assert isinstance(noise, Drawn)
    if noise.indices.ndim != 2 or noise.indices.shape[1] == 0:
        raise NotAdmitted
    count = noise.indices.shape[1]
    at = address(noise.indices, torch.int64, (geometry.batch_size, count), copies)
    return at, count, 0, 0, 0, float(noise.eps)


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


NOT_UPDATED = _Updated([], (0, 0.0, 0, 0, 0, 0, 0.0))


def _updated(update: Update, values: int, channels: int) -> _Updated:
    (mean, var, count, momentum), (ghosts, unbiased) = update
    dtype = updatable(mean, var, count, channels)
    if dtype is None or (momentum is None and count is None):
        return NOT_UPDATED
    bessel = values / (values - 1) if unbiased else 1.0
    factor = -1.0 if momentum is None else float(momentum)
    arguments = (2 if ghosts else 1, bessel, DTYPES[dtype], *addresses(mean, var, count), factor)
    return _Updated([one for one in (mean, var, count) if one is not None], arguments)


def _noise_tables(noise: Noise, shape: tuple[int, int], dtype: torch.dtype) -> NoiseTables:
    # Two tensors rather than parts of one: results of a registered op must not share memory, and would be copied.
    return NoiseTables(*(empty(shape, dtype) if wanted else None for wanted in (noise.shifts, noise.scales)))

"""`engine.steps` on CPUs in one call of the C++ library each way, for pools of ghost batches and drawn noise.

It runs the passes and tables of `native` in their order, so the results are the same to the last bit.
"""

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import NoiseTables
from ghostnoise.engine.backends.native.layout import Plan, plans_of
from ghostnoise.engine.backends.native.library import DTYPES, GRAIN, run
from ghostnoise.engine.backends.native.tables import group_starts, moment_pointers, pointer, single_position, solid
from ghostnoise.engine.steps import Gradients, Normalized
from ghostnoise.ghosts import GhostBatch, Others
from ghostnoise.methods import Noise, Normalizer
from ghostnoise.moments import Moments

COVERED = (GhostBatch, Others)
ARITHMETIC = {dtype: torch.promote_types(dtype, torch.float32) for dtype in DTYPES}


class _How(NamedTuple):
    """What stays the same from call to call: the C++ struct of that name, and the number of pools and positions."""

    numbers: ctypes.Array[ctypes.c_int64]
    pools: int
    positions: int


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalizer: Normalizer, noise: Noise | None
) -> Normalized | None:
    """`steps.forward`; None for other pools, and for noise that is not drawn or meets several pools."""
    shape, drawn = x.shape, None if noise is None else _drawn(noise, x.shape[0])
    if type(normalizer.who) not in COVERED or (noise is not None and drawn is None):
        return None
    y = torch.empty_like(x)
    how = _how(x, x.stride(), y, normalizer)
    if how is None or (noise is not None and how.pools != 1):
        return None
    if how.positions == 1:
        moments = single_position(x)
    else:
        moments = Moments(*torch.empty((2, shape[0], shape[1]), dtype=torch.float64).unbind())
    dtype, stats = ARITHMETIC[x.dtype], torch.empty((2, how.pools, shape[1]), dtype=torch.float64)
    m, k = (None, None) if noise is None else _noise_tables(noise, (shape[0], shape[1]), dtype)
    weight, bias = solid(weight, dtype), solid(bias, dtype)
    run(
        *("normalize", DTYPES[x.dtype], how.numbers, x.data_ptr(), pointer(weight), pointer(bias)),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2),
        *((0, 0, 0.0) if noise is None or drawn is None else (drawn.data_ptr(), drawn.shape[1], float(noise.eps))),
        *(DTYPES[moments.mean.dtype], *moment_pointers(moments), stats.data_ptr()),
        *(pointer(m), pointer(k), y.data_ptr()),
    )
    return Normalized(y, moments, Moments(*stats.unbind()), (m, k))


def normalize_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    normalizer: Normalizer,
    kept: Moments,
    noise: NoiseTables,
    needs_x: bool,
) -> Gradients | None:
    """`steps.backward`; None for other pools."""
    if type(normalizer.who) not in COVERED or not all(table is None or table.is_contiguous() for table in noise):
        return None
    made = torch.empty_like(x) if needs_x else x
    how = _how(x, dy.stride(), made, normalizer) if dy.dtype == x.dtype else None
    if how is None:
        dy = torch.empty_like(x).copy_(dy)
        how = _how(x, dy.stride(), made, normalizer)
    if how is None:
        return None
    dtype = ARITHMETIC[x.dtype]
    weight, gradients = solid(weight, dtype), torch.empty((2, x.shape[1]), dtype=dtype)
    if type(normalizer.who) is Others:
        pointers = moment_pointers(kept)
    else:
        kept = Moments(kept.mean.contiguous(), kept.var.contiguous())
        pointers = (kept.mean.data_ptr(), kept.var.data_ptr())
    run(
        *("normalize_gradient", DTYPES[x.dtype], how.numbers, dy.data_ptr(), x.data_ptr(), pointer(weight)),
        *(float(normalizer.eps), float(normalizer.min_std) ** 2),
        *(DTYPES[kept.mean.dtype], *pointers, pointer(noise[0]), pointer(noise[1])),
        *(gradients.data_ptr(), made.data_ptr() if needs_x else 0),
    )
    return Gradients(made if needs_x else None, *gradients.unbind())


def _how(x: Tensor, given: tuple[int, ...], made: Tensor, normalizer: Normalizer) -> _How | None:
    """None for an empty x, and where what is given does not lie as x does."""
    who: Any = normalizer.who
    others = type(who) is Others
    return _numbers(x.shape, x.stride(), given, made.stride(), others, who.ghost_size, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _numbers(
    shape: torch.Size,
    strides: tuple[int, ...],
    given: tuple[int, ...],
    made: tuple[int, ...],
    others: bool,
    ghost_size: int | None,
    threads: int,
) -> _How | None:
    if 0 in shape:
        return None
    batch_size, channels, positions = *shape[:2], math.prod(shape[2:])
    plan = plans_of(shape, strides)[0]
    alike = [_alike(plan, plans_of(shape, other)) for other in (given, made)]
    count, starts = group_starts(batch_size, ghost_size)
    pools = batch_size if others else count
    each = 1 if pools == batch_size else starts[1]
    if None in alike:
        return None
    tensors = [stride for one in (plan, *alike) if one is not None for stride in one[1:]]
    numbers = (plan.last, threads, GRAIN, channels, positions, *tensors, others, each, batch_size, count, *starts)
    return _How((ctypes.c_int64 * len(numbers))(*numbers), pools, positions)


def _alike(plan: Plan, others: list[Plan]) -> Plan | None:
    return next((other for other in others if other.last == plan.last), None)


def _drawn(noise: Noise, batch_size: int) -> Tensor | None:
    """The indices of drawn noise, a row for each sample."""
    indices = noise.indices
    if indices is None or noise.normalized or indices.shape[0] != batch_size:
        return None
    return indices.to(torch.int64).contiguous()


def _noise_tables(noise: Noise, shape: tuple[int, int], dtype: torch.dtype) -> NoiseTables:
    made = iter(torch.empty((noise.shift + noise.scale, *shape), dtype=dtype).unbind())
    return next(made) if noise.shift else None, next(made) if noise.scale else None

"""The passes of `engine.aten` on CPUs, through the C++ library that is built at install.

They are called with data pointers, strides and torch's number of threads, on tensors whose positions, or whose
channels, are contiguous; others go to `aten`.
"""

import functools
import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine import library
from ghostnoise.engine.library import DTYPES, run, threads
from ghostnoise.engine.native_tables import blend as blend
from ghostnoise.engine.native_tables import draws as draws
from ghostnoise.engine.native_tables import everyone as everyone
from ghostnoise.engine.native_tables import follow as follow
from ghostnoise.engine.native_tables import inject as inject
from ghostnoise.engine.native_tables import others as others
from ghostnoise.engine.native_tables import others_ramp as others_ramp
from ghostnoise.engine.native_tables import pull as pull
from ghostnoise.engine.native_tables import standardize as standardize
from ghostnoise.moments import Moments, arithmetic_dtype


def missing() -> str | None:
    """Why this backend cannot run here, if so."""
    found = library.library()
    return found if isinstance(found, str) else None


def refuses(x: Tensor) -> str | None:
    """Why this backend cannot take `x`, if so."""
    if x.device.type != "cpu" or x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
        return f"it takes plain strided CPU tensors, and this is a {type(x).__name__} on {x.device}, {x.layout}"
    if x.dtype not in DTYPES:
        return f"it takes {', '.join(map(str, DTYPES))}, and this is {x.dtype}"
    if not _plans(x):
        return f"neither its positions nor its channels are contiguous: shape {tuple(x.shape)}, strides {x.stride()}"
    return None


def moments(x: Tensor) -> Moments:
    """`aten.moments`. Of a single position, x itself is the mean, in the dtype of its arithmetic."""
    if math.prod(x.shape[2:]) == 1:
        mean = x.flatten(1).to(arithmetic_dtype(x)).contiguous()
        return Moments(mean, torch.zeros(1, 1, dtype=torch.float64).expand(mean.shape))
    plan = _planned(x)
    mean, var = (torch.empty(x.shape[:2], dtype=torch.float64) for _ in range(2))
    _run("moments", x, plan, *_at(x, plan), mean.data_ptr(), var.data_ptr())
    return Moments(mean, var)


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, each: int = 1) -> Tensor:
    """`aten.transform`."""
    plan, y = _planned(x), torch.empty_like(x)
    tables = _tables(x, each, center, scale, shift)
    _run("transform", x, plan, *_at(x, plan), *tables.pointers, *_at(y, _planned(y, plan)))
    return y


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    """`aten.gradient_sums`. Of a single position, dy itself may be its sum."""
    plan = _planned(x)
    dy, tables = _aligned(dy, x, plan), _tables(x, each, center)
    single = plan.last and math.prod(x.shape[2:]) == 1 and dy.dtype == center.dtype and dy.is_contiguous()
    total = dy.flatten(1) if single else torch.empty(x.shape[:2], dtype=center.dtype)
    moment = torch.empty(x.shape[:2], dtype=center.dtype)
    given = (*_at(dy, _planned(dy, plan)), *_at(x, plan), *tables.pointers)
    _run("gradient_sums", x, plan, *given, 0 if single else total.data_ptr(), moment.data_ptr())
    return total, moment


def input_gradient(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    center: Tensor,
    slope: Tensor,
    offset: Tensor,
    each: int = 1,
    gain: Tensor | None = None,
) -> Tensor:
    """`aten.input_gradient`."""
    plan, dx = _planned(x), torch.empty_like(x)
    gain = _ones(x.shape[1], scale.dtype) if gain is None else gain
    dy, tables = _aligned(dy, x, plan), _tables(x, each, scale, gain, center, slope, offset)
    given = (*_at(dy, _planned(dy, plan)), *_at(x, plan), *tables.pointers)
    _run("input_gradient", x, plan, *given, *_at(dx, _planned(dx, plan)))
    return dx


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`aten.scale_gradient`."""
    if refuses(dy):
        dy = dy.contiguous()
    plan, dx, tables = _planned(dy), torch.empty_like(dy), _tables(dy, 1, scale)
    _run("scale_gradient", dy, plan, *_at(dy, plan), *tables.pointers, *_at(dx, _planned(dx, plan)))
    return dx


@functools.lru_cache(maxsize=64)
def _ones(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, channels, dtype=dtype)


class _Plan(NamedTuple):
    """How a tensor lies in memory: its positions or its channels contiguous, and the strides over B and the other."""

    last: bool
    batch_stride: int
    inner_stride: int


def _plans(x: Tensor) -> list[_Plan]:
    return _plans_of(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def _plans_of(shape: torch.Size, strides: tuple[int, ...]) -> list[_Plan]:
    """The ways in which a tensor can be walked: both where there is a single position, or a single channel."""
    batch, channel = strides[:2]
    dims = [(size, stride) for size, stride in zip(shape[2:], strides[2:], strict=True) if size != 1]
    # The positions lie at one stride if each dimension steps over all of the next.
    if any(stride != size * step for (_, stride), (size, step) in pairwise(dims)):
        return []
    position = dims[-1][1] if dims else 1
    plans = [_Plan(True, batch, position)] if channel == 1 or shape[1] == 1 else []
    if position == 1:
        plans.insert(0 if dims else len(plans), _Plan(False, batch, channel))
    return plans


def _planned(x: Tensor, like: _Plan | None = None) -> _Plan:
    return next(plan for plan in _plans(x) if like is None or plan.last == like.last)


def _aligned(dy: Tensor, x: Tensor, plan: _Plan) -> Tensor:
    """dy, or a copy of it that lies in memory as x does."""
    fits = dy.dtype == x.dtype and any(other.last == plan.last for other in _plans(dy))
    return dy if fits else torch.empty_like(x).copy_(dy)


class _Tables(NamedTuple):
    """Tables that a pass reads: kept alive, and as its arguments."""

    alive: list[Tensor]
    pointers: list[int]


def _tables(x: Tensor, each: int, *tables: Tensor) -> _Tables:
    """Each as a pointer, the samples that a row serves, and the last row; a single row may be a single number."""
    batch_size, channels = x.shape[:2]
    alive, pointers = [], []
    for given in tables:
        rows, wide = given.shape
        table = given if wide == channels and given.is_contiguous() else given.expand(rows, channels).contiguous()
        alive.append(table)
        pointers += [table.data_ptr(), 1 if rows == batch_size else each, rows - 1]
    return _Tables(alive, pointers)


def _at(x: Tensor, plan: _Plan) -> tuple[int, int, int]:
    return x.data_ptr(), plan.batch_stride, plan.inner_stride


def _run(name: str, x: Tensor, plan: _Plan, *given: int) -> None:
    shape = (*x.shape[:2], math.prod(x.shape[2:]))
    run(name, DTYPES[x.dtype], int(plan.last), threads(x.numel()), *shape, *given)

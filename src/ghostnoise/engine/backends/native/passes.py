"""The passes of `engine.aten` on CPUs, through the C++ library that is built at install.

They are called with data pointers, strides and torch's number of threads, on tensors whose positions, or whose
channels, are contiguous; others go to `aten`.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native.layout import Plan, aligned, planned, plans
from ghostnoise.engine.backends.native.library import DTYPES, run, threads
from ghostnoise.engine.backends.native.tables import blend as blend
from ghostnoise.engine.backends.native.tables import draws as draws
from ghostnoise.engine.backends.native.tables import everyone as everyone
from ghostnoise.engine.backends.native.tables import everyone_ramp as everyone_ramp
from ghostnoise.engine.backends.native.tables import follow as follow
from ghostnoise.engine.backends.native.tables import inject as inject
from ghostnoise.engine.backends.native.tables import others as others
from ghostnoise.engine.backends.native.tables import others_ramp as others_ramp
from ghostnoise.engine.backends.native.tables import pull as pull
from ghostnoise.engine.backends.native.tables import single_position
from ghostnoise.engine.backends.native.tables import standardize as standardize
from ghostnoise.engine.backends.native.whole import normalize as normalize
from ghostnoise.engine.backends.native.whole import normalize_gradient as normalize_gradient
from ghostnoise.moments import Moments


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
    if not plans(x):
        return f"neither its positions nor its channels are contiguous: shape {tuple(x.shape)}, strides {x.stride()}"
    return None


def moments(x: Tensor) -> Moments:
    """`aten.moments`. Of a single position, x itself is the mean, in the dtype of its arithmetic."""
    if math.prod(x.shape[2:]) == 1:
        return single_position(x)
    plan = planned(x)
    mean, var = (torch.empty(x.shape[:2], dtype=torch.float64) for _ in range(2))
    _run("moments", x, plan, *_at(x, plan), mean.data_ptr(), var.data_ptr())
    return Moments(mean, var)


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, each: int = 1) -> Tensor:
    """`aten.transform`."""
    plan, y = planned(x), torch.empty_like(x)
    tables = _tables(x, each, center, scale, shift)
    _run("transform", x, plan, *_at(x, plan), *tables.pointers, *_at(y, planned(y, plan)))
    return y


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    """`aten.gradient_sums`. Of a single position, dy itself may be its sum."""
    plan = planned(x)
    dy, tables = aligned(dy, x, plan), _tables(x, each, center)
    single = plan.last and math.prod(x.shape[2:]) == 1 and dy.dtype == center.dtype and dy.is_contiguous()
    total = dy.flatten(1) if single else torch.empty(x.shape[:2], dtype=center.dtype)
    moment = torch.empty(x.shape[:2], dtype=center.dtype)
    given = (*_at(dy, planned(dy, plan)), *_at(x, plan), *tables.pointers)
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
    plan, dx = planned(x), torch.empty_like(x)
    gain = _ones(x.shape[1], scale.dtype) if gain is None else gain
    dy, tables = aligned(dy, x, plan), _tables(x, each, scale, gain, center, slope, offset)
    given = (*_at(dy, planned(dy, plan)), *_at(x, plan), *tables.pointers)
    _run("input_gradient", x, plan, *given, *_at(dx, planned(dx, plan)))
    return dx


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`aten.scale_gradient`."""
    if refuses(dy):
        dy = dy.contiguous()
    plan, dx, tables = planned(dy), torch.empty_like(dy), _tables(dy, 1, scale)
    _run("scale_gradient", dy, plan, *_at(dy, plan), *tables.pointers, *_at(dx, planned(dx, plan)))
    return dx


@functools.lru_cache(maxsize=64)
def _ones(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, channels, dtype=dtype)


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


def _at(x: Tensor, plan: Plan) -> tuple[int, int, int]:
    return x.data_ptr(), plan.batch_stride, plan.inner_stride


def _run(name: str, x: Tensor, plan: Plan, *given: int) -> None:
    shape = (*x.shape[:2], math.prod(x.shape[2:]))
    run(name, DTYPES[x.dtype], int(plan.last), threads(x.numel()), *shape, *given)

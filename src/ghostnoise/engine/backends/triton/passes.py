"""The passes on GPUs (CUDA, ROCm) as Triton kernels; each equals the pass of `engine.aten` that it names.

One set of kernels serves both layouts. x is seen as (B, C, S) with three strides, of which one is 1: that of the
positions (*rows*: the S positions of each (b, c) lie side by side) or that of the channels (*channels-last*: the C
channels of each (b, s) do). A program works on tiles of BLOCK_C channels by BLOCK_S positions of one sample. Triton
compiles a variant for a stride of 1, and lays the threads along it. Where S is small, a tile is wide in channels: one
program takes many rows.

The reductions (moments, gradient sums) walk over all tiles of their channels and read x once. With few samples and
many positions, that would leave most of the GPU idle: then K programs take P tiles each, and their K tables are joined
afterwards. Nothing is added atomically, so results are the same from run to run.
"""

# The kernels are written in Triton's language, in which types come with the arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations  # the kernels' annotations name a module that may be missing

import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import blend as blend  # small ops on tables, at home on any device
from ghostnoise.engine.backends.aten import everyone as everyone
from ghostnoise.engine.backends.aten import everyone_ramp as everyone_ramp
from ghostnoise.engine.backends.aten import follow as follow
from ghostnoise.engine.backends.aten import inject as inject
from ghostnoise.engine.backends.aten import others as others
from ghostnoise.engine.backends.aten import others_ramp as others_ramp
from ghostnoise.engine.backends.aten import pull as pull
from ghostnoise.engine.backends.aten import standardize as standardize
from ghostnoise.moments import Moments, spread

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton sees it: read when the kernels are defined
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TILE = 1024  # elements
POSITIONS = 32  # of a channels-last tile, where there are channels for the rest: lines of 64 bytes and more
PROGRAMS = 128  # fewer leave a GPU idle; a constant, so that sums do not depend on the GPU
LEAST_TILES = 16  # of a part: less work is not worth joining tables

_jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


def missing() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    if triton is None:
        return "the package triton is not installed"
    if not (INTERPRETED or torch.cuda.is_available()):
        return "PyTorch finds no CUDA or ROCm device"
    return None


def refuses(x: Tensor) -> str | None:
    """Why this backend cannot take `x`, or None if it can."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_neg():
        return "not a plain strided tensor"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"on device {x.device}, needs a CUDA or ROCm device"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype}, needs {', '.join(str(dtype) for dtype in DTYPES)}"
    if x.ndim < 3 or x.numel() == 0:
        return f"shape {tuple(x.shape)}, needs (B, C, *spatial) with no dimension of 0"
    if x.numel() // len(x) >= 2**30:
        return f"shape {tuple(x.shape)}, needs less than 2**30 elements in a sample"
    if not (_has_layout(x) and _has_layout(torch.empty_like(x, device="meta"))):
        return f"strides {x.stride()}, needs the positions or the channels side by side"
    return None


def moments(x: Tensor) -> Moments:
    """`aten.moments`: the mean and the biased variance of each sample over its positions, (B, C) in float64."""
    part = _divide(x, reduce=True)
    mean, var = _tables(x, part, torch.float64)
    _launch(_moments, x, part, _spatial(x), mean, var)
    if part.K == 1:
        return Moments(mean, var)
    share = mean.new_full((part.K, 1), part.P * part.BLOCK_S / part.S)
    share[-1] = 1 - (part.K - 1) * part.P * part.BLOCK_S / part.S
    pooled = (share * mean).sum(1)
    return Moments(pooled, (share * (var + (mean - pooled[:, None]).square())).sum(1))


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, each: int = 1) -> Tensor:
    """`aten.transform`: `scale * (x - center) + shift`, in x's memory format."""
    tables = (spread(table, x.shape[0], each) for table in (center, scale, shift))
    return _combined(torch.empty_like(x), None, x, None, *tables)


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    """`aten.gradient_sums`: Σ dy and Σ dy·(x - center) over the positions of each sample (B, C)."""
    part, center = _divide(x, reduce=True), spread(center, x.shape[0], each)
    total, moment = _tables(x, part, center.dtype)
    _launch(_gradient_sums, x, part, _spatial(_beside(dy, x)), _spatial(x), _table(center), total, moment)
    return (total, moment) if part.K == 1 else (total.sum(1), moment.sum(1))


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
    """`aten.input_gradient`: `gain * scale * dy + slope * (x - center) + offset`, in x's memory format."""
    scale, *ramp = (spread(table, x.shape[0], each) for table in (scale, center, slope, offset))
    return _combined(torch.empty_like(x), _beside(dy, x), x, scale if gain is None else scale * gain, *ramp)


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`aten.scale_gradient`: `scale * dy`, in dy's memory format, or contiguous if that is neither layout."""
    scale = spread(scale, dy.shape[0])
    dx = torch.empty_like(dy)
    if not _has_layout(dx):
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    return _combined(dx, _beside(dy, dx), None, scale, None, None, None)


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """`aten.draws`: the moments of the samples in each row of `indices` (B, N), the mean `around` a (1, C) one."""
    (rows, N), C = indices.shape, moments.mean.shape[1]
    mean, var = (moments.mean.new_empty(rows, C, dtype=dtype) for _ in range(2))
    blocks = min(triton.next_power_of_2(C), TILE // 8), min(triton.next_power_of_2(N), 8)
    given = [_table(table) for table in (*moments, around, indices)]
    kernel, warps = _draws[(rows * triton.cdiv(C, blocks[0]),)], _warps(math.prod(blocks), torch.float64)
    with torch.cuda.device_of(mean):
        kernel(*given, mean, var, N, C, *blocks, num_warps=warps)
    return Moments(mean, var)


class _Part(NamedTuple):
    """How a tensor is divided among programs: K parts of P tiles of BLOCK_C by BLOCK_S."""

    C: int
    S: int
    P: int
    K: int
    BLOCK_C: int
    BLOCK_S: int
    programs: int


def _divide(x: Tensor, reduce: bool) -> _Part:
    """One tile to a program; to `reduce`, all tiles of its channels, or a share of them where programs are few."""
    B, C = x.shape[:2]
    S = x.numel() // (B * C)
    most = TILE if _is_rows(x) else POSITIONS
    channels, positions = triton.next_power_of_2(C), triton.next_power_of_2(S)
    BLOCK_C = min(channels, TILE // min(positions, most))
    BLOCK_S = min(positions, TILE // BLOCK_C)
    programs, tiles, P = B * triton.cdiv(C, BLOCK_C), triton.cdiv(S, BLOCK_S), 1
    if reduce:
        parts = 1 if programs >= PROGRAMS else triton.cdiv(4 * PROGRAMS, programs)
        P = triton.cdiv(tiles, min(parts, triton.cdiv(tiles, LEAST_TILES)))
    K = triton.cdiv(tiles, P)
    return _Part(C, S, P, K, BLOCK_C, BLOCK_S, programs * K)


def _launch(kernel: Any, x: Tensor, part: _Part, *arguments: Any) -> None:
    ACC = tl.float64 if x.dtype == torch.float64 else tl.float32
    blocks = part.BLOCK_C, part.BLOCK_S
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        kernel[(part.programs,)](*arguments, part[:4], *blocks, ACC, num_warps=_warps(math.prod(blocks), x.dtype))


def _combined(out: Tensor, dy: Tensor | None, x: Tensor | None, *tables: Tensor | None) -> Tensor:
    tensors = [None if tensor is None else _spatial(tensor) for tensor in (out, dy, x)]
    given = [None if table is None else _table(table) for table in tables]
    _launch(_combine, out, _divide(out, reduce=False), *tensors, *given)
    return out


def _strides(x: Tensor) -> tuple[int, int, int] | None:
    """The strides of x as (B, C, S), or None if the positions are not evenly apart."""
    step, S = None, 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size > 1:
            step = stride if step is None else step
            if stride != step * S:
                return None
            S *= size
    return x.stride(0), 1 if x.shape[1] == 1 else x.stride(1), 1 if step is None else step


def _has_layout(x: Tensor) -> bool:
    strides = _strides(x)
    return strides is not None and 1 in strides[1:]


def _is_rows(x: Tensor) -> bool:
    return _spatial(x)[3] == 1


def _spatial(x: Tensor) -> tuple[Tensor, int, int, int]:
    strides = _strides(x)
    assert strides is not None, "refuses() says no to such a tensor"
    return x, *strides


def _table(table: Tensor) -> tuple[Tensor, int, int]:
    return table, table.stride(0), table.stride(1)


def _tables(x: Tensor, part: _Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (len(x), part.C) if part.K == 1 else (len(x), part.K, part.C)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _beside(dy: Tensor, x: Tensor) -> Tensor:
    """`dy` as it is where it lies like x, or is expanded, along x's stride of 1; else a copy that lies like x."""
    strides = _strides(dy)
    if strides is not None and strides[2 if _is_rows(x) else 1] in (0, 1) and not dy.is_neg():
        return dy
    return torch.empty_like(x, dtype=dy.dtype).copy_(dy)


def _warps(elements: int, dtype: torch.dtype) -> int:
    """8 elements to a thread, 4 in float64: with more, the pointers of an odd S fill the registers."""
    return max(1, elements // (128 if dtype == torch.float64 else 256))


# What follows is Triton's language. A tensor comes as (pointer, strides over b, c and s), a table as (pointer, strides
# over b and c), sizes as (C, S, P, K). Offsets have 64 bits, because B·C·S may exceed 2³¹.


@_jit
def _program(C, K, BLOCK_C: tl.constexpr):
    """This program's sample b, part k and channels c."""
    program = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    return (program // blocks // K).to(tl.int64), program // blocks % K, c


@_jit
def _at(x, b, c, s):
    """Pointers to the tile of channels c and positions s."""
    pointer, stride_b, stride_c, stride_s = x
    return pointer + b * stride_b + (c * stride_c)[:, None] + (s.to(tl.int64) * stride_s)[None, :]


@_jit
def _entries(table, b, c, inside):
    """A table's entries of channels c, one below the other."""
    pointer, stride_b, stride_c = table
    return tl.load(pointer + b * stride_b + (c * stride_c)[:, None], mask=inside, other=0)


@_jit
def _moments(x, mean, var, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr):
    """`aten.moments` of P tiles: two passes within a tile; tiles are joined around the first one's rough mean."""
    C, S, P, K = sizes
    b, k, c = _program(C, K, BLOCK_C)
    center = tl.zeros([BLOCK_C], ACC)
    total = tl.zeros([BLOCK_C], tl.float64)
    square = tl.zeros([BLOCK_C], tl.float64)
    for tile in range(P):
        start = (k * P + tile) * BLOCK_S
        s = start + tl.arange(0, BLOCK_S)
        inside = (c < C)[:, None] & (s < S)[None, :]
        values = tl.load(_at(x, b, c, s), mask=inside, other=0).to(ACC)
        n = tl.maximum(tl.minimum(S - start, BLOCK_S), 0)  # the last part may have fewer tiles
        rough = tl.sum(values, 1) / tl.maximum(n, 1)
        d = tl.where(inside, values - rough[:, None], 0)
        # Σ (x - center) and Σ (x - center)² from the tile's own sums. The first tile is part of the row, so that the
        # row's variance bounds how much of the gaps can cancel.
        center = tl.where(tile == 0, rough, center)
        gap = rough.to(tl.float64) - center.to(tl.float64)
        rest = tl.sum(d, 1).to(tl.float64)
        total += rest + n * gap
        square += tl.sum(d * d, 1).to(tl.float64) + gap * (2 * rest + n * gap)
    share = 1 / tl.minimum(S - k * P * BLOCK_S, P * BLOCK_S).to(tl.float64)
    offset = total * share
    spread = square * share - offset * offset
    table = (b * K + k) * C + c
    tl.store(mean + table, center.to(tl.float64) + offset, mask=c < C)
    tl.store(var + table, tl.where(spread < 0, 0.0, spread), mask=c < C)  # tl.maximum would hide a NaN


@_jit
def _gradient_sums(
    dy, x, center, total, moment, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr
):
    """`aten.gradient_sums` of P tiles; each element of the tile keeps sums of its own until the end."""
    C, S, P, K = sizes
    b, k, c = _program(C, K, BLOCK_C)
    around = _entries(center, b, c, (c < C)[:, None])
    sums = tl.zeros([BLOCK_C, BLOCK_S], ACC)
    products = tl.zeros([BLOCK_C, BLOCK_S], ACC)
    for tile in range(P):
        s = (k * P + tile) * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = (c < C)[:, None] & (s < S)[None, :]
        upstream = tl.load(_at(dy, b, c, s), mask=inside, other=0).to(ACC)
        values = tl.load(_at(x, b, c, s), mask=inside, other=0).to(ACC)
        sums += upstream
        products += upstream * (values - around)
    table = (b * K + k) * C + c
    tl.store(total + table, tl.sum(sums, 1), mask=c < C)
    tl.store(moment + table, tl.sum(products, 1), mask=c < C)


@_jit
def _combine(
    out, dy, x, scale, center, slope, offset, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr
):
    """One tile of `aten.input_gradient`; of `aten.transform` without dy, of `aten.scale_gradient` without x."""
    C, S, _, K = sizes
    b, k, c = _program(C, K, BLOCK_C)
    s = k * BLOCK_S + tl.arange(0, BLOCK_S)
    row = (c < C)[:, None]
    inside = row & (s < S)[None, :]
    result = tl.zeros([BLOCK_C, BLOCK_S], ACC)
    if x is not None:
        d = tl.load(_at(x, b, c, s), mask=inside, other=0).to(ACC) - _entries(center, b, c, row)
        result = _entries(slope, b, c, row) * d + _entries(offset, b, c, row)
    if dy is not None:
        result += _entries(scale, b, c, row) * tl.load(_at(dy, b, c, s), mask=inside, other=0).to(ACC)
    tl.store(_at(out, b, c, s), result.to(out[0].dtype.element_ty), mask=inside)


@_jit
def _draws(mean, var, around, indices, to_mean, to_var, N, C, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """`aten.draws` of one row of indices: BLOCK_N samples at a time, so that their loads overlap.

    Around the first drawn mean: an outlier that was not drawn costs no digits, one that was makes the variance large.
    """
    b, _, c = _program(C, 1, BLOCK_C)
    row = (c < C)[:, None]
    drawn, stride_b, stride_n = indices
    drawn += b * stride_b
    first = _entries(mean, tl.load(drawn), c, row)
    sums = tl.zeros([BLOCK_C, BLOCK_N], tl.float64)
    squares = tl.zeros([BLOCK_C, BLOCK_N], tl.float64)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        sample = tl.load(drawn + n * stride_n, mask=n < N, other=0)[None, :]
        inside = row & (n < N)[None, :]
        d = tl.where(inside, _entries(mean, sample, c, inside) - first, 0)
        sums += d
        squares += _entries(var, sample, c, inside) + d * d
    offset = tl.sum(sums, 1, keep_dims=True) / N
    spread = tl.sum(squares, 1, keep_dims=True) / N - offset * offset
    table = (b * C + c)[:, None]
    dtype = to_mean.dtype.element_ty
    tl.store(to_mean + table, (first - _entries(around, 0, c, row) + offset).to(dtype), mask=row)
    tl.store(to_var + table, tl.where(spread < 0, 0.0, spread).to(dtype), mask=row)

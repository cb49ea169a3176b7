"""Triton kernels for the passes over x, and for pooling drawn samples.

One set of kernels serves both layouts. x is seen as (B, C, S) with three strides, one of which is 1: that of the
positions (*rows*: the S positions of each (b, c) are adjacent) or that of the channels (*channels-last*: the C channels
of each (b, s) are adjacent). A program works on tiles of BLOCK_C channels by BLOCK_S positions of one sample. Triton
compiles a variant for a stride of 1, and lays the threads along it. If S is small, a tile is wide in channels, so that
one program takes many rows.

The reductions (moments, gradient sums) walk over all tiles of their channels and read x once. With few samples and many
positions, that would leave most of the GPU idle: then K programs take P tiles each, and their K tables are combined
afterwards. There are no atomic additions, so results are the same from run to run.
"""

# The kernels are written in Triton's language, in which types come with the arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations  # the kernels' annotations name a module that may be missing

import os
from typing import Any

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "combine_kernel",
    "draws_kernel",
    "gradient_sums_kernel",
    "moments_kernel",
    "tl",
    "triton",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read when the kernels are defined, as Triton does

_jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


# A tensor comes as (pointer, strides over b, c and s), a table as (pointer, strides over b and c), sizes as
# (C, S, P, K). Offsets have 64 bits, because B·C·S may exceed 2³¹.


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
def moments_kernel(x, mean, var, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr):
    """Measure the moments of P tiles: two passes within a tile; tiles are combined around the first rough mean."""
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
def gradient_sums_kernel(
    dy, x, center, total, moment, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr
):
    """Sum over P tiles; each element of the tile keeps its own sums until the end."""
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
def combine_kernel(
    out, dy, x, scale, center, slope, offset, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr
):
    """Compute one tile of `input_gradient`; of `transform` without dy, of `scale_gradient` without x."""
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
def draws_kernel(mean, var, around, indices, to_mean, to_var, N, C, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pool the samples in one row of indices, BLOCK_N samples at a time, so that their loads overlap.

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

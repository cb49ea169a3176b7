"""Triton kernels for the passes over x.

One set of kernels serves both layouts. x is seen as (B, C, S) with three strides, one of which is 1: that of the
positions (*rows*: the S positions of each (b, c) are adjacent) or that of the channels (*channels-last*: the C channels
of each (b, s) are adjacent). A program works on tiles of BLOCK_C channels by BLOCK_S positions of one sample. Triton
compiles a variant for a stride of 1, and lays the threads along it. If S is small, a tile is wide in channels, so that
one program takes many rows.

The reductions (moments, gradient sums) walk over all tiles of their channels and read x once. With few samples and many
positions, that would leave most of the GPU idle: then K programs take P tiles each, and the kernels that read their K
tables combine them. There are no atomic additions, so results are the same from run to run.
"""

# The kernels are written in Triton's language, in which types come with the arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations  # the kernels' annotations name a module that may be missing

from typing import Any

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

__all__ = ["combine_kernel", "gradient_sums_kernel", "jit", "moments_kernel", "tl", "triton"]

jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


# A tensor comes as (pointer, strides over b, c and s), a table as (pointer, strides over rows and c, samples per row,
# last row), sizes as (C, S, P, K). Offsets have 64 bits, because B·C·S may exceed 2³¹.
#
# Elements are computed in ACC, the arithmetic of x, tables in float64. x - center is computed with a rounded center;
# what is computed from it compensates for the rounding.


@jit
def _program(C, K, BLOCK_C: tl.constexpr):
    """This program's sample b, part k and channels c."""
    program = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    return (program // blocks // K).to(tl.int64), program // blocks % K, c


@jit
def _at(x, b, c, s):
    """Pointers to the tile of channels c and positions s."""
    pointer, stride_b, stride_c, stride_s = x
    return pointer + b * stride_b + (c * stride_c)[:, None] + (s.to(tl.int64) * stride_s)[None, :]


@jit
def _entries(table, b, c, inside, default: tl.constexpr):
    """A table's entries for sample b and channels c, one below the other; the default if there is no table."""
    entries = tl.zeros(inside.shape, tl.float64) + default
    if table is not None:
        pointer, stride_row, stride_c, per_row, last = table
        row = tl.minimum(b // per_row, last)
        entries = tl.load(pointer + row * stride_row + (c * stride_c)[:, None], mask=inside, other=0).to(tl.float64)
    return entries


@jit
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


@jit
def gradient_sums_kernel(
    dy, x, center, total, moment, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr
):
    """Sum over P tiles; each element of the tile keeps its own sums until the end."""
    C, S, P, K = sizes
    b, k, c = _program(C, K, BLOCK_C)
    row = (c < C)[:, None]
    around = _entries(center, b, c, row, 0)
    sums = tl.zeros([BLOCK_C, BLOCK_S], ACC)
    products = tl.zeros([BLOCK_C, BLOCK_S], ACC)
    for tile in range(P):
        s = (k * P + tile) * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = row & (s < S)[None, :]
        upstream = tl.load(_at(dy, b, c, s), mask=inside, other=0).to(ACC)
        values = tl.load(_at(x, b, c, s), mask=inside, other=0).to(ACC)
        sums += upstream
        products += upstream * (values - around.to(ACC))
    table = (b * K + k) * C + c[:, None]
    summed = tl.sum(sums, 1, keep_dims=True).to(tl.float64)
    rounding = around.to(ACC).to(tl.float64) - around
    tl.store(total + table, summed, mask=row)
    tl.store(moment + table, tl.sum(products, 1, keep_dims=True).to(tl.float64) + rounding * summed, mask=row)


@jit
def combine_kernel(
    out, dy, x, scale, gain, center, slope, offset, update, sizes,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `gain·scale·dy + slope·(x - center) + offset`.

    Without dy, the gain multiplies the slope. The first program also commits the `update` of running statistics.
    """
    C, S, _, K = sizes
    b, k, c = _program(C, K, BLOCK_C)
    s = k * BLOCK_S + tl.arange(0, BLOCK_S)
    row = (c < C)[:, None]
    inside = row & (s < S)[None, :]
    around = _entries(center, b, c, row, 0)
    through = _entries(slope, b, c, row, 1)
    if dy is None and gain is not None:
        through *= _entries(gain, b, c, row, 1)
    shift = _entries(offset, b, c, row, 0) + through * (around.to(ACC).to(tl.float64) - around)
    d = tl.load(_at(x, b, c, s), mask=inside, other=0).to(ACC) - around.to(ACC)
    result = through.to(ACC) * d + shift.to(ACC)
    if dy is not None:
        factor = _entries(scale, b, c, row, 1)
        if gain is not None:
            factor *= _entries(gain, b, c, row, 1)
        result += factor.to(ACC) * tl.load(_at(dy, b, c, s), mask=inside, other=0).to(ACC)
    tl.store(_at(out, b, c, s), result.to(out[0].dtype.element_ty), mask=inside)
    # The first condition is known when the kernel is compiled, the second when it runs.
    if update is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            _commit(update, C)


@jit
def _commit(update, C):
    """Write the updated running statistics (2, C) to the buffers, and count the batch, if all of them are finite.

    They were computed by an earlier launch: whether those of all channels are finite is known only when it has ended.
    """
    updated, mean, var, count = update
    BLOCK: tl.constexpr = 512
    failed = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        failed |= _not_finite(updated + c, mean, c < C) | _not_finite(updated + C + c, var, c < C)
    finite = tl.max(failed) == 0
    for start in range(0, C, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)
        _write(updated + c, mean, c, finite & (c < C))
        _write(updated + C + c, var, c, finite & (c < C))
    if count is not None:
        tl.store(count, tl.load(count) + finite.to(tl.int64))


@jit
def _not_finite(updated, buffer, inside):
    value = tl.load(updated, mask=inside, other=0)
    if buffer is not None:  # in whose dtype the value may overflow
        value = _rounded(value, buffer[0].dtype.element_ty).to(tl.float64)
    return tl.where(tl.abs(value) < float("inf"), 0, 1)


@jit
def _write(updated, buffer, c, mask):
    if buffer is not None:
        pointer, stride = buffer
        value = tl.load(updated, mask=mask, other=0)
        tl.store(pointer + c * stride, _rounded(value, pointer.dtype.element_ty), mask=mask)


@jit
def _rounded(value, dtype: tl.constexpr):
    """A float64 in the dtype of a buffer; by way of float32, which all targets and the interpreter can convert."""
    return value if dtype == tl.float64 else value.to(tl.float32).to(dtype)

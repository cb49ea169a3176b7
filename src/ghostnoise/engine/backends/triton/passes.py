"""The passes over x as Triton kernels: how tensors are divided among programs, and the launches."""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import Aten
from ghostnoise.engine.backends.base import Affine
from ghostnoise.engine.backends.triton.kernels import (
    combine_kernel,
    gradient_sums_kernel,
    moments_kernel,
    tl,
    triton,
)
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import LinearTerm

TILE = 1024  # elements
POSITIONS = 32  # of a channels-last tile that has enough channels: lines of 64 bytes and more
PROGRAMS = 128  # fewer leave a GPU idle; a constant, so that sums do not depend on the GPU
LEAST_TILES = 16  # of a part: less work is not worth combining tables


class TritonPasses(Aten):
    """The passes over x as kernels; operations on tables are those of `Aten`."""

    def moments(self, x: Tensor) -> Moments:
        """Measure the moments of each sample over its positions, (B, C) in float64."""
        (mean, var), part = measured(x)
        if part.K == 1:
            return Moments(mean, var)
        share = mean.new_full((part.K, 1), part.P * part.BLOCK_S / part.S)
        share[-1] = 1 - (part.K - 1) * part.P * part.BLOCK_S / part.S
        pooled = (share * mean).sum(1)
        return Moments(pooled, (share * (var + (mean - pooled[:, None]).square())).sum(1))

    def transform(self, x: Tensor, affine: Affine, samples_per_pool: int = 1) -> Tensor:
        """Apply `scale * (x - center) + shift`, in the memory format of x."""
        center, scale, shift = affine
        return combined(torch.empty_like(x), None, x, None, None, center, scale, shift, samples_per_pool)

    def gradient_sums(self, dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[Tensor, Tensor]:
        """Sum dy and dy·(x - center) over the positions of each sample (B, C)."""
        (total, moment), part = summed(dy, x, center, samples_per_pool)
        return (total, moment) if part.K == 1 else (total.sum(1), moment.sum(1))

    def input_gradient(
        self, dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, term: LinearTerm, samples_per_pool: int = 1
    ) -> Tensor:
        """Return the gradient of x, in the memory format of x."""
        return combined(torch.empty_like(x), aligned(dy, x), x, scale, gain, *term, samples_per_pool)

    def scale_gradient(self, dy: Tensor, scale: Tensor) -> Tensor:
        """Return `scale * dy`, in the memory format of dy, or contiguous if that is neither layout."""
        dx = torch.empty_like(dy)
        if not has_layout(dx):
            dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        return combined(dx, aligned(dy, dx), None, scale, None, None, None, None)


class Part(NamedTuple):
    """The division of a tensor among programs: K parts of P tiles of BLOCK_C by BLOCK_S."""

    C: int
    S: int
    P: int
    K: int
    BLOCK_C: int
    BLOCK_S: int
    programs: int


def measured(x: Tensor) -> tuple[tuple[Tensor, Tensor], Part]:
    """Measure the moments of each part of each sample: tables (B, C), or (B, K, C) with several parts."""
    part = _divide(x, reduce=True)
    tables = _tables(x, part, torch.float64)
    _launch_tiles(moments_kernel, x, part, _spatial(x), *tables)
    return tables, part


def summed(dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[tuple[Tensor, Tensor], Part]:
    """Sum dy and dy·(x - center) over each part of each sample: tables (B, C), or (B, K, C) with several parts."""
    part = _divide(x, reduce=True)
    tables = _tables(x, part, torch.float64 if x.dtype == torch.float64 else torch.float32)
    given = _spatial(aligned(dy, x)), _spatial(x), _table(center, len(x), samples_per_pool)
    _launch_tiles(gradient_sums_kernel, x, part, *given, *tables)
    return tables, part


def combined(
    out: Tensor,
    dy: Tensor | None,
    x: Tensor | None,
    scale: Tensor | None,
    gain: Tensor | None,
    center: Tensor | None,
    slope: Tensor | None,
    offset: Tensor | None,
    samples_per_pool: int = 1,
    update: tuple[Any, ...] | None = None,
) -> Tensor:
    """Fill `out` with `gain·scale·dy + slope·(x - center) + offset`; see `combine_kernel`."""
    tensors = [None if tensor is None else _spatial(tensor) for tensor in (out, dy, x)]
    given = (scale, gain, center, slope, offset)
    tables = [None if table is None else _table(table, len(out), samples_per_pool) for table in given]
    options = {} if update is None else registers(128)
    _launch_tiles(combine_kernel, out, _divide(out, reduce=False), *tensors, *tables, update, **options)
    return out


def registers(most: int) -> dict[str, Any]:
    """Allow this many registers for a thread, on NVIDIA: else ptxas may spill some to run more programs at a time."""
    return {} if torch.version.hip else {"maxnreg": most}


def launch(kernel: Any, x: Tensor, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch on the device of x, which need not be the current one."""
    with torch.cuda.device_of(x):
        kernel[(programs,)](*arguments, **options)


def accumulator(x: Tensor) -> Any:
    """Return Triton's dtype for the arithmetic of x."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def has_layout(x: Tensor) -> bool:
    """Return whether the positions of x are evenly spaced, and its channels or its positions are adjacent."""
    strides = _strides(x)
    return strides is not None and 1 in strides[1:]


def aligned(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy if its stride is 1 or 0 where that of x is 1; else a copy with the strides of x."""
    strides = _strides(dy)
    if strides is not None and strides[2 if _is_rows(x) else 1] in (0, 1) and not dy.is_neg():
        return dy
    return torch.empty_like(x, dtype=dy.dtype).copy_(dy)


def _divide(x: Tensor, reduce: bool) -> Part:
    """Give one tile to a program; to `reduce`, all tiles of its channels, or a part of them if programs are few."""
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
    return Part(C, S, P, K, BLOCK_C, BLOCK_S, programs * K)


def _launch_tiles(kernel: Any, x: Tensor, part: Part, *arguments: Any, **options: Any) -> None:
    blocks = part.BLOCK_C, part.BLOCK_S
    # 8 elements for a thread, 4 in float64: with more, the pointers of an odd S fill the registers.
    warps = max(1, math.prod(blocks) // (128 if x.dtype == torch.float64 else 256))
    launch(kernel, x, part.programs, *arguments, part[:4], *blocks, accumulator(x), num_warps=warps, **options)


def _strides(x: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of x as (B, C, S), or None if the positions are not evenly spaced."""
    step, S = None, 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size > 1:
            step = stride if step is None else step
            if stride != step * S:
                return None
            S *= size
    return x.stride(0), 1 if x.shape[1] == 1 else x.stride(1), 1 if step is None else step


def _is_rows(x: Tensor) -> bool:
    return _spatial(x)[3] == 1


def _spatial(x: Tensor) -> tuple[Tensor, int, int, int]:
    strides = _strides(x)
    assert strides is not None, "refuses() rejects such a tensor"
    return x, *strides


def _table(table: Tensor, batch_size: int, samples_per_pool: int) -> tuple[Tensor, int, int, int, int]:
    """Return a table with one row per sample, per pool, or for all samples, as kernels take it."""
    rows = table.shape[0]
    return table, table.stride(0), table.stride(1), 1 if rows == batch_size else samples_per_pool, rows - 1


def _tables(x: Tensor, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (len(x), part.C) if part.K == 1 else (len(x), part.K, part.C)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)

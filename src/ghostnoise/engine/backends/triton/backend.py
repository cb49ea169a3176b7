"""The passes on GPUs (CUDA, ROCm) as Triton kernels: how tensors are divided among programs, and the launches."""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import Aten
from ghostnoise.engine.backends.base import Affine, Capabilities
from ghostnoise.engine.backends.triton.kernels import (
    INTERPRETED,
    combine_kernel,
    draws_kernel,
    gradient_sums_kernel,
    moments_kernel,
)
from ghostnoise.statistics.moments import Moments, expand_pools
from ghostnoise.statistics.samples import LinearTerm

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TILE = 1024  # elements
POSITIONS = 32  # of a channels-last tile that has enough channels: lines of 64 bytes and more
PROGRAMS = 128  # fewer leave a GPU idle; a constant, so that sums do not depend on the GPU
LEAST_TILES = 16  # of a part: less work is not worth combining tables


class Triton(Aten):
    """The passes over x and the pooling of drawn samples as kernels; tables are left to `Aten`."""

    name = "triton"
    capabilities = Capabilities(devices=("cuda",), dtypes=DTYPES)

    def unavailable(self) -> str | None:
        """Return why this backend cannot run on this machine, or None if it can."""
        if triton is None:
            return "the package triton is not installed"
        if not (INTERPRETED or torch.cuda.is_available()):
            return "PyTorch finds no CUDA or ROCm device"
        return None

    def refuses(self, x: Tensor) -> str | None:
        """Return why this backend cannot run on `x`, or None if it can."""
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_neg():
            return "not a plain strided tensor"
        if x.device.type not in self.capabilities.devices and not INTERPRETED:  # type: ignore[operator]
            return f"on device {x.device}, needs a CUDA or ROCm device"
        if x.dtype not in DTYPES:
            return f"dtype {x.dtype}, needs {', '.join(str(dtype) for dtype in DTYPES)}"
        if x.ndim < 3 or x.numel() == 0:
            return f"shape {tuple(x.shape)}, needs (B, C, *spatial) with no dimension of 0"
        if x.numel() // len(x) >= 2**30:
            return f"shape {tuple(x.shape)}, needs less than 2**30 elements in a sample"
        if not (_has_layout(x) and _has_layout(torch.empty_like(x, device="meta"))):
            return f"strides {x.stride()}, needs adjacent positions or adjacent channels"
        return None

    def moments(self, x: Tensor) -> Moments:
        """Measure the moments of each sample over its positions, (B, C) in float64."""
        part = _divide(x, reduce=True)
        mean, var = _tables(x, part, torch.float64)
        _launch(moments_kernel, x, part, _spatial(x), mean, var)
        if part.K == 1:
            return Moments(mean, var)
        share = mean.new_full((part.K, 1), part.P * part.BLOCK_S / part.S)
        share[-1] = 1 - (part.K - 1) * part.P * part.BLOCK_S / part.S
        pooled = (share * mean).sum(1)
        return Moments(pooled, (share * (var + (mean - pooled[:, None]).square())).sum(1))

    def transform(self, x: Tensor, affine: Affine, samples_per_pool: int = 1) -> Tensor:
        """Apply `scale * (x - center) + shift`, in the memory format of x."""
        tables = (expand_pools(table, x.shape[0], samples_per_pool) for table in affine)
        return _combined(torch.empty_like(x), None, x, None, *tables)

    def gradient_sums(self, dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[Tensor, Tensor]:
        """Sum dy and dy·(x - center) over the positions of each sample (B, C)."""
        part, center = _divide(x, reduce=True), expand_pools(center, x.shape[0], samples_per_pool)
        total, moment = _tables(x, part, center.dtype)
        given = (_spatial(_aligned(dy, x)), _spatial(x), _table(center), total, moment)
        _launch(gradient_sums_kernel, x, part, *given)
        return (total, moment) if part.K == 1 else (total.sum(1), moment.sum(1))

    def input_gradient(
        self, dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, term: LinearTerm, samples_per_pool: int = 1
    ) -> Tensor:
        """Return the gradient of x, in the memory format of x."""
        scale, *rest = (expand_pools(table, x.shape[0], samples_per_pool) for table in (scale, *term))
        return _combined(torch.empty_like(x), _aligned(dy, x), x, scale if gain is None else scale * gain, *rest)

    def scale_gradient(self, dy: Tensor, scale: Tensor) -> Tensor:
        """Return `scale * dy`, in the memory format of dy, or contiguous if that is neither layout."""
        scale = expand_pools(scale, dy.shape[0])
        dx = torch.empty_like(dy)
        if not _has_layout(dx):
            dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        return _combined(dx, _aligned(dy, dx), None, scale, None, None, None)

    def pool_drawn(self, moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
        """Pool the samples in each row of `indices` (B, N); the mean is relative to `around` (1, C)."""
        (rows, N), C = indices.shape, moments.mean.shape[1]
        mean, var = (moments.mean.new_empty(rows, C, dtype=dtype) for _ in range(2))
        blocks = min(triton.next_power_of_2(C), TILE // 8), min(triton.next_power_of_2(N), 8)
        given = [_table(table) for table in (*moments, around, indices)]
        kernel, warps = draws_kernel[(rows * triton.cdiv(C, blocks[0]),)], _warps(math.prod(blocks), torch.float64)
        with torch.cuda.device_of(mean):
            kernel(*given, mean, var, N, C, *blocks, num_warps=warps)
        return Moments(mean, var)


class _Part(NamedTuple):
    """The division of a tensor among programs: K parts of P tiles of BLOCK_C by BLOCK_S."""

    C: int
    S: int
    P: int
    K: int
    BLOCK_C: int
    BLOCK_S: int
    programs: int


def _divide(x: Tensor, reduce: bool) -> _Part:
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
    return _Part(C, S, P, K, BLOCK_C, BLOCK_S, programs * K)


def _launch(kernel: Any, x: Tensor, part: _Part, *arguments: Any) -> None:
    ACC = tl.float64 if x.dtype == torch.float64 else tl.float32
    blocks = part.BLOCK_C, part.BLOCK_S
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        kernel[(part.programs,)](*arguments, part[:4], *blocks, ACC, num_warps=_warps(math.prod(blocks), x.dtype))


def _combined(out: Tensor, dy: Tensor | None, x: Tensor | None, *tables: Tensor | None) -> Tensor:
    tensors = [None if tensor is None else _spatial(tensor) for tensor in (out, dy, x)]
    given = [None if table is None else _table(table) for table in tables]
    _launch(combine_kernel, out, _divide(out, reduce=False), *tensors, *given)
    return out


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


def _has_layout(x: Tensor) -> bool:
    strides = _strides(x)
    return strides is not None and 1 in strides[1:]


def _is_rows(x: Tensor) -> bool:
    return _spatial(x)[3] == 1


def _spatial(x: Tensor) -> tuple[Tensor, int, int, int]:
    strides = _strides(x)
    assert strides is not None, "refuses() rejects such a tensor"
    return x, *strides


def _table(table: Tensor) -> tuple[Tensor, int, int]:
    return table, table.stride(0), table.stride(1)


def _tables(x: Tensor, part: _Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (len(x), part.C) if part.K == 1 else (len(x), part.K, part.C)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _aligned(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy if its stride is 1 or 0 where that of x is 1; else a copy with the strides of x."""
    strides = _strides(dy)
    if strides is not None and strides[2 if _is_rows(x) else 1] in (0, 1) and not dy.is_neg():
        return dy
    return torch.empty_like(x, dtype=dy.dtype).copy_(dy)


def _warps(elements: int, dtype: torch.dtype) -> int:
    """Give 8 elements to a thread, 4 in float64: with more, the pointers of an odd S fill the registers."""
    return max(1, elements // (128 if dtype == torch.float64 else 256))

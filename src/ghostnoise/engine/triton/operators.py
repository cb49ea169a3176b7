"""The operators of `engine.ops` for CUDA and ROCm devices: how tensors are divided among programs, and the launches.

A normalization takes three launches: measure, decide, apply; and backward: sum, decide, apply. The decide kernel
computes the new running statistics, and the first program of the last launch writes them to the buffers, since whether
those of all channels are finite is known only between launches. Nothing synchronizes with the device, so that the
launches can be captured in CUDA graphs; therefore indices are not checked, and a sample for which one that does not
exist was drawn becomes NaN.
"""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostnoise.engine.ops import no_variance
from ghostnoise.engine.triton.decisions import (
    drawn_kernel,
    exclusive_gradient_kernel,
    exclusive_kernel,
    pools_gradient_kernel,
    pools_kernel,
)
from ghostnoise.engine.triton.kernels import combine_kernel, gradient_sums_kernel, moments_kernel, tl, triton

TILE = 1024  # elements
POSITIONS = 32  # of a channels-last tile that has enough channels: lines of 64 bytes and more
PROGRAMS = 128  # fewer leave a GPU idle; a constant, so that sums do not depend on the GPU
MIN_TILES = 16  # of a part: less work is not worth combining tables
MAX_ELEMENTS = 2**30  # of a sample: its positions are counted in 32 bits
CHANNELS = 8  # of a program that pools ghost batches: lines of 64 bytes
ROWS = 128  # samples of a program at a time
DRAWN_CHANNELS = 32  # of a program that pools drawn samples
DRAWN_ROWS = 32  # samples of such a program, if there are enough programs
PER_THREAD = 8  # elements
EXCLUSIVE_PER_THREAD = 4  # if samples are excluded from their pools, which needs more registers
DECIDE_REGISTERS = 255  # of a thread: all that there are, since programs are few
COMMIT_REGISTERS = 128
RUNNING = ("whole", "unbiased", "ghosts")


def unavailable() -> str | None:
    """Return why the operators cannot run, or None if they can."""
    return "the package triton is not installed" if triton is None else None


def register(library: torch.library.Library) -> None:
    """Register the operators for CUDA devices, which is also PyTorch's name for those of ROCm."""
    for run in (moments, transform, gradient_sums, input_gradient, normalize, normalize_backward, ghost_noise):
        library.impl(run.__name__, run, "CUDA")


# The passes.


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Measure the moments of each sample over its positions: (B, C) in float64."""
    if _positions(x) == 1:
        mean = x.flatten(1).to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return mean, no_variance(mean)
    if not x.numel():
        return _empty_sum(x) / 0, _empty_sum(x) / 0
    x = _regular(x)
    mean, var, part = _measured(x, *_tables(x, _Part.of(x, reduce=True)))
    if part.K == 1:
        return mean, var
    share = mean.new_full((part.K, 1), part.P * part.BLOCK_S / part.S)
    share[-1] = 1 - (part.K - 1) * part.P * part.BLOCK_S / part.S
    pooled = (share * mean).sum(1)
    return pooled, (share * (var + (mean - pooled[:, None]).square())).sum(1)


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply `scale * (x - center) + shift`, in the memory format of x."""
    return _combined(x, _regular(x), center, scale, shift)


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sum dy and dy·(x - center) over the positions of each sample: (B, C) in float64."""
    if not x.numel():
        return _empty_sum(x), _empty_sum(x)
    x = _regular(x)
    total, moment, part = _summed(_aligned(dy, x), x, center)
    return (total, moment) if part.K == 1 else (total.sum(1), moment.sum(1))


def input_gradient(dy: Tensor, x: Tensor, scale: Tensor, center: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Compute `scale * dy + slope * (x - center) + offset`, in the memory format of x."""
    given, like = _regular(x), x
    return _combined(like, given, center, slope, offset, _aligned(dy, given), scale)


# Whole methods.


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    running: str,
    ghost_size: int | None,
    exclusive: bool,
    eps: float,
    min_std: float,
    indices: Tensor | None,
    seed: Tensor | None,
    law: Tensor | None,
    quantiles: Tensor | None,
    noise_eps: float,
    shift: bool,
    scale: bool,
    reference_mean: Tensor | None,
    reference_var: Tensor | None,
    reference_count: Tensor | None,
    r_max: float | None,
    d_max: float,
    warmup_steps: int,
    transition_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize in training, and update the running statistics: y, and what the backward pass needs."""
    like, x, (B, C) = x, _regular(x), x.shape[:2]
    sizes, dtype, noisy = _Sizes.of(x, ghost_size), _arithmetic(x), indices is not None
    one_pool = sizes.ghosts == 1 and not exclusive
    if seed is not None:
        raise ValueError("a seed was given: the kernels for GPUs take drawn samples; pass indices")
    if running not in RUNNING or (exclusive and running == "ghosts"):
        raise ValueError(f"running={running!r}: must be one of {RUNNING}, and not 'ghosts' if exclusive")
    if noisy != (shift or scale) or (noisy and not (one_pool and r_max is None)):
        raise ValueError("noise needs indices, shift or scale, all samples in one pool, and no Batch Renormalization")
    if r_max is not None and not one_pool:
        raise ValueError("Batch Renormalization needs all samples in one pool: leave ghost_size None")
    samples = _Samples.of(x)
    update, *rate = _update(x, running_mean, running_var, num_batches_tracked, momentum, running == "unbiased")
    floor, affine, offset = (eps, min_std**2), (_vector(weight), _vector(bias)), None if bias is None else bias[None]
    extra = x.new_empty((shift + scale, B, C) if r_max is None else (2, 1, C), dtype=dtype)
    if exclusive:
        center, factor = tables = x.new_empty((2, B, C), dtype=torch.float64)
        stats = samples.own()
        kept = (stats[0], stats[1]) if samples.in_parts else None
        given = samples.argument, kept, tables, affine[0], update, 1 / B, *floor, *rate
        _launch_pools(exclusive_kernel, x, sizes, True, *given)
        return _combined(like, x, center, factor, offset, update=update), stats, extra
    mean, var = stats = x.new_empty((2, sizes.ghosts, C), dtype=torch.float64)
    factor = torch.empty_like(mean)
    if indices is not None:
        m, k = extra[0] if shift else None, extra[-1] if scale else None
        if m is not None:
            offset = x.new_empty((B, C), dtype=torch.float64)
        given = (mean, var), (m, k), factor, None if m is None else offset, *affine, update, noise_eps, *floor, *rate
        _launch_drawn(x, samples, indices, *given)
        return _combined(like, x, mean, factor, offset, gain=k, update=update), stats, extra
    renorm = None
    if r_max is not None:
        offset = x.new_empty((1, C), dtype=torch.float64)
        reference = (running_mean, running_var) if reference_mean is None else (reference_mean, reference_var)
        if any(table is None for table in reference):
            raise ValueError("Batch Renormalization needs running statistics or a reference, a mean and a variance")
        count = num_batches_tracked if reference_count is None else reference_count
        renorm = *map(_vector, reference), extra[0, 0], extra[1, 0], offset, count, warmup_steps, transition_steps
    given = samples.argument, (mean, var), factor, *affine, renorm, update, 1 / B, *floor, *rate
    _launch_pools(pools_kernel, x, sizes, False, *given, r_max or 1.0, d_max, running == "ghosts")
    return _combined(like, x, mean, factor, offset, per_row=sizes.per_row, update=update), stats, extra


def normalize_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    extra: Tensor,
    ghost_size: int | None,
    exclusive: bool,
    eps: float,
    min_std: float,
    shift: bool,
    scale: bool,
    needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    like, x = x, _regular(x)
    dy, sizes, (mean, var) = _aligned(dy, x), _Sizes.of(x, ghost_size), stats
    center = mean if len(mean) else x.flatten(1)
    g_weight, g_bias = (x.new_empty(x.shape[1], dtype=_arithmetic(x)) for _ in range(2))
    rows, per_row = (len(x), 1) if exclusive else (sizes.ghosts, sizes.per_row)
    tables = x.new_empty((3, rows, x.shape[1]), dtype=torch.float64) if needs_x else None
    m, k = extra[0] if shift else None, extra[-1] if scale else None
    sums = _Samples(*_summed(dy, x, center, per_row)).argument
    given = g_weight, g_bias, tables, 1 / _positions(x), eps, min_std**2
    if exclusive:
        own = _Samples(center, var if len(mean) else None, None).argument
        _launch_pools(exclusive_gradient_kernel, x, sizes, True, sums, own, _vector(weight), *given)
    else:
        renorm = (extra[0, 0], extra[1, 0]) if len(extra) and not (shift or scale) else None
        known = sums, _table(var), (_table(m), _table(k)), _vector(weight), renorm
        _launch_pools(pools_gradient_kernel, x, sizes, False, *known, *given)
    if tables is None:
        return x.new_empty(0), g_weight, g_bias
    factor, slope, offset = tables.unbind()
    return _combined(like, x, center, slope, offset, dy, factor, k, per_row), g_weight, g_bias


def ghost_noise(x: Tensor, indices: Tensor, noise_eps: float, shift: bool, scale: bool) -> tuple[Tensor, Tensor]:
    """Apply `(x - m) * k`, and return k, (0, C) without scale."""
    like, x = x, _regular(x)
    m = x.new_empty(x.shape[:2], dtype=torch.float64) if shift else None
    k = x.new_empty((len(x) if scale else 0, x.shape[1]), dtype=_arithmetic(x))
    noise, unused = (m, k if scale else None), [None] * 5
    _launch_drawn(x, _Samples.of(x), indices, None, noise, *unused, noise_eps, 1.0, 0.0, 0.0, 1.0)
    return _combined(like, x, m, noise[1], None), k


def _update(
    x: Tensor, mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, unbiased: bool
) -> tuple[tuple[Any, ...] | None, float, float]:
    """Return the buffers as kernels take them, with memory for their new values; the momentum; and n / (n - 1)."""
    update, values = None, x.numel() // x.shape[1]
    if not (mean is None and var is None and count is None):
        update = x.new_empty((2, x.shape[1]), dtype=torch.float64), _vector(mean), _vector(var), count
    # NaN is the momentum of the cumulative average.
    return update, math.nan if momentum is None else momentum, values / max(values - 1, 1) if unbiased else 1.0


class _Samples(NamedTuple):
    """The moments of samples, or sums of gradients, which may be in parts (B, K, C); x itself if it has no `var`."""

    mean: Tensor
    var: Tensor | None
    part: "_Part | None"
    both: Tensor | None = None  # mean and var as one tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Samples":
        """Measure the samples, unless they have a single position."""
        if _positions(x) == 1:
            return cls(x.flatten(1), None, None)
        both = x.new_empty((2, *_Part.of(x, reduce=True).table(len(x))), dtype=torch.float64)
        return cls(*_measured(x, *both), both)

    @property
    def in_parts(self) -> bool:
        """Whether kernels must combine several rows per sample."""
        return self.part is not None and self.part.K > 1

    def own(self) -> Tensor:
        """Return the tables (2, B, C) kept for the backward pass: (2, 0, C) for x itself, to fill for parts."""
        if self.both is not None and not self.in_parts:
            return self.both
        shape = (2, 0 if self.var is None else len(self.mean), self.mean.shape[-1])
        return self.mean.new_empty(shape, dtype=torch.float64)

    @property
    def argument(self) -> tuple[Any, ...]:
        """What kernels take."""
        mean, var, part, _ = self
        strides = mean.stride(0), mean.stride(-1)
        if part is None or part.K == 1:
            return mean, var, *strides, None
        # Kernels take floats of a tuple in float32, so that a float64 comes as two.
        high = float(np.float32(1 / part.S))
        return mean, var, *strides, (mean.stride(1), part.K, part.P * part.BLOCK_S, part.S, high, 1 / part.S - high)


class _Sizes(NamedTuple):
    """The sizes of a batch and of its ghost batches, the last of which also takes the remaining samples."""

    batch_size: int
    channels: int
    ghosts: int
    size: int
    last: int

    @classmethod
    def of(cls, x: Tensor, ghost_size: int | None) -> "_Sizes":
        """Divide the batch into ghost batches."""
        B, C = x.shape[:2]
        ghosts = 1 if ghost_size is None else max(B // ghost_size, 1)
        size = B if ghosts == 1 or ghost_size is None else ghost_size
        return cls(B, C, ghosts, size, B - (ghosts - 1) * size)

    @property
    def per_row(self) -> int:
        """Samples per row of a table (G, C), or of a table (B, C) beside one that serves all samples."""
        return self.size if self.ghosts > 1 else 1


# Launches.


class _Part(NamedTuple):
    """The division of a tensor among programs: K parts of P tiles of BLOCK_C by BLOCK_S."""

    C: int
    S: int
    P: int
    K: int
    BLOCK_C: int
    BLOCK_S: int
    programs: int

    @classmethod
    def of(cls, x: Tensor, reduce: bool) -> "_Part":
        """Give one tile to a program; to `reduce`, all tiles of its channels, or a part of them if programs are few."""
        (B, C), S = x.shape[:2], _positions(x)
        if C * S >= MAX_ELEMENTS:
            raise ValueError(f"shape {tuple(x.shape)}: needs less than {MAX_ELEMENTS} elements in a sample; split it")
        most = TILE if _spatial(x)[3] == 1 else POSITIONS
        channels, positions = triton.next_power_of_2(C), triton.next_power_of_2(S)
        BLOCK_C = min(channels, TILE // min(positions, most))
        BLOCK_S = min(positions, TILE // BLOCK_C)
        programs, tiles, P = B * triton.cdiv(C, BLOCK_C), triton.cdiv(S, BLOCK_S), 1
        if reduce:
            parts = 1 if programs >= PROGRAMS else triton.cdiv(4 * PROGRAMS, programs)
            P = triton.cdiv(tiles, min(parts, triton.cdiv(tiles, MIN_TILES)))
        K = triton.cdiv(tiles, P)
        return cls(C, S, P, K, BLOCK_C, BLOCK_S, programs * K)

    def table(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of a table with a row for each part of each sample."""
        return (batch_size, self.C) if self.K == 1 else (batch_size, self.K, self.C)


def _measured(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, _Part]:
    """Measure the moments of each part of each sample: tables (B, C), or (B, K, C) with several parts."""
    part = _Part.of(x, reduce=True)
    _launch_tiles(moments_kernel, x, part, _spatial(x), mean, var)
    return mean, var, part


def _summed(dy: Tensor, x: Tensor, center: Tensor, per_row: int = 1) -> tuple[Tensor, Tensor, _Part]:
    """Sum dy and dy·(x - center) over each part of each sample: tables (B, C), or (B, K, C) with several parts."""
    part = _Part.of(x, reduce=True)
    total, moment = _tables(x, part)
    _launch_tiles(gradient_sums_kernel, x, part, _spatial(dy), _spatial(x), _table(center, per_row), total, moment)
    return total, moment, part


def _combined(
    like: Tensor,
    x: Tensor,
    center: Tensor | None,
    slope: Tensor | None,
    offset: Tensor | None,
    dy: Tensor | None = None,
    scale: Tensor | None = None,
    gain: Tensor | None = None,
    per_row: int = 1,
    update: tuple[Any, ...] | None = None,
) -> Tensor:
    """Return `gain·scale·dy + slope·(x - center) + offset` in the memory format of `like`; see `combine_kernel`."""
    out = torch.empty_like(like)
    if not x.numel():
        return out
    made = out if _is_regular(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    tables = (_table(table, per_row) for table in (scale, gain, center, slope, offset))
    upstream = None if dy is None else _spatial(dy)
    options = {} if update is None else _registers(COMMIT_REGISTERS)
    part = _Part.of(made, reduce=False)
    _launch_tiles(combine_kernel, made, part, _spatial(made), upstream, _spatial(x), *tables, update, **options)
    return made if made is out else out.copy_(made)


def _launch_tiles(kernel: Any, x: Tensor, part: _Part, *arguments: Any, **options: Any) -> None:
    blocks = part.BLOCK_C, part.BLOCK_S
    # 8 elements for a thread, 4 in float64: with more, the pointers of an odd S fill the registers.
    warps = max(1, math.prod(blocks) // (128 if x.dtype == torch.float64 else 256))
    _launch(kernel, x, part.programs, *arguments, part[:4], *blocks, _accumulator(x), num_warps=warps, **options)


def _launch_pools(kernel: Any, x: Tensor, sizes: _Sizes, exclusive: bool, *arguments: Any) -> None:
    """Give CHANNELS channels to a program."""
    BLOCK_C = min(triton.next_power_of_2(sizes.channels), CHANNELS)
    BLOCK_N = min(triton.next_power_of_2(sizes.last), ROWS)
    BLOCK_G = min(triton.next_power_of_2(sizes.ghosts), ROWS // BLOCK_N)
    warps = max(1, BLOCK_G * BLOCK_N * BLOCK_C // (32 * (EXCLUSIVE_PER_THREAD if exclusive else PER_THREAD)))
    # The reciprocals of the sizes of the first and the last pool.
    shares = (1 / max(size - exclusive, 1) for size in (sizes.size, sizes.last))
    arguments = *arguments, tuple(sizes), *shares, BLOCK_G, BLOCK_N, BLOCK_C
    programs = triton.cdiv(sizes.channels, BLOCK_C)
    _launch(kernel, x, programs, *arguments, num_warps=warps, **_registers(DECIDE_REGISTERS))


def _launch_drawn(x: Tensor, samples: _Samples, indices: Tensor, *arguments: Any) -> None:
    """Give DRAWN_CHANNELS channels of DRAWN_ROWS samples to a program, or of fewer samples if programs are few."""
    (B, C), N, normalized = x.shape[:2], indices.shape[1], arguments[0] is not None
    BLOCK_C, BLOCK_B = min(triton.next_power_of_2(C), DRAWN_CHANNELS), min(triton.next_power_of_2(B), DRAWN_ROWS)
    blocks = triton.cdiv(C, BLOCK_C)
    while BLOCK_B > 4 and triton.cdiv(B, BLOCK_B) * blocks < PROGRAMS:
        BLOCK_B //= 2
    arguments = samples.argument, (indices, *indices.stride()), *arguments, (B, C, N), 1 / B, 1 / N
    programs, warps = triton.cdiv(B, BLOCK_B) * blocks, max(1, DRAWN_ROWS * BLOCK_C // (32 * PER_THREAD))
    arguments = *arguments, normalized, BLOCK_B, DRAWN_ROWS, BLOCK_C, _accumulator(x)
    _launch(drawn_kernel, x, programs, *arguments, num_warps=warps, **_registers(DECIDE_REGISTERS))


def _launch(kernel: Any, x: Tensor, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch on the device of x, which need not be the current one."""
    with torch.cuda.device_of(x):
        kernel[(programs,)](*arguments, **options)


def _registers(most: int) -> dict[str, Any]:
    """Allow this many registers for a thread, on NVIDIA: else ptxas may spill some to run more programs at a time."""
    return {} if torch.version.hip else {"maxnreg": most}


# What kernels take.


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _accumulator(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _positions(x: Tensor) -> int:
    return math.prod(x.shape[2:])


def _empty_sum(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[:2], dtype=torch.float64)


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


def _spatial(x: Tensor) -> tuple[Tensor, int, int, int]:
    strides = _strides(x)
    assert strides is not None, "_regular and _aligned copy such a tensor"
    return x, *strides


def _is_regular(x: Tensor) -> bool:
    """Return whether the positions of x are evenly spaced, and its channels or its positions are adjacent."""
    strides = _strides(x)
    return strides is not None and 1 in strides[1:]


def _regular(x: Tensor) -> Tensor:
    return x if _is_regular(x) else x.contiguous()


def _aligned(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy if its stride is 1 or 0 where that of x is 1; else a copy with the strides of x."""
    strides = _strides(dy)
    if strides is not None and strides[2 if _spatial(x)[3] == 1 else 1] in (0, 1):
        return dy
    return torch.empty_like(x, dtype=dy.dtype).copy_(dy)


def _vector(vector: Tensor | None) -> tuple[Tensor, int] | None:
    return None if vector is None else (vector, vector.stride(0))


def _table(table: Tensor | None, per_row: int = 1) -> tuple[Tensor, int, int, int, int] | None:
    """Return a table with one row for each sample, for `per_row` samples, or for all."""
    return None if table is None else (table, table.stride(0), table.stride(1), per_row, len(table) - 1)


def _tables(x: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    """Allocate two tables, each in memory of its own, as outputs of an operator must be."""
    shape = part.table(len(x))
    return x.new_empty(shape, dtype=torch.float64), x.new_empty(shape, dtype=torch.float64)

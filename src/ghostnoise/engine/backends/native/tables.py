"""What `native` does between its passes: the pools and tables of `engine.aten` through the C++ library."""

import ctypes
import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.native.library import DTYPES, run, threads
from ghostnoise.ghosts import Ramp, ghost_sizes
from ghostnoise.methods import Batch, Noise, Normalizer
from ghostnoise.moments import Affine, Moments, Standard, arithmetic_dtype


def single_position(x: Tensor) -> Moments:
    """The moments of samples of a single position: x itself, in the dtype of its arithmetic, and no variance."""
    mean = x.flatten(1).to(arithmetic_dtype(x)).contiguous()
    return Moments(mean, torch.zeros(1, 1, dtype=torch.float64).expand(mean.shape))


def everyone(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.everyone`."""
    return _pool(moments, ghost_size, others=False)


def others(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.others`."""
    return _pool(moments, ghost_size, others=True)


def everyone_ramp(pooled: Tensor, gradient: Moments, ghost_size: int | None, batch_size: int, spatial: int) -> Ramp:
    """`aten.everyone_ramp`, in the dtype of the gradient."""
    dtype, (count, starts) = gradient.mean.dtype, group_starts(batch_size, ghost_size)
    made = torch.empty(3, *pooled.shape, dtype=dtype).unbind()
    tables = [table.contiguous() for table in (pooled, *gradient)]
    settings = (DTYPES[dtype], threads(pooled.numel()), count, starts, pooled.shape[1], spatial)
    run("everyone_ramp", *settings, *map(pointer, (*tables, *made)))
    return Ramp(*made)


def others_ramp(mean: Tensor, pooled: Tensor, gradient: Moments, ghost_size: int | None, spatial: int) -> Ramp:
    """`aten.others_ramp`, in the dtype of the gradient."""
    dtype = gradient.mean.dtype
    (count, starts), channels = group_starts(mean.shape[0], ghost_size), mean.shape[1]
    made = torch.empty(3, *mean.shape, dtype=dtype).unbind()
    settings = (DTYPES[dtype], DTYPES[mean.dtype], threads(mean.numel()), count, starts, channels, spatial)
    run("others_ramp", *settings, *(table.data_ptr() for table in (mean, pooled, *gradient, *made)))
    return Ramp(*made)


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """`aten.draws`."""
    around, indices = around.contiguous(), indices.to(torch.int64).contiguous()
    batch_size, channels = moments.mean.shape
    made = [torch.empty(indices.shape[0], channels, dtype=dtype) for _ in range(2)]
    many = threads(indices.numel() * channels)
    sizes = (DTYPES[moments.mean.dtype], DTYPES[dtype], many, batch_size, channels, *indices.shape)
    tables = (indices.data_ptr(), around.data_ptr(), *(table.data_ptr() for table in made))
    run("draws", *sizes, *moment_pointers(moments), *tables)
    return Moments(*made)


def standardize(
    normalizer: Normalizer, stats: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Standard:
    """`aten.standardize`; the five tables lie one after the other, as `blend` and `pull` take them."""
    made = torch.empty((5, *stats.mean.shape), dtype=dtype)
    given = (solid(weight, dtype), solid(bias, dtype))
    settings = (DTYPES[dtype], threads(stats.mean.numel()), *stats.mean.shape)
    tables = [table.contiguous() for table in stats]
    floor = (float(normalizer.eps), float(normalizer.min_std) ** 2)
    run("standardize", *settings, *map(pointer, tables), *floor, *map(pointer, given), made.data_ptr())
    return Standard(*made.unbind())


def inject(noise: Noise, batch: Batch, dtype: torch.dtype) -> aten.NoiseTables:
    """`aten.inject`; what is drawn is pooled and injected at once."""
    m, k = _inject(noise, batch, dtype)
    return m, k


def blend(
    noise: Noise, batch: Batch, standard: Standard, weight: Tensor | None, bias: Tensor | None, each: int = 1
) -> tuple[aten.NoiseTables, Affine]:
    """`aten.blend`."""
    if standard.rstd.shape[0] != 1:  # statistics of their own for each sample
        return aten.blend(noise, batch, standard, weight, bias, each)
    m, k, scale, shift = _inject(noise, batch, standard.rstd.dtype, standard.center, weight, bias)
    return (m, k), Affine(standard.center, scale, shift)


def pull(
    normalizer: Normalizer,
    standard: Standard,
    var: Tensor,
    weight: Tensor | None,
    total: Tensor,
    moment: Tensor,
    noise: aten.NoiseTables,
    each: int = 1,
) -> tuple[Tensor, Tensor, Moments]:
    """`aten.pull`."""
    (batch_size, channels), rows, dtype = total.shape, var.shape[0], total.dtype
    g_mean, g_var = torch.empty(2, rows, channels, dtype=dtype).unbind()
    g_weight, g_bias = torch.empty(2, channels, dtype=dtype).unbind()
    given = (total, moment, *noise, standard.center, var.contiguous())
    settings = (DTYPES[dtype], threads(total.numel()), batch_size, channels, rows, each)
    floor = (float(normalizer.eps), float(normalizer.min_std) ** 2)
    made = (solid(weight, dtype), g_weight, g_bias, g_mean, g_var, None)
    run("pull", *settings, *map(pointer, given), *floor, *map(pointer, made))
    return g_weight, g_bias, Moments(g_mean, g_var)


def follow(
    mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
) -> None:
    """`aten.follow`."""
    buffers = [buffer for buffer in (mean, var) if buffer is not None]
    dtype = buffers[0].dtype if buffers else torch.float32
    plain = dtype in (torch.float32, torch.float64) and all(_is_plain(buffer, dtype) for buffer in buffers)
    if not plain or not (count is None or _is_plain(count, torch.int64)):
        aten.follow(mean, var, count, momentum, stats)
        return
    tables = [solid(table, torch.float64) for table in stats]
    factor = -1.0 if momentum is None else float(momentum)
    run("follow", DTYPES[dtype], stats.mean.shape[1], *map(pointer, (mean, var, count, *tables)), factor)
    torch.autograd.graph.increment_version(buffers if count is None else [*buffers, count])


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    kind = type(tensor)
    plain = tensor.is_cpu and (kind is Tensor or kind is torch.nn.Parameter)
    return plain and tensor.dtype == dtype and tensor.is_contiguous()


def _inject(
    noise: Noise, batch: Batch, dtype: torch.dtype, standard: Tensor | None = None, *parameters: Tensor | None
) -> Any:
    """m and k; with the first table of a normalizer's and its weight and bias also the scale and shift of x."""
    samples, channels = batch.moments.mean.shape
    if noise.indices is None:
        ghost = [table.to(dtype).contiguous() for table in noise.ghost(batch)]
        rows, drawn = ghost[0].shape[0], (0, 0, 0, 0, *(table.data_ptr() for table in ghost))
        sizes = (samples, channels, rows, 0)
    else:
        indices, around = noise.indices.to(torch.int64).contiguous(), batch.whole.mean.contiguous()
        rows, drawn = indices.shape[0], (*moment_pointers(batch.moments), indices.data_ptr(), around.data_ptr(), 0, 0)
        sizes = (samples, *(channels, *indices.shape))
    wanted = (noise.shift, noise.scale, *([True, True] if standard is not None else []))
    made = [torch.empty(rows, channels, dtype=dtype) if wants else None for wants in wanted]
    tables = [table.to(torch.float64).contiguous() for table in (noise.var(batch), noise.eps * batch.unit)]
    given = (*tables, standard, *(solid(parameter, dtype) for parameter in parameters))
    ends = (*given, *[None] * (5 - len(given)), *made, *[None] * (4 - len(made)))
    many = threads(rows * channels * max(sizes[-1], 1))
    settings = (DTYPES[batch.moments.mean.dtype], DTYPES[dtype], many, *sizes)
    run("inject", *settings, *drawn, int(noise.shift), int(noise.scale), *map(pointer, ends))
    return made


def pointer(tensor: Tensor | None) -> int:
    """Where a table begins; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def solid(table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A table, contiguous and in `dtype`."""
    if table is None or (table.dtype == dtype and table.is_contiguous()):
        return table
    return table.to(dtype).contiguous()


def _pool(moments: Moments, ghost_size: int | None, *, others: bool) -> Moments:
    batch_size, channels = moments.mean.shape
    count, starts = group_starts(batch_size, ghost_size)
    made = [torch.empty(batch_size if others else count, channels, dtype=torch.float64) for _ in range(2)]
    many = threads(batch_size * channels)
    settings = (DTYPES[moments.mean.dtype], int(others), many, count, starts, channels)
    run("pool", *settings, *moment_pointers(moments), *(table.data_ptr() for table in made))
    return Moments(*made)


@functools.lru_cache(maxsize=256)
def group_starts(batch_size: int, ghost_size: int | None) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """How many ghost batches there are, and their first samples, and the end."""
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return len(sizes), (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))


def moment_pointers(moments: Moments) -> tuple[int, int]:
    """Of tables as `moments` makes them; no pointer to the variance of a single position, which is 0."""
    return moments.mean.data_ptr(), 0 if 0 in moments.var.stride() else moments.var.data_ptr()

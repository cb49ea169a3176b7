"""The passes of `engine.aten` on CPUs, through the C++ library that is built at install.

The library has a C ABI and knows nothing of torch; it is called with data pointers, strides and torch's number of
threads. It takes tensors whose positions, or whose channels, are contiguous; others go to `aten`.
"""

import ctypes
import functools
import importlib.machinery
import math
import os
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine import aten
from ghostnoise.ghosts import Ramp, ghost_sizes
from ghostnoise.methods import Batch, Noise, Normalizer
from ghostnoise.moments import Affine, Moments, Standard, arithmetic_dtype

LEVELS = ("baseline", "avx2", "avx512")
GRAIN = 2**15  # elements, as for torch's own operators
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Library:
    """The loaded library, and which copy of its passes is in use."""

    def __init__(self, handle: ctypes.CDLL, level: str) -> None:
        self.handle, self.level = handle, level
        self.functions: dict[str, Any] = {}

    def run(self, name: str, *arguments: int | float | ctypes.Array[ctypes.c_int64]) -> None:
        """Run a pass. Pointers are given as integers."""
        function = self.functions.get(name)
        if function is None:
            function = self.functions[name] = getattr(self.handle, f"gn_{name}_{self.level}")
            function.argtypes = [_c_type(value) for value in arguments]
        if function(*arguments) != 0:
            raise RuntimeError(f"the native pass {name} was built without the dtype of code {arguments[0]}")


def _c_type(value: int | float | ctypes.Array[ctypes.c_int64]) -> Any:
    return {int: ctypes.c_int64, float: ctypes.c_double}.get(type(value), ctypes.c_void_p)


@functools.cache
def library() -> Library | str:
    """The library, or why there is none."""
    folder = Path(os.environ.get("GHOSTNOISE_NATIVE_FOLDER") or Path(__file__).parent)  # elsewhere: another build of it
    files = [path for suffix in importlib.machinery.EXTENSION_SUFFIXES for path in folder.glob(f"_native{suffix}")]
    if not files:
        return "the C++ library was not built; reinstall with a C++ compiler on the machine"
    try:
        handle = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return f"the C++ library does not load: {error}"
    return Library(handle, LEVELS[handle.gn_level()])


def missing() -> str | None:
    """Why this backend cannot run here, if so."""
    found = library()
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


def everyone(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.everyone`."""
    return _pool(moments, ghost_size, others=False)


def others(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.others`."""
    return _pool(moments, ghost_size, others=True)


def others_ramp(mean: Tensor, pooled: Tensor, gradient: Moments, ghost_size: int | None, spatial: int) -> Ramp:
    """`aten.others_ramp`, in the dtype of the gradient."""
    dtype = gradient.mean.dtype
    (count, starts), channels = _starts(mean.shape[0], ghost_size), mean.shape[1]
    made = torch.empty(3, *mean.shape, dtype=dtype).unbind()
    settings = (DTYPES[dtype], DTYPES[mean.dtype], _threads(mean.numel()), count, starts, channels, spatial)
    _library().run("others_ramp", *settings, *(table.data_ptr() for table in (mean, pooled, *gradient, *made)))
    return Ramp(*made)


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """`aten.draws`."""
    around, indices = around.contiguous(), indices.to(torch.int64).contiguous()
    batch_size, channels = moments.mean.shape
    made = [torch.empty(indices.shape[0], channels, dtype=dtype) for _ in range(2)]
    threads = _threads(indices.numel() * channels)
    sizes = (DTYPES[moments.mean.dtype], DTYPES[dtype], threads, batch_size, channels, *indices.shape)
    tables = (indices.data_ptr(), around.data_ptr(), *(table.data_ptr() for table in made))
    _library().run("draws", *sizes, *_moment_pointers(moments), *tables)
    return Moments(*made)


def standardize(
    normalizer: Normalizer, stats: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Standard:
    """`aten.standardize`; the five tables lie one after the other, as `blend` and `pull` take them."""
    made = torch.empty((5, *stats.mean.shape), dtype=dtype)
    given = (_parameter(weight, dtype), _parameter(bias, dtype))
    settings = (DTYPES[dtype], _threads(stats.mean.numel()), *stats.mean.shape)
    tables = [table.contiguous() for table in stats]
    floor = (float(normalizer.eps), float(normalizer.min_std) ** 2)
    _library().run("standardize", *settings, *map(_pointer, tables), *floor, *map(_pointer, given), made.data_ptr())
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
    settings = (DTYPES[dtype], _threads(total.numel()), batch_size, channels, rows, each)
    floor = (float(normalizer.eps), float(normalizer.min_std) ** 2)
    made = (_parameter(weight, dtype), g_weight, g_bias, g_mean, g_var)
    _library().run("pull", *settings, *map(_pointer, given), *floor, *map(_pointer, made))
    return g_weight, g_bias, Moments(g_mean, g_var)


def follow(
    mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
) -> None:
    """`aten.follow`."""
    buffers = [buffer for buffer in (mean, var) if buffer is not None]
    plain = all(_is_plain(buffer) and buffer.dtype in (torch.float32, torch.float64) for buffer in buffers)
    plain = plain and (count is None or (_is_plain(count) and count.dtype == torch.int64))
    if not plain or len({buffer.dtype for buffer in buffers}) > 1:
        aten.follow(mean, var, count, momentum, stats)
        return
    tables = [table.to(torch.float64).contiguous() for table in stats]
    settings = (DTYPES[buffers[0].dtype] if buffers else 0, stats.mean.shape[1])
    factor = -1.0 if momentum is None else float(momentum)
    _library().run("follow", *settings, *map(_pointer, (mean, var, count, *tables)), factor)
    torch.autograd.graph.increment_version([*buffers, *([] if count is None else [count])])


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous()


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
        rows, drawn = indices.shape[0], (*_moment_pointers(batch.moments), indices.data_ptr(), around.data_ptr(), 0, 0)
        sizes = (samples, *(channels, *indices.shape))
    wanted = (noise.shift, noise.scale, *([True, True] if standard is not None else []))
    made = [torch.empty(rows, channels, dtype=dtype) if wants else None for wants in wanted]
    tables = [table.to(torch.float64).contiguous() for table in (noise.var(batch), noise.eps * batch.unit)]
    given = (*tables, standard, *(_parameter(parameter, dtype) for parameter in parameters))
    ends = (*given, *[None] * (5 - len(given)), *made, *[None] * (4 - len(made)))
    threads = _threads(rows * channels * max(sizes[-1], 1))
    settings = (DTYPES[batch.moments.mean.dtype], DTYPES[dtype], threads, *sizes)
    _library().run("inject", *settings, *drawn, int(noise.shift), int(noise.scale), *map(_pointer, ends))
    return made


def _threads(elements: int) -> int:
    """Torch's number of threads; one for what is done before others have woken up."""
    return torch.get_num_threads() if elements >= GRAIN else 1


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if parameter is None or (parameter.dtype == dtype and parameter.is_contiguous()):
        return parameter
    return parameter.to(dtype).contiguous()


@functools.lru_cache(maxsize=64)
def _ones(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, channels, dtype=dtype)


def _pool(moments: Moments, ghost_size: int | None, *, others: bool) -> Moments:
    batch_size, channels = moments.mean.shape
    count, starts = _starts(batch_size, ghost_size)
    made = [torch.empty(batch_size if others else count, channels, dtype=torch.float64) for _ in range(2)]
    threads = _threads(batch_size * channels)
    settings = (DTYPES[moments.mean.dtype], int(others), threads, count, starts, channels)
    _library().run("pool", *settings, *_moment_pointers(moments), *(table.data_ptr() for table in made))
    return Moments(*made)


@functools.lru_cache(maxsize=256)
def _starts(batch_size: int, ghost_size: int | None) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """How many ghost batches there are, and their first samples, and the end."""
    sizes = ghost_sizes(batch_size, ghost_size or batch_size)
    return len(sizes), (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))


def _moment_pointers(moments: Moments) -> tuple[int, int]:
    """Of tables as `moments` makes them; no pointer to the variance of a single position, which is 0."""
    return moments.mean.data_ptr(), 0 if 0 in moments.var.stride() else moments.var.data_ptr()


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
    _library().run(name, DTYPES[x.dtype], int(plan.last), _threads(x.numel()), *shape, *given)


def _library() -> Library:
    found = library()
    assert isinstance(found, Library)
    return found

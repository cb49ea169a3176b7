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
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine import aten
from ghostnoise.ghosts import ghost_sizes
from ghostnoise.moments import Moments, arithmetic_dtype

LEVELS = ("baseline", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Library(NamedTuple):
    """The loaded library, and which copy of its passes is in use."""

    handle: ctypes.CDLL
    level: str

    def run(self, name: str, *arguments: int | ctypes.Array[ctypes.c_int64]) -> None:
        """Run a pass. Pointers are given as integers, shapes and strides as arrays."""
        function = getattr(self.handle, f"gn_{name}_{self.level}")
        if function.argtypes is None:
            function.argtypes = [ctypes.c_int64 if isinstance(value, int) else ctypes.c_void_p for value in arguments]
        if function(*arguments) != 0:
            raise RuntimeError(f"the native pass {name} was built without the dtype of code {arguments[0]}")


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
    _run("moments", x, plan, _at(x, plan), (mean.data_ptr(), var.data_ptr()))
    return Moments(mean, var)


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`aten.transform`."""
    plan, y = _planned(x), torch.empty_like(x)
    tables = [_row_contiguous(table) for table in (center, scale, shift)]
    _run("transform", x, plan, _at(x, plan), *map(_table, tables), _at(y, _planned(y, plan)))
    return y


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """`aten.gradient_sums`."""
    plan = _planned(x)
    dy, center = _aligned(dy, x, plan), _row_contiguous(center)
    total, moment = (torch.empty(x.shape[:2], dtype=center.dtype) for _ in range(2))
    given = (_at(dy, _planned(dy, plan)), _at(x, plan), _table(center))
    _run("gradient_sums", x, plan, *given, (total.data_ptr(), moment.data_ptr()))
    return total, moment


def input_gradient(dy: Tensor, x: Tensor, scale: Tensor, center: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """`aten.input_gradient`."""
    plan, dx = _planned(x), torch.empty_like(x)
    dy = _aligned(dy, x, plan)
    tables = [_row_contiguous(table) for table in (scale, center, slope, offset)]
    given = (_at(dy, _planned(dy, plan)), _at(x, plan), *map(_table, tables))
    _run("input_gradient", x, plan, *given, _at(dx, _planned(dx, plan)))
    return dx


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`aten.scale_gradient`."""
    if refuses(dy):
        dy = dy.contiguous()
    plan, dx, scale = _planned(dy), torch.empty_like(dy), _row_contiguous(scale)
    _run("scale_gradient", dy, plan, _at(dy, plan), _table(scale), _at(dx, _planned(dx, plan)))
    return dx


def everyone(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.everyone`."""
    sizes = ghost_sizes(moments.mean.shape[0], ghost_size or moments.mean.shape[0])
    return _pool(moments, sizes, others=False, rows=len(sizes))


def others(moments: Moments, ghost_size: int | None) -> Moments:
    """`aten.others`."""
    sizes = ghost_sizes(moments.mean.shape[0], ghost_size or moments.mean.shape[0])
    return _pool(moments, sizes, others=True, rows=moments.mean.shape[0])


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """`aten.draws`."""
    around, indices = around.contiguous(), indices.to(torch.int64).contiguous()
    batch_size, channels = moments.mean.shape
    made = [torch.empty(indices.shape[0], channels, dtype=dtype) for _ in range(2)]
    sizes = (DTYPES[moments.mean.dtype], DTYPES[dtype], torch.get_num_threads(), batch_size, channels, *indices.shape)
    tables = (indices.data_ptr(), around.data_ptr(), *(table.data_ptr() for table in made))
    _library().run("draws", *sizes, *_moment_pointers(moments), *tables)
    return Moments(*made)


def blend(
    m: Tensor, k: Tensor, rstd: Tensor, factor: Tensor, rest: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.blend`."""
    if rstd.shape[0] != 1:  # statistics of their own for each sample
        return aten.blend(m, k, rstd, factor, rest, weight, bias)
    batch_size, channels = max(m.shape[0], k.shape[0]), rstd.shape[1]
    m, k = (table.expand(-1, channels).contiguous() for table in (m, k))
    rows = [row.to(m.dtype).expand(1, channels).contiguous() for row in (rstd, factor, rest, weight, bias)]
    made = [torch.empty(batch_size, channels, dtype=m.dtype) for _ in range(3)]
    settings = (DTYPES[m.dtype], torch.get_num_threads(), batch_size, channels, *_one_or_all(m), *_one_or_all(k))
    _library().run("blend", *settings, *(table.data_ptr() for table in (*rows, *made)))
    return made[0], made[1], made[2]


def noise_sums(total: Tensor, moment: Tensor, m: Tensor, k: Tensor) -> Tensor:
    """`aten.noise_sums`."""
    batch_size, channels = total.shape
    made = torch.empty(4, channels, dtype=torch.float64)
    m, k = (table.expand(-1, channels).contiguous() for table in (m, k))
    settings = (DTYPES[total.dtype], torch.get_num_threads(), batch_size, channels)
    tables = (total.data_ptr(), moment.data_ptr(), *_one_or_all(m), *_one_or_all(k), made.data_ptr())
    _library().run("noise_sums", *settings, *tables)
    return made


def _one_or_all(table: Tensor) -> tuple[int, int]:
    """The pointer to a contiguous table, and its stride over samples: 0 where one row serves all."""
    return table.data_ptr(), table.shape[1] if table.shape[0] > 1 else 0


def _pool(moments: Moments, sizes: list[int], *, others: bool, rows: int) -> Moments:
    channels = moments.mean.shape[1]
    made = [torch.empty(rows, channels, dtype=torch.float64) for _ in range(2)]
    starts = (ctypes.c_int64 * (len(sizes) + 1))(*accumulate(sizes, initial=0))
    settings = (DTYPES[moments.mean.dtype], int(others), torch.get_num_threads(), len(sizes), starts, channels)
    _library().run("pool", *settings, *_moment_pointers(moments), *(table.data_ptr() for table in made))
    return Moments(*made)


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


def _row_contiguous(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous()


def _at(x: Tensor, plan: _Plan) -> tuple[int | ctypes.Array[ctypes.c_int64], ...]:
    return x.data_ptr(), (ctypes.c_int64 * 2)(plan.batch_stride, plan.inner_stride)


def _table(table: Tensor) -> tuple[int, int]:
    return table.data_ptr(), table.stride(0)


def _run(name: str, x: Tensor, plan: _Plan, *given: tuple[int | ctypes.Array[ctypes.c_int64], ...]) -> None:
    shape = (ctypes.c_int64 * 3)(*x.shape[:2], math.prod(x.shape[2:]))
    settings = (DTYPES[x.dtype], int(plan.last), torch.get_num_threads(), shape)
    _library().run(name, *settings, *(value for group in given for value in group))


def _library() -> Library:
    found = library()
    assert isinstance(found, Library)
    return found

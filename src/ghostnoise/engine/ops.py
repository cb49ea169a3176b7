"""The operators of namespace `ghostnoise`: everything that is computed on x, defined once; the dispatcher selects.

| dispatch key | the four passes | fused |
| --- | --- | --- |
| CPU | C++ on torch's stable ABI (`native/`), if it was built | C++ |
| CUDA | Triton (`triton/`), if it is installed | Triton |
| CompositeExplicitAutograd | plain PyTorch, below: every other device | none: the general level serves |

x has shape (B, C, *spatial) in any strides; S is the number of positions. Tables have shape (1, C) or (B, C), in
float64 where the device has it. The center is rounded to the arithmetic of x; the shift compensates for the rounding.

    moments           mean = Σ x / S        var = Σ (x - mean)² / S; if S is 1, zeros that share their memory
    transform         y = scale·(x - center) + shift
    gradient_sums     Σ dy                  Σ dy·(x - center)
    input_gradient    dx = scale·dy + slope·(x - center) + offset

`normalize`, `normalize_backward` and `ghost_noise` are whole methods in one call; `engine.fused` calls them. `stats`
has the means and variances (2, R, C) of the R pools, or of the samples, with R = 0 where these are x itself. `extra`
has the noise, shift and scale as far as there are any (0 to 2, B, C), or r and d of Batch Renormalization (2, 1, C).
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghostnoise.tables import table_dtype

LIBRARY = torch.library.Library("ghostnoise", "DEF")
# Inductor runs convolutions on CPUs in channels_last. The operators take their results as they are.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_SCHEMAS = (
    "moments(Tensor x) -> (Tensor mean, Tensor var)",
    "transform(Tensor x, Tensor center, Tensor scale, Tensor shift) -> Tensor",
    "gradient_sums(Tensor dy, Tensor x, Tensor center) -> (Tensor total, Tensor moment)",
    "input_gradient(Tensor dy, Tensor x, Tensor scale, Tensor center, Tensor slope, Tensor offset) -> Tensor",
    "normalize(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, str running, int? ghost_size, bool exclusive, float eps, "
    "float min_std, Tensor? indices, Tensor? seed, Tensor? law, Tensor? quantiles, float noise_eps, bool shift, "
    "bool scale, Tensor? reference_mean, Tensor? reference_var, Tensor? reference_count, float? r_max, float d_max, "
    "int warmup_steps, int transition_steps) -> (Tensor y, Tensor stats, Tensor extra)",
    "normalize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor stats, Tensor extra, int? ghost_size, "
    "bool exclusive, float eps, float min_std, bool shift, bool scale, bool needs_x) -> "
    "(Tensor dx, Tensor g_weight, Tensor g_bias)",
    "ghost_noise(Tensor x, Tensor indices, float noise_eps, bool shift, bool scale) -> (Tensor y, Tensor factor)",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=_TAGS)

moments = torch.ops.ghostnoise.moments.default
transform = torch.ops.ghostnoise.transform.default
gradient_sums = torch.ops.ghostnoise.gradient_sums.default
input_gradient = torch.ops.ghostnoise.input_gradient.default
normalize = torch.ops.ghostnoise.normalize.default
normalize_backward = torch.ops.ghostnoise.normalize_backward.default
ghost_noise = torch.ops.ghostnoise.ghost_noise.default


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which elements of x are computed: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def positions(x: Tensor) -> int:
    """Return the number of spatial positions S of (B, C, *spatial)."""
    count = 1
    for size in x.shape[2:]:
        count *= size
    return count


# Plain PyTorch: the passes as differentiable functions, which are also the form that torch itself transforms.


def measure(x: Tensor) -> tuple[Tensor, Tensor]:
    """Measure per-sample moments (B, C), differentiable, in two passes: a sum of raw squares would cancel."""
    table = table_dtype(x.device)
    if positions(x) == 1:
        mean = x.flatten(1).to(table)
        return mean, no_variance(mean)
    spatial = tuple(range(2, x.ndim))
    x = x.to(arithmetic_dtype(x))
    rough = x.detach().mean(spatial, keepdim=True)  # any offset near the mean: the result does not depend on it
    d = x - rough
    rest = d.mean(spatial).to(table)
    var = d.square().mean(spatial).to(table) - rest.square()
    return rough.flatten(1).to(table) + rest, var.clamp_min(0)


def no_variance(mean: Tensor) -> Tensor:
    """Return a table of zeros like `mean`, which share their memory."""
    return torch.zeros((), dtype=mean.dtype, device=mean.device).expand(mean.shape)


def apply(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `scale * (x - center) + shift` in the arithmetic of x, differentiable."""
    dtype = arithmetic_dtype(x)
    rounded = center.detach().to(dtype)
    shift = shift + scale * (rounded - center)
    scale, shift, rounded = (like(table.to(dtype), x) for table in (scale, shift, rounded))
    return (scale * (x.to(dtype) - rounded) + shift).to(x.dtype)


def linear(dy: Tensor, x: Tensor, scale: Tensor, center: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Compute `scale * dy + slope * (x - center) + offset` in the arithmetic of x, differentiable."""
    dtype = arithmetic_dtype(x)
    rounded = center.detach().to(dtype)
    offset = offset + slope * (rounded - center)
    scale, slope, offset, rounded = (like(table.to(dtype), x) for table in (scale, slope, offset, rounded))
    return (scale * dy.to(dtype) + (slope * (x.to(dtype) - rounded) + offset)).to(x.dtype)


def sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sum dy and dy·(x - center) over the positions of each sample (B, C), differentiable."""
    table, dtype = table_dtype(x.device), arithmetic_dtype(x)
    rounded = center.detach().to(dtype)
    dy, d = dy.to(dtype), x.to(dtype) - like(rounded, x)
    total, moment = (t if x.ndim == 2 else t.sum(tuple(range(2, x.ndim))) for t in (dy, dy * d))
    total, moment = total.to(table), moment.to(table)
    return total, moment + (rounded - center) * total


def like(table: Tensor, x: Tensor) -> Tensor:
    """View a table with the number of dimensions of x."""
    return table[(...,) + (None,) * (x.ndim - 2)]


# The passes treat samples independently, so they run over slices of the batch: apart from the result, only a slice is
# materialized. On a CPU, a slice stays in a core's cache from one step of a pass to the next.
SLICE_ON_CPU, SLICE = 2**18, 2**24


def _slices(x: Tensor) -> Iterator[slice]:
    rows = max((SLICE_ON_CPU if x.device.type == "cpu" else SLICE) // max(x[:1].numel(), 1), 1)
    return (slice(start, start + rows) for start in range(0, max(x.shape[0], 1), rows))


def _in_slices(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Concatenate the tables that `run` returns for slices of the batch; a table with one row serves all of them."""
    x = tensors[0]
    parts = [run(*(t[rows] if t.shape[0] == x.shape[0] else t for t in tensors)) for rows in _slices(x)]
    return tuple(torch.cat(tables) for tables in zip(*parts, strict=True))


def _fill(run: Callable[..., Tensor], out: Tensor, *tensors: Tensor) -> Tensor:
    """Fill `out` by running `run` on slices of the batch; a table with one row serves all of them."""
    for rows in _slices(out):
        out[rows] = run(*(t[rows] if t.shape[0] == out.shape[0] else t for t in tensors))
    return out


def _plain_moments(x: Tensor) -> tuple[Tensor, ...]:
    if positions(x) == 1:
        mean = x.flatten(1).to(table_dtype(x.device), copy=True, memory_format=torch.contiguous_format)
        return mean, no_variance(mean)
    return _in_slices(measure, x)


def _plain_input_gradient(dy: Tensor, x: Tensor, *tables: Tensor) -> Tensor:
    return _fill(linear, torch.empty_like(x), dy, x, *tables)


for _name, _run in {
    "moments": _plain_moments,
    "transform": lambda x, *tables: _fill(apply, torch.empty_like(x), x, *tables),
    "gradient_sums": functools.partial(_in_slices, sums),
    "input_gradient": _plain_input_gradient,
}.items():
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")


# What the operators return, for fake and meta tensors.


def _check_devices(x: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != x.device:
            raise RuntimeError(f"an input on {x.device} and a tensor on {other.device}: must be on the same device")


def _fake_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.new_empty(x.shape[:2], dtype=table_dtype(x.device))
    return mean, mean.new_empty(()).expand(mean.shape) if positions(x) == 1 else torch.empty_like(mean)


def _fake_tables(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    _check_devices(x, *others)
    mean, var = (x.new_empty(x.shape[:2], dtype=table_dtype(x.device)) for _ in range(2))
    return mean, var


def _fake_like_x(x: Tensor, *others: Tensor) -> Tensor:
    _check_devices(x, *others)
    return torch.empty_like(x)


def _fake_like_second(dy: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    return _fake_like_x(x, dy, *others)


def _fake_normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    buffers, ghost_size, exclusive, indices, seed = rest[:3], rest[5], rest[6], rest[9], rest[10]
    shift, scale, r_max = rest[14], rest[15], rest[19]
    _check_devices(x, weight, bias, *buffers, indices, seed)
    (batch_size, channels), wide, dtype = x.shape[:2], table_dtype(x.device), arithmetic_dtype(x)
    rows = max(batch_size // ghost_size, 1) if ghost_size is not None else 1
    if exclusive:
        rows = batch_size if positions(x) > 1 else 0
    extra = (shift + scale, batch_size) if r_max is None else (2, 1)
    stats = x.new_empty((2, rows, channels), dtype=wide)
    return torch.empty_like(x), stats, x.new_empty((*extra, channels), dtype=dtype)


def _fake_normalize_backward(dy: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _check_devices(x, dy, weight, *rest[:2])
    gradients = (x.new_empty(x.shape[1], dtype=arithmetic_dtype(x)) for _ in range(2))
    return torch.empty_like(x) if rest[-1] else x.new_empty(0), *gradients


def _fake_ghost_noise(x: Tensor, indices: Tensor, eps: float, shift: bool, scale: bool) -> tuple[Tensor, Tensor]:
    _check_devices(x, indices)
    rows = x.shape[0] if scale else 0
    return torch.empty_like(x), x.new_empty((rows, x.shape[1]), dtype=arithmetic_dtype(x))


_fakes: dict[str, Callable[..., Any]] = {
    "moments": _fake_moments,
    "transform": _fake_like_x,
    "gradient_sums": _fake_tables,
    "input_gradient": _fake_like_second,
    "normalize": _fake_normalize,
    "normalize_backward": _fake_normalize_backward,
    "ghost_noise": _fake_ghost_noise,
}
for _name, _fake in _fakes.items():
    torch.library.register_fake(f"ghostnoise::{_name}", _fake, lib=LIBRARY)


# The compiled forms. Set GHOSTNOISE_NATIVE=0 to run plain PyTorch on CPUs.

_FILE = Path(__file__).parent / "native" / ("_library" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so"))


def _load_native() -> str | None:
    """Load the C++ library; return why it cannot be used, or None."""
    if os.environ.get("GHOSTNOISE_NATIVE") == "0":
        return "disabled by GHOSTNOISE_NATIVE=0"
    path = Path(os.environ.get("GHOSTNOISE_NATIVE_FOLDER") or _FILE.parent) / _FILE.name  # elsewhere: another build
    if not path.is_file():
        return "the C++ library was not built; install a wheel, or reinstall with a C++ compiler on the machine"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = f"the C++ library does not load: {error}; reinstall ghostnoise to build it for this torch"
        warnings.warn(f"ghostnoise runs in plain PyTorch: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


def _load_triton() -> str | None:
    """Register the Triton kernels; return why they cannot be used, or None."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA or ROCm device"
    from ghostnoise.engine import triton

    reason = triton.unavailable()
    if reason is None:
        triton.register(LIBRARY)
    return reason


# Why the fused operators of a type of device cannot be used, or None.
MISSING: dict[str, str | None] = {"cpu": _load_native(), "cuda": _load_triton()}

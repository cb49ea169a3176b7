"""The passes in plain PyTorch, for any device and floating dtype: the reference that other backends must equal.

x is (B, C, *spatial) with one spatial dimension or more, in any strides; S is the number of positions. All passes
treat samples independently, so they run over slices of the batch: what is materialised beside the result is a slice.

Forward, with `center` rounded to the dtype of the arithmetic and the rest of it moved into `shift`:

    mean = Σ x / S        var = Σ (x - mean)² / S        y = scale·(x - center) + shift

Backward, given the gradient dy and, from differentiating the decision, g_mean and g_var:

    dshift = Σ dy         dscale = Σ dy·(x - center)     dcenter = -scale·Σ dy
    dx = scale·dy + P·(x - mean) + Q                     P = 2·g_var/S,  Q = g_mean/S

The last is around the sample's own mean: around a center that is far from it, P·(x - center) and Q would cancel.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ghostnoise.moments import Affine, Moments, table_dtype

# Elements of x in a slice: on a CPU, few enough to stay in a core's cache from one step of a pass to the next.
SLICE_ON_CPU = 2**18
SLICE = 2**24


def measure(x: Tensor) -> Moments:
    """Per-sample moments (B, C), differentiable; two passes, and no sum of raw squares, which would cancel."""
    positions = tuple(range(2, x.ndim))
    x = x.to(_arithmetic(x))
    rough = x.detach().mean(positions, keepdim=True)  # any offset near the mean: the result does not depend on it
    d = x - rough
    table = table_dtype(x.device)
    rest = d.mean(positions).to(table)
    var = d.square().mean(positions).to(table) - rest.square()
    return Moments(rough.flatten(1).to(table) + rest, var.clamp_min(0))


def apply(x: Tensor, affine: Affine) -> Tensor:
    """`scale * (x - center) + shift` in the dtype of the arithmetic, differentiable."""
    center, scale, shift = (_beside(table, x) for table in recenter(affine, _arithmetic(x)))
    return torch.addcmul(shift, x - center, scale)


def rescale(dy: Tensor, scale: Tensor) -> Tensor:
    """scale·dy in the dtype of the arithmetic, differentiable."""
    return dy * _beside(scale.to(_arithmetic(dy)), dy)


def recenter(affine: Affine, dtype: torch.dtype) -> Affine:
    """The same transformation in `dtype`: what rounding takes from the center goes into the shift."""
    center = affine.center.to(dtype)
    shift = affine.shift + affine.scale * (center.to(affine.center.dtype) - affine.center)
    return Affine(center, affine.scale.to(dtype), shift.to(dtype))


def moments(x: Tensor) -> Moments:
    """`measure`, a slice at a time."""
    return Moments(*_tables(measure, x))


def transform(x: Tensor, affine: Affine) -> Tensor:
    """`apply`, a slice at a time, into a tensor of x's memory format."""
    return _fill(x, lambda x, *tables: apply(x, Affine(*tables)), x, *affine)


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Σ dy and Σ dy·(x - center) over the positions of each sample (B, C)."""
    positions = tuple(range(2, x.ndim))

    def sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        dtype, table = _arithmetic(x), table_dtype(x.device)
        dy = dy.to(dtype)
        product = (x - _beside(center.to(dtype), x)).mul_(dy)
        total, moment = dy.sum(positions).to(table), product.sum(positions).to(table)
        return total, moment + (center.to(dtype).to(table) - center) * total

    total, moment = _tables(sums, dy, x, center)
    return total, moment


def input_gradient(dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, g_mean: Tensor, g_var: Tensor) -> Tensor:
    """The gradient of x through y and through the moments (the last formula above)."""
    positions = x[0, 0].numel()

    def gradient(dy: Tensor, x: Tensor, scale: Tensor, *through_moments: Tensor) -> Tensor:
        return apply(x, Affine(*through_moments)).addcmul_(dy, _beside(scale.to(_arithmetic(x)), x))

    return _fill(x, gradient, dy, x, scale, mean, g_var * (2 / positions), g_mean / positions)


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`rescale`, a slice at a time: the gradient of x where the decision is constant."""
    return _fill(dy, rescale, dy, scale)


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _beside(table: Tensor, x: Tensor) -> Tensor:
    """A (B, C) table with x's number of dimensions."""
    return table[(...,) + (None,) * (x.ndim - 2)]


def _slices(x: Tensor) -> Iterator[slice]:
    sample = max(x[:1].numel(), 1)
    rows = max((SLICE_ON_CPU if x.device.type == "cpu" else SLICE) // sample, 1)
    return (slice(start, start + rows) for start in range(0, max(x.shape[0], 1), rows))


def _tables(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tables of the whole batch from `run` on slices of it."""
    parts = [run(*(tensor[rows] for tensor in tensors)) for rows in _slices(tensors[0])]
    return tuple(torch.cat(tables) for tables in zip(*parts, strict=True))


def _fill(like: Tensor, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A tensor like `like`, from `run` on slices of the batch."""
    out = torch.empty_like(like)
    for rows in _slices(like):
        out[rows] = run(*(tensor[rows] for tensor in tensors))
    return out

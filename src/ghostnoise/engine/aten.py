"""The passes in plain PyTorch, for any device and floating dtype: the reference that other backends must equal.

x is (B, C, *spatial) with one spatial dimension or more, in any strides; S is the number of positions. Tables are
(B, C) in the dtype of the arithmetic, moments in float64. All passes treat samples independently, so they run over
slices of the batch: what is materialised beside the result is a slice.

    moments           mean = Σ x / S        var = Σ (x - mean)² / S
    transform         y = scale·(x - center) + shift
    gradient_sums     Σ dy                  Σ dy·(x - center)
    input_gradient    dx = scale·dy + slope·(x - center) + offset
    scale_gradient    dx = scale·dy
    everyone, others  the moments of ghost batches, and of the others in them (`ghosts`)
    draws             the moments of the samples drawn for each sample
    blend, noise_sums what noise adds to the decision, and to its gradient
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ghostnoise import ghosts
from ghostnoise.moments import Moments, arithmetic_dtype, table_dtype

# Elements of x in a slice: on a CPU, few enough to stay in a core's cache from one step of a pass to the next.
SLICE_ON_CPU = 2**18
SLICE = 2**24


def measure(x: Tensor) -> Moments:
    """Per-sample moments (B, C), differentiable; two passes, and no sum of raw squares, which would cancel."""
    positions = tuple(range(2, x.ndim))
    x = x.to(arithmetic_dtype(x))
    rough = x.detach().mean(positions, keepdim=True)  # any offset near the mean: the result does not depend on it
    d = x - rough
    table = table_dtype(x.device)
    rest = d.mean(positions).to(table)
    var = d.square().mean(positions).to(table) - rest.square()
    return Moments(rough.flatten(1).to(table) + rest, var.clamp_min(0))


def apply(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale * (x - center) + shift` in the dtype of the arithmetic, differentiable."""
    return torch.addcmul(_beside(shift, x), x - _beside(center, x), _beside(scale, x))


def rescale(dy: Tensor, scale: Tensor) -> Tensor:
    """scale·dy in the dtype of the arithmetic, differentiable."""
    return dy * _beside(scale, dy)


def moments(x: Tensor) -> Moments:
    """`measure`, a slice at a time."""
    return Moments(*_tables(measure, x))


def transform(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`apply`, a slice at a time, into a tensor of x's memory format."""
    return _fill(x, apply, x, center, scale, shift)


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Σ dy and Σ dy·(x - center) over the positions of each sample (B, C)."""
    positions = tuple(range(2, x.ndim))

    def sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        dy = dy.to(center.dtype)
        return dy.sum(positions), (x - _beside(center, x)).mul_(dy).sum(positions)

    total, moment = _tables(sums, dy, x, center)
    return total, moment


def input_gradient(dy: Tensor, x: Tensor, scale: Tensor, center: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """The gradient of x: through y, and through the statistics."""

    def gradient(dy: Tensor, x: Tensor, scale: Tensor, *ramp: Tensor) -> Tensor:
        return apply(x, *ramp).addcmul_(dy, _beside(scale, x))

    return _fill(x, gradient, dy, x, scale, center, slope, offset)


def scale_gradient(dy: Tensor, scale: Tensor) -> Tensor:
    """`rescale`, a slice at a time: the gradient of x where nothing else depends on it."""
    return _fill(dy, rescale, dy, scale)


def everyone(moments: Moments, ghost_size: int | None) -> Moments:
    """The moments of each ghost batch (G, C)."""
    return ghosts.GhostBatch(ghost_size).pool(moments)


def others(moments: Moments, ghost_size: int | None) -> Moments:
    """The moments of the others in each sample's ghost batch (B, C)."""
    return ghosts.Others(ghost_size).pool(moments)


def draws(moments: Moments, around: Tensor, indices: Tensor, dtype: torch.dtype) -> Moments:
    """The moments of the samples in each row of `indices` (B, N), the mean `around` a (1, C) one; in `dtype`."""
    mean, var = ghosts.draws(moments, around, indices)
    return Moments(mean.to(dtype), var.to(dtype))


def blend(
    m: Tensor, k: Tensor, rstd: Tensor, factor: Tensor, rest: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The shift m of noise on the normalized x, and the scale and shift of x with it, differentiable.

    m·rstd        k·factor        bias - weight·k·(m·rstd - rest)
    """
    m = m * rstd
    return m, k * factor, bias - weight * k * (m - rest)


def noise_sums(total: Tensor, moment: Tensor, m: Tensor, k: Tensor) -> Tensor:
    """Σ a, Σ k·a, Σ k·d and Σ k·m·a over the samples, for a = total and d = moment: (4, C)."""
    noisy = total * k
    sums = (total, noisy, moment * k, noisy * m)
    return torch.stack([table.sum(0, dtype=table_dtype(table.device)) for table in sums])


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

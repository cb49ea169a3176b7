"""The general level: any function of moments, as an autograd function around four passes over x.

A method is `decide(moments, *parameters) -> Affine`, tables of shape (B, C) or broadcastable to it, and

    y = scale·(x - center) + shift

Autograd differentiates `decide` on the tables. With the sums a = Σ dy and d = Σ dy·(x - center) over the positions of
each sample, the tables of the map have the gradients

    dcenter = -scale·a        dscale = d        dshift = a

and from the gradients of the sample's own moments, which autograd returns,

    dx = scale·dy + 2/S·dvar·(x - mean) + dmean/S

So every method costs the memory traffic of batch norm: two reads and one write of x forward (`moments`, `transform`),
four reads and one write backward (`gradient_sums`, `input_gradient`). What a method holds constant, it detaches. If
nothing in the map depends on x or the parameters, as in noise alone, x is not saved.

The same map runs in three forms. *Eager* is the autograd function around the passes. `torch.compile` traces `decide`
between two of them, or on CUDA plain PyTorch, which Inductor fuses with what stands around. Whatever torch itself
transforms (`torch.func`, forward mode, second derivatives, batched gradients, export) runs in plain PyTorch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ghostnoise.engine import masks, ops
from ghostnoise.engine.masks import Valid
from ghostnoise.engine.ranks import Extent, Ranks, uncompiled
from ghostnoise.tables import Affine, Moments, table_dtype
from ghostnoise.torch_private import eager_apply, has_saved_tensor_hooks, is_exporting, needs_operators

Decide: TypeAlias = Callable[..., Affine]


def run(
    input: Tensor, decide: Decide, parameters: tuple[Tensor | None, ...], extent: Extent, channel_dim: int = 1
) -> tuple[Tensor, Moments]:
    """Apply the map that `decide` returns; also return the moments of all samples of the batch, as constants."""
    if extent.ranks is not None and torch.compiler.is_compiling():
        made: tuple[Tensor, Moments] = uncompiled(_run, input, decide, parameters, extent, channel_dim)
        return made
    return _run(input, decide, parameters, extent, channel_dim)


def _run(
    input: Tensor, decide: Decide, parameters: tuple[Tensor | None, ...], extent: Extent, channel_dim: int
) -> tuple[Tensor, Moments]:
    x = input if channel_dim == 1 else input.movedim(channel_dim, 1)
    mask, valid = extent.mask, None
    if mask is not None:
        x, valid = masks.fill(x, mask)
    call = Call(decide, ops.positions(x), valid, extent.ranks, extent.counts)
    if torch.compiler.is_compiling() and x.device.type == "cpu" and not is_exporting():
        affine = call.tables(_Measure.apply(x), parameters)
        y = _Transform.apply(x, *affine)
    elif torch.compiler.is_compiling() or needs_operators(x, *parameters):
        if extent.ranks is not None:
            raise RuntimeError(
                "process_group with torch.func, forward-mode AD or export: ranks exchange tables only in eager forward "
                "and backward passes; leave process_group out for the statistics of this process alone"
            )
        y = call.plain(x, parameters)
    elif torch.is_grad_enabled():
        y = _apply(x, call, *parameters)
    else:
        y = ops.transform(x, *call.tables(ops.moments(x), parameters))
    if mask is not None:
        y = masks.zero(y, mask)
    return y if channel_dim == 1 else y.movedim(1, channel_dim), call.moments.detach()


def measure(input: Tensor, channel_dim: int = 1, mask: Tensor | None = None) -> Moments:
    """Measure the moments of each sample (B, C), as constants."""
    x = input.detach() if channel_dim == 1 else input.detach().movedim(channel_dim, 1)
    if mask is None:
        mean, var = ops.moments(x)
        return Moments(mean, var, ops.positions(x))
    x, valid = masks.fill(x, mask)
    mean, var = ops.moments(x)
    return valid.moments(Moments(mean, var, ops.positions(x)))


class Call:
    """A call of `run`: what `decide` is given besides x, and the moments that it was given."""

    def __init__(
        self, decide: Decide, positions: int, valid: Valid | None = None, ranks: Ranks | None = None,
        counts: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.decide, self.positions, self.valid, self.ranks, self.counts = decide, positions, valid, ranks, counts
        self.moments: Moments

    def tables(
        self, moments: tuple[Tensor, Tensor], parameters: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decide on center, scale and shift from the moments of the samples of x, differentiable."""
        m, dtype = Moments(moments[0], moments[1], self.positions), moments[0].dtype
        if self.valid is not None:
            m = self.valid.moments(m)
        if self.ranks is not None:
            m = self.ranks.gather(m, self.counts)
        self.moments = m
        affine = self.decide(m, *(None if each is None else each.to(dtype) for each in parameters)).as_tables(m.mean)
        return affine if self.ranks is None else tuple(self.ranks.own(table) for table in affine)

    def plain(self, x: Tensor, parameters: tuple[Tensor | None, ...]) -> Tensor:
        """Run in plain differentiable PyTorch."""
        # Converted once: the gradients of all uses of x are then summed before they are rounded to its dtype.
        wide = x.to(ops.arithmetic_dtype(x))
        return ops.apply(wide, *self.tables(ops.measure(wide), parameters)).to(x.dtype)


class _Flex(torch.autograd.Function):
    """The eager form: autograd differentiates the tables, and four passes over x do the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor | None) -> Tensor:
        (mean, var), dtype, needs_x = ops.moments(x), table_dtype(x.device), x.requires_grad
        with torch.enable_grad(), _without_hooks():
            # The variance of a single position is 0.
            own = mean.requires_grad_(needs_x), var.requires_grad_(needs_x and call.positions > 1)
            given = [None if p is None else p.detach().to(dtype).requires_grad_(p.requires_grad) for p in parameters]
            tables = call.tables(own, tuple(given))
        constant = not any(table.requires_grad for table in tables)
        ctx.call, ctx.tables, ctx.leaves, ctx.constant = call, tables, [*own, *given], constant
        saved = (None,) * (1 + len(parameters)) if constant else (x, *parameters)
        ctx.save_for_backward(*saved)
        y: Tensor = ops.transform(x, *tables)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        x, parameters = saved[0], saved[1:]
        center, scale, shift = ctx.tables
        plain = torch.is_grad_enabled() or needs_operators(dy)
        if ctx.constant:
            zero = torch.zeros_like(scale[:1])
            return (ops.apply if plain else ops.transform)(dy, zero, scale, zero), None, *(None for _ in parameters)
        if plain:
            dx, *own = second_derivative(ctx.call, x, parameters, dy)
            return dx, None, *own
        total, moment = ops.gradient_sums(dy, x, center)
        found: list[tuple[Tensor, Tensor]] = []
        if scale.requires_grad:
            found.append((scale, _summed(moment, scale)))
        if shift.requires_grad:
            found.append((shift, _summed(total, shift)))
        if center.requires_grad:
            if center.shape[0] == 1 == scale.shape[0]:
                total = _summed(total, center)
            found.append((center, _summed((scale * total).neg_(), center)))
        leaves = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
        outputs, gradients = zip(*found, strict=True)
        made = iter(torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True))
        by_leaf = [next(made) if leaf is not None and leaf.requires_grad else None for leaf in ctx.leaves]
        g_mean, g_var, *rest = by_leaf
        dx = _input_gradient(dy, x, scale, ctx.leaves[0], g_mean, g_var) if ctx.needs_input_grad[0] else None
        pairs = zip(rest, parameters, strict=True)
        return dx, None, *(None if g is None or p is None else g.to(p.dtype) for g, p in pairs)


def _summed(gradient: Tensor, table: Tensor) -> Tensor:
    """Sum the gradient of the samples of a table to its number of rows."""
    return gradient if gradient.shape == table.shape else gradient.sum(0, keepdim=True)


def _input_gradient(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, g_mean: Tensor | None, g_var: Tensor | None
) -> Tensor:
    """Return the gradient of x, given those of the moments of the samples."""
    positions, zero = ops.positions(x), torch.zeros_like(scale[:1])
    offset = zero if g_mean is None else g_mean if positions == 1 else g_mean / positions
    if g_var is None:
        dx: Tensor = ops.transform(dy, zero, scale, offset)
    else:
        dx = ops.input_gradient(dy, x, scale, mean, g_var * (2 / positions), offset)
    return dx


_apply = eager_apply(_Flex)


def second_derivative(
    call: Call, x: Tensor, parameters: tuple[Tensor | None, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and the parameters, differentiable themselves if gradients are enabled."""
    if call.ranks is not None:
        raise RuntimeError(
            "process_group with a second derivative or batched gradients: ranks exchange tables only in first "
            "derivatives; leave process_group out for the statistics of this process alone"
        )
    again = torch.is_grad_enabled()
    inputs = [x, *parameters] if again else [None if t is None else _leaf(t) for t in (x, *parameters)]
    with torch.enable_grad():
        y = call.plain(inputs[0], tuple(inputs[1:]))  # type: ignore[arg-type]
        wanted = [each for each in inputs if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again, allow_unused=True))
    return tuple(next(found) if each is not None and each.requires_grad else None for each in inputs)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _without_hooks() -> AbstractContextManager[Any]:
    """Return a block whose tables stay as they are: hooks for saved tensors, as of checkpoints, are for x."""
    if not has_saved_tensor_hooks():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda table: table, lambda table: table)


class _Measure(torch.autograd.Function):
    """The pass `moments` in graphs of `torch.compile`; its gradient is pointwise, so that Inductor fuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = ops.moments(x)
        if ops.positions(x) == 1:
            ctx.mark_non_differentiable(var)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, g_mean: Tensor, g_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        positions = ops.positions(x)
        if positions == 1:
            return g_mean.to(x.dtype).view_as(x)
        return ops.apply(x, mean, g_var * (2 / positions), g_mean / positions)


class _Transform(torch.autograd.Function):
    """The pass `transform` in graphs of `torch.compile`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, center, scale)
        ctx.rows = center.shape, scale.shape, shift.shape
        y: Tensor = ops.transform(x, center, scale, shift)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, center, scale = ctx.saved_tensors
        zero = torch.zeros_like(scale[:1])
        dx = ops.apply(dy, zero, scale, zero)
        total, moment = ops.gradient_sums(dy, x, center)
        by_table = zip((-scale * total, moment, total), ctx.rows, strict=True)
        return dx, *(gradient.sum_to_size(shape) for gradient, shape in by_table)

"""`flex_norm`: a normalization is a function from per-sample moments to an affine map, which autograd differentiates.

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

from ghostnoise import checks
from ghostnoise.engine import masks, ops
from ghostnoise.engine.masks import Valid
from ghostnoise.engine.ranks import Extent, Group, Ranks, meet, uncompiled
from ghostnoise.tables import Affine, Moments, table_dtype
from ghostnoise.torch_private import eager_apply, has_saved_tensor_hooks, needs_operators

Decide: TypeAlias = Callable[..., Affine]


def flex_norm(
    input: Tensor,
    decide: Decide,
    *parameters: Tensor | None,
    channel_dim: int = 1,
    mask: Tensor | None = None,
    process_group: Group = None,
) -> Tensor:
    """Normalize each sample's channels with the affine map that `decide` returns for the moments of the samples.

        y = scale · (x - center) + shift        Affine(center, scale, shift) = decide(moments, *parameters)

    Args:
        decide: a function of the `Moments` of all samples (`mean` and `var` (B, C), in float64 where the device has it,
            and `n`, the number of values of each) and the parameters in the same dtype. It returns an `Affine` of
            tables (B, C), or broadcastable to it, written in differentiable PyTorch; gradients flow through everything
            that it does not detach. It must take from its arguments all that needs a gradient, and draw nothing: it may
            run again. `ghostnoise.tables` has pools of samples and of channels, maps, and noise.
        parameters: tensors that `decide` takes, such as weight and bias (C,); None is passed on.
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        mask: the valid positions (B, *positions) of a padded batch; only these contribute, and the output is 0 at the
            others. `n` is then a tensor (B, 1), by which the pools weigh samples.
        process_group: the ranks that share the batch: `decide` gets the moments of all samples of all ranks.

    Shape:
        (B, C, *spatial) with 2 to 5 dimensions, or with the channels in `channel_dim`, in any memory format.

    Examples:
        >>> from ghostnoise.tables import normalize, whole_batch
        >>> def batch_norm(m, weight, bias):
        ...     return normalize(whole_batch(m)).then(weight, bias)
        >>> x, weight, bias = torch.randn(8, 3, 5, 5), torch.rand(3), torch.rand(3)
        >>> y = flex_norm(x, batch_norm, weight, bias)
        >>> torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True), atol=1e-5)
        True
    """
    _, spatial = checks.layout(input, "flex_norm", channel_dim)
    checks.trainable(input.shape, "flex_norm")
    if not callable(decide):
        raise TypeError(f"decide of type {type(decide).__name__}: must be a function of moments that returns an Affine")
    extent = Extent(input.shape, spatial)
    if mask is not None or process_group is not None:
        if mask is not None:
            checks.mask(mask, input, "flex_norm", channel_dim)
        extent = meet(input, spatial, process_group, False, mask)
        if extent.counts is not None:
            checks.some_valid(extent.counts, "flex_norm")
    return run(input, _Checked(decide), parameters, extent, channel_dim)[0]


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
    if torch.compiler.is_compiling() and x.device.type == "cpu" and not torch.compiler.is_exporting():
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

    def tables(self, moments: tuple[Tensor, Tensor], parameters: tuple[Tensor | None, ...]) -> Affine:
        """Decide from the moments of the samples of x, differentiable."""
        m, dtype = Moments(moments[0], moments[1], self.positions), moments[0].dtype
        if self.valid is not None:
            m = self.valid.moments(m)
        if self.ranks is not None:
            m = self.ranks.gather(m, self.counts)
        self.moments = m
        affine = self.decide(m, *(None if each is None else each.to(dtype) for each in parameters))
        return affine if self.ranks is None else Affine(*(self.ranks.own(table) for table in affine))

    def plain(self, x: Tensor, parameters: tuple[Tensor | None, ...]) -> Tensor:
        """Run in plain differentiable PyTorch."""
        # Converted once: the gradients of all uses of x are then summed before they are rounded to its dtype.
        wide = x.to(ops.arithmetic_dtype(x))
        return ops.apply(wide, *self.tables(ops.measure(wide), parameters)).to(x.dtype)


class _Flex(torch.autograd.Function):
    """The eager form: autograd differentiates the tables, and four passes over x do the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor | None) -> Tensor:
        moments, dtype = ops.moments(x), table_dtype(x.device)
        with torch.enable_grad(), _without_hooks():
            own = [table.requires_grad_(x.requires_grad) for table in moments]
            given = [None if p is None else p.detach().to(dtype).requires_grad_(p.requires_grad) for p in parameters]
            tables = call.tables((own[0], own[1]), tuple(given))
        constant = not any(table.requires_grad for table in tables)
        ctx.call, ctx.tables, ctx.leaves, ctx.constant = call, tables, [*own, *given], constant
        saved = (None,) * (1 + len(parameters)) if constant else (x, *parameters)
        ctx.save_for_backward(*saved)
        y: Tensor = ops.transform(x, *(table.detach() for table in tables))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        x, parameters = saved[0], saved[1:]
        center, scale, _ = (table.detach() for table in ctx.tables)
        plain = torch.is_grad_enabled() or needs_operators(dy)
        if ctx.constant:
            zero = torch.zeros_like(scale[:1])
            return (ops.apply if plain else ops.transform)(dy, zero, scale, zero), None, *(None for _ in parameters)
        if plain:
            dx, *own = second_derivative(ctx.call, x, parameters, dy)
            return dx, None, *own
        total, moment = ops.gradient_sums(dy, x, center)
        by_table = [(-scale * total), moment, total]
        used = [(t, g.sum_to_size(t.shape)) for t, g in zip(ctx.tables, by_table, strict=True) if t.requires_grad]
        leaves = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
        outputs, gradients = zip(*used, strict=True)
        found = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
        by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)}
        g_mean, g_var, *rest = (None if leaf is None else by_leaf.get(id(leaf)) for leaf in ctx.leaves)
        dx = None
        if ctx.needs_input_grad[0]:
            mean, zero, share = ctx.leaves[0].detach(), torch.zeros_like(scale[:1, :1]), 1 / ctx.call.positions
            slope = zero if g_var is None or ctx.call.positions == 1 else g_var * (2 * share)
            offset = zero if g_mean is None else g_mean * share
            dx = ops.input_gradient(dy, x, scale, mean, *(t.expand(-1, x.shape[1]) for t in (slope, offset)))
        pairs = zip(rest, parameters, strict=True)
        return dx, None, *(None if g is None or p is None else g.to(p.dtype) for g, p in pairs)


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
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, g_mean: Tensor, g_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        share = 1 / ops.positions(x)
        return ops.apply(x, mean, g_var * (2 * share), g_mean * share)


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


class _Checked:
    """A `decide` of a user, whose result is checked."""

    def __init__(self, decide: Decide) -> None:
        self.decide = decide

    def __call__(self, m: Moments, *parameters: Tensor | None) -> Affine:
        affine = self.decide(m, *parameters)
        if not isinstance(affine, tuple) or len(affine) != 3:
            raise TypeError(
                f"decide returned a {type(affine).__name__}: must return an Affine of three tables, center, scale and "
                "shift; use ghostnoise.tables.Affine or normalize"
            )
        leaves = [m.mean, m.var, *(each for each in parameters if each is not None)]
        tables = [_table(name, table, m) for name, table in zip(Affine._fields, affine, strict=True)]
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            _check_sources(tables, leaves)
        return Affine(*tables)


def _table(name: str, table: object, m: Moments) -> Tensor:
    """Return a table of the affine map with two dimensions, checked."""
    (batch_size, channels), dtype = m.mean.shape, m.mean.dtype
    if not isinstance(table, Tensor):
        raise TypeError(
            f"decide returned a {type(table).__name__} as {name}: must be a tensor; use torch.full_like(m.mean, value)"
        )
    if table.dtype != dtype:
        raise TypeError(
            f"decide returned a {name} of dtype {table.dtype}: must be {dtype}, that of the moments; compute it from "
            f"m.mean and m.var, or convert with {name}.to(m.mean.dtype)"
        )
    shape = (1,) * (2 - table.ndim) + tuple(table.shape)
    if len(shape) != 2 or shape[0] not in (1, batch_size) or shape[1] not in (1, channels):
        raise ValueError(
            f"decide returned a {name} of shape {tuple(table.shape)}: must be (B, C) = ({batch_size}, {channels}), or "
            "broadcastable to it; x itself must not enter the map, only its moments"
        )
    table = table.expand(shape[0], channels)
    if checks.readable(table) and not table.detach().isfinite().all() and m.mean.isfinite().all():
        raise ValueError(
            f"decide returned a {name} that is not finite for finite moments: must be finite; add a small eps before "
            "dividing or taking a root of m.var, which is 0 for samples with a single position"
        )
    return table


def _check_sources(tables: list[Tensor], leaves: list[Tensor]) -> None:
    """Check that tables depend on the arguments of `decide` alone: the gradient of anything else would be lost."""
    known = {id(leaf) for leaf in leaves}
    inside = {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
    for name, table in zip(Affine._fields, tables, strict=True):
        seen: set[Any] = set(inside)
        waiting: list[Any] = [table.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise ValueError(
                    f"decide returned a {name} that depends on a tensor of shape {tuple(variable.shape)} that needs a "
                    "gradient and is not an argument of decide, which would lose this gradient: pass it as a parameter "
                    "of flex_norm, use the moments instead of x, or detach it"
                )
            waiting += [each for each, _ in node.next_functions]

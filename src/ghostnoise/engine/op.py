"""The one differentiable op: measure x, let a method decide, apply what it decided.

It has two forms with equal results. *Composite* is plain differentiable PyTorch, for `torch.compile`, export,
`torch.func`, forward-mode AD and second derivatives. *Fused* is an autograd function around the passes of a backend;
for backward it saves x and two tables of moments (a normalizer), or one table (noise).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ghostnoise.engine import aten
from ghostnoise.moments import Affine, Moments

Method: TypeAlias = Callable[[Moments], Affine]


def measure(x: Tensor, channel_dim: int = 1) -> Moments:
    """The per-sample moments (B, C) of x, as constants."""
    return aten.moments(_fold(x.detach(), channel_dim))


def normalize(
    x: Tensor, method: Method, weight: Tensor | None = None, bias: Tensor | None = None, channel_dim: int = 1
) -> tuple[Tensor, Moments]:
    """Apply what `method` decides, then `weight` and `bias`; gradients flow through the decision.

    Also returns the moments (B, C) that were measured, as constants.
    """
    folded = _fold(x, channel_dim)
    weight = torch.ones((), device=x.device) if weight is None else weight
    bias = torch.zeros((), device=x.device) if bias is None else bias
    run = _composite if _needs_composite(folded, weight, bias) else _Normalize.apply
    y, mean, var = run(folded, weight, bias, method)
    return _unfold(y, x, channel_dim), Moments(mean, var)


def inject(x: Tensor, method: Method, channel_dim: int = 1) -> Tensor:
    """Apply what `method` decides as constants: the gradient of x is that of the transformation alone."""
    folded = _fold(x, channel_dim)
    composite = _needs_composite(folded)
    measure = aten.measure if composite else aten.moments
    affine = _expand(method, measure(folded.detach()))
    y = aten.apply(folded, affine).to(x.dtype) if composite else _Inject.apply(folded, *affine)
    return _unfold(y, x, channel_dim)


def _expand(method: Method, moments: Moments) -> Affine:
    return Affine(*(table.expand_as(moments.mean) for table in method(moments)))


def _decide(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, method: Method) -> Affine:
    outer = Affine(mean.new_zeros(()), weight.to(mean.dtype), bias.to(mean.dtype))
    return _expand(lambda moments: method(moments).then(outer), Moments(mean, var))


def _composite(x: Tensor, weight: Tensor, bias: Tensor, method: Method) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = aten.measure(x)
    y = aten.apply(x, _decide(mean, var, weight, bias, method))
    return y.to(x.dtype), mean.detach(), var.detach()


class _Normalize(torch.autograd.Function):
    """The fused form of a normalizer; its backward is derived in `engine.aten`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, method: Method) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = aten.moments(x)
        return aten.transform(x, _decide(mean, var, weight, bias, method)), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.method = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, bias, mean, var)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled() or _needs_composite(dy):
            _, pull = _vjp(lambda x, w, b: _composite(x, w, b, ctx.method)[0], x, weight, bias)
            return (*pull(dy), None)
        affine, pull = _vjp(partial(_decide, method=ctx.method), mean, var, weight, bias)
        total, moment = aten.gradient_sums(dy, x, affine.center)
        g_mean, g_var, g_weight, g_bias = pull(Affine(-affine.scale * total, moment, total))
        dx = aten.input_gradient(dy, x, affine.scale, mean, g_mean, g_var) if ctx.needs_input_grad[0] else None
        return dx, g_weight, g_bias, None


class _Inject(torch.autograd.Function):
    """The fused form of noise."""

    @staticmethod
    def forward(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return aten.transform(x, Affine(center, scale, shift))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if torch.is_grad_enabled() or _needs_composite(dy):
            return aten.rescale(dy, scale).to(dy.dtype), None, None, None
        return aten.scale_gradient(dy, scale), None, None, None


def _vjp(function: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., tuple[Tensor, ...]]]:
    out, pull = torch.func.vjp(function, *primals)[:2]
    return out, pull


def _needs_composite(*tensors: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    )


def _fold(x: Tensor, channel_dim: int) -> Tensor:
    """View x as (B, C, *spatial), with one spatial dimension or more."""
    return x.unsqueeze(2) if x.ndim == 2 else x.movedim(channel_dim, 1)


def _unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return y.squeeze(2) if x.ndim == 2 else y.movedim(1, channel_dim)

"""The fused operators: whole methods in one call, forward and backward, for the plans that most steps are.

Covered are batch norm, ghost batch norm, exclusive batch norm and batch renormalization, each alone, batch norm with
drawn ghost noise or noise from a law, and drawn ghost noise alone. `covers` decides by the device; a method states its
plan only where its settings are those of the plan, and everything else takes the general level (`engine.general`),
which the fused operators are tested against.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine import ops
from ghostnoise.engine.general import Call, Decide, second_derivative
from ghostnoise.tables import Affine, Moments, normalize, whole_batch
from ghostnoise.torch_private import eager_apply, needs_operators

Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BUFFERS: Buffers = (None, None, None)


class Plan(NamedTuple):
    """The settings of a fused normalization; the default is batch norm."""

    eps: float
    ghost_size: int | None = None
    exclusive: bool = False
    min_std: float = 0.0
    indices: Tensor | None = None  # drawn samples (B, N); or else a seed and a law
    seed: Tensor | None = None
    law: Tensor | None = None
    quantiles: Tensor | None = None
    noise_eps: float = 0.0
    shift: bool = False
    scale: bool = False
    reference: Buffers = NO_BUFFERS  # of batch renormalization; by default the running buffers as they are
    limits: tuple[float | None, float, int, int] = (None, 0.0, 0, 0)


def covers(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether the fused operators can run on x; `torch.compile` fuses plain PyTorch better on CUDA."""
    if x.is_cpu:
        return ops.MISSING["cpu"] is None and not needs_operators(x, *parameters)
    usable = x.is_cuda and ops.MISSING["cuda"] is None and not torch.compiler.is_compiling()
    return usable and not needs_operators(x, *parameters)


def run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    decide: Decide,
    buffers: Buffers,
    momentum: float | None,
    towards: str,
) -> Tensor:
    """Normalize x, and update the running buffers towards the statistics that `towards` names.

    `decide` is the same method as a function of moments, for second derivatives.
    """
    apply = _Normalize.apply if torch.compiler.is_compiling() else _apply
    y: Tensor = apply(x, weight, bias, plan, decide, (*buffers, momentum, towards))
    if not torch.compiler.is_compiling():  # operators on the stable ABI leave this to the caller
        for buffer in buffers:
            if buffer is not None:
                torch.autograd.graph.increment_version(buffer)
    return y


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, decide: Decide, state: Any
    ) -> Tensor:
        eps, ghost_size, exclusive, min_std, *noise, reference, limits = plan
        given = (*state, ghost_size, exclusive, eps, min_std, *noise, *reference, *limits)
        y: Tensor
        y, stats, extra = ops.normalize(x, weight, bias, *given)
        ctx.save_for_backward(x, weight, bias, stats, extra)
        ctx.plan, ctx.decide = plan, decide
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, extra = ctx.saved_tensors
        plan = ctx.plan
        if torch.is_grad_enabled() or needs_operators(dy):
            decide = ctx.decide if plan.limits[0] is None else partial(_renormalized, plan.eps, extra)
            call = Call(decide, ops.positions(x))
            return *second_derivative(call, x, (weight, bias), dy), None, None, None
        needs_x = ctx.needs_input_grad[0]
        dx, g_weight, g_bias = ops.normalize_backward(
            dy, x, weight, stats, extra, plan.ghost_size, plan.exclusive, plan.eps, plan.min_std, plan.shift,
            plan.scale, needs_x,
        )  # fmt: skip
        # `to` is not free, even where it changes nothing.
        if weight is None or g_weight.dtype is not weight.dtype:
            g_weight = None if weight is None else g_weight.to(weight.dtype)
        if bias is None or g_bias.dtype is not bias.dtype:
            g_bias = None if bias is None else g_bias.to(bias.dtype)
        return dx if needs_x else None, g_weight, g_bias, None, None, None


_apply = eager_apply(_Normalize)


def _renormalized(eps: float, extra: Tensor, m: Moments, weight: Tensor | None, bias: Tensor | None) -> Affine:
    """Decide on batch renormalization with the r and d of the forward pass, whose running buffers have moved on."""
    r, d = extra.to(m.mean.dtype)
    return normalize(whole_batch(m), eps).then(r, d).then(weight, bias)


def inject(x: Tensor, indices: Tensor, noise_eps: float, shift: bool, scale: bool) -> Tensor:
    """Inject the noise of drawn samples, which is constant for the gradient."""
    if torch.compiler.is_compiling():
        compiled: Tensor = _Inject.apply(x, indices, noise_eps, shift, scale)
        return compiled
    y: Tensor = _apply_inject(x, indices, noise_eps, shift, scale)
    return y


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, noise_eps: float, shift: bool, scale: bool) -> Tensor:
        y, factor = ops.ghost_noise(x, indices, noise_eps, shift, scale)
        ctx.save_for_backward(factor)
        ctx.scale = scale
        made: Tensor = y
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        if not ctx.scale:
            return dy, None, None, None, None
        zero = torch.zeros_like(factor[:1])
        apply = ops.apply if torch.is_grad_enabled() or needs_operators(dy) else ops.transform
        return apply(dy, zero, factor, zero), None, None, None, None


_apply_inject = eager_apply(_Inject)

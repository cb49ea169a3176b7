"""The one differentiable op: measure x, decide from its moments, apply what was decided.

It has two forms with equal results. *Composite* is plain differentiable PyTorch, for `torch.compile`, export,
`torch.func`, forward-mode AD and second derivatives. *Fused* is an autograd function around the passes of a backend,
with the gradient in closed form; for backward it saves x and small tables (a normalizer), or one table (noise).

With the statistics mean and rstd of who counts, noise m and k on the normalized x, weight w and bias b:

    y = w·k·((x - mean)·rstd - m) + b = scale·(x - mean) + shift        scale = w·k·rstd,  shift = b - w·k·m

Let a = Σ dy and d = Σ dy·(x - mean) over positions, per sample, and Σ_r sum over the samples that share a pool r:

    db = Σ a          dw = Σ k·(rstd·d - m·a)        drstd = Σ_r w·k·d        dmean = -Σ_r scale·a

From the last two, `who` gives the gradient of x through the statistics, a ramp: slope·(x - center) + offset.

Where ranks share a batch, moments are gathered, so all of them decide from the whole batch; m, k and what is applied to
x are those of a rank's own samples. In backward, a, d, db and dw are sums over these; what they add to drstd and dmean
is gathered, summed for each pool over all ranks, and the ramp is applied to them. So the gradient of x is that of the
losses of all ranks, and db and dw of all ranks sum up to those of the whole batch.
"""

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ghostnoise.distributed import Ranks, uncompiled
from ghostnoise.engine import steps
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.decide import constant, decide
from ghostnoise.methods import Batch, Noise, Normalizer
from ghostnoise.moments import Moments, arithmetic_dtype, spread, table_dtype


class Seen(NamedTuple):
    """What a normalizer saw, as constants: moments (B, C) and the statistics of pools (R, C); and by which passes.

    They are those of the whole batch, on every rank that has a part of it.
    """

    moments: Moments
    stats: Moments
    passes: ModuleType


def measure(x: Tensor, channel_dim: int = 1) -> Moments:
    """The per-sample moments (B, C) of x in float64, as constants."""
    folded = _fold(x.detach(), channel_dim)
    mean, var = backends.serving(folded).moments(folded)
    return Moments(mean.to(table_dtype(x.device)), var)


def normalize(
    x: Tensor,
    normalizer: Normalizer,
    noise: Noise | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channel_dim: int = 1,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Seen]:
    """Normalize x, inject `noise` of the normalized x as constants, then apply weight and bias."""
    if ranks is not None and torch.compiler.is_compiling():
        outside: tuple[Tensor, Seen] = uncompiled(normalize, x, normalizer, noise, weight, bias, channel_dim, ranks)
        return outside
    folded = _fold(x, channel_dim)
    if _needs_composite(folded, weight, bias):
        _check_alone(ranks)
        y, seen = _composite(folded, weight, bias, normalizer, noise)
    else:
        made: list[Seen] = []
        y = _Normalize.apply(folded, weight, bias, normalizer, noise, ranks, made)
        (seen,) = made
    return _unfold(y, x, channel_dim), seen


def inject(x: Tensor, noise: Noise, channel_dim: int = 1, ranks: Ranks | None = None) -> Tensor:
    """Inject `noise` of x as constants: the gradient of x is that of the transformation alone."""
    if ranks is not None and torch.compiler.is_compiling():
        outside: Tensor = uncompiled(inject, x, noise, channel_dim, ranks)
        return outside
    folded = _fold(x, channel_dim)
    composite = _needs_composite(folded)
    if composite:
        _check_alone(ranks)
    given = folded.detach()
    passes = aten if composite else backends.serving(given)
    moments = aten.measure(given) if composite else passes.moments(given)
    moments = moments if ranks is None else ranks.gather(moments)
    whole, dtype = passes.everyone(moments, None), arithmetic_dtype(x)
    batch = Batch(moments, whole, torch.ones_like(whole.var), partial(passes.draws, dtype=dtype))
    m, k = passes.inject(noise, batch, dtype)
    zero = torch.zeros(whole.mean.shape, dtype=dtype, device=x.device)
    rows = (zero if m is None else m, torch.ones_like(zero) if k is None else k, zero)
    if composite:
        y = aten.apply(folded, *(spread(table, x.shape[0]) for table in rows)).to(x.dtype)
    else:
        y = _Inject.apply(folded, *rows)
    return _unfold(y, x, channel_dim)


def _composite(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalizer: Normalizer, noise: Noise | None
) -> tuple[Tensor, Seen]:
    moments = aten.measure(x)
    affine, stats, _ = decide(aten, moments, weight, bias, normalizer, noise, arithmetic_dtype(x))
    each = normalizer.who.each(x.shape[0])
    y = aten.apply(x, *(spread(table, x.shape[0], each) for table in affine)).to(x.dtype)
    return y, Seen(constant(moments), constant(stats), aten)


class _Normalize(torch.autograd.Function):
    """The fused form of a normalizer; its gradient is derived above."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalizer: Normalizer,
        noise: Noise | None,
        ranks: Ranks | None,
        seen: list[Seen],
    ) -> Tensor:
        passes = backends.serving(x)
        y, moments, stats, made = steps.forward(passes, x, weight, bias, normalizer, noise, ranks)
        ctx.passes, ctx.normalizer, ctx.noise, ctx.ranks = passes, normalizer, noise, ranks
        ctx.save_for_backward(x, weight, bias, *normalizer.who.keep(moments, stats), *made)
        seen.append(Seen(moments, stats, passes))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept_mean, kept_var, m, k = ctx.saved_tensors
        if torch.is_grad_enabled() or _needs_composite(dy):
            _check_alone(ctx.ranks)
            return *_pull_composite(ctx.normalizer, ctx.noise, x, weight, bias, dy), None, None, None, None
        known = (ctx.normalizer, Moments(kept_mean, kept_var), (m, k), ctx.ranks, ctx.needs_input_grad[0])
        dx, g_weight, g_bias = steps.backward(ctx.passes, dy, x, weight, *known)
        return dx, _like(g_weight, weight), _like(g_bias, bias), None, None, None, None


def _pull_composite(
    normalizer: Normalizer, noise: Noise | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, differentiable themselves."""
    given = [tensor for tensor in (weight, bias) if tensor is not None]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        left = iter(parameters)
        own_weight = None if weight is None else next(left)
        return _composite(x, own_weight, None if bias is None else next(left), normalizer, noise)[0]

    dx, *gradients = torch.func.vjp(run, x, *given)[1](dy)
    left = iter(gradients)
    return dx, None if weight is None else next(left), None if bias is None else next(left)


class _Inject(torch.autograd.Function):
    """The fused form of noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.passes = backends.serving(x)
        ctx.save_for_backward(scale)
        y: Tensor = ctx.passes.transform(x, center, scale, shift)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if torch.is_grad_enabled() or _needs_composite(dy):
            return aten.rescale(dy, scale).to(dy.dtype), None, None, None
        return ctx.passes.scale_gradient(dy, scale), None, None, None


def _needs_composite(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _check_alone(ranks: Ranks | None) -> None:
    if ranks is not None:
        raise RuntimeError(
            "process_group with torch.func, forward-mode AD or a second derivative: tables are exchanged between ranks "
            "in eager forward and backward passes alone; leave process_group out for statistics of this process"
        )


def _like(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else gradient.to(parameter.dtype)


def _fold(x: Tensor, channel_dim: int) -> Tensor:
    """View x as (B, C, *spatial), with one spatial dimension or more."""
    return x.unsqueeze(2) if x.ndim == 2 else x if channel_dim == 1 else x.movedim(channel_dim, 1)


def _unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return y.squeeze(2) if x.ndim == 2 else y if channel_dim == 1 else y.movedim(1, channel_dim)

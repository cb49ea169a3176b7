"""The one differentiable op: measure x, decide from its moments, apply what was decided.

It has two forms with equal results. *Composite* is plain differentiable PyTorch, for `torch.compile`, export,
`torch.func`, forward-mode AD and second derivatives. *Fused* is an autograd function around the passes of a backend,
with the gradient in closed form; for backward it saves x and small tables (a normalizer), or one table (noise).

With the statistics mean and rstd of who counts, noise m and k on the normalized x, weight w and bias b:

    y = w·k·((x - mean)·rstd - m) + b = scale·(x - mean) + shift        scale = w·k·rstd,  shift = b - w·k·m

Let a = Σ dy and d = Σ dy·(x - mean) over positions, per sample, and Σ_r sum over the samples that share a pool r:

    db = Σ a          dw = Σ k·(rstd·d - m·a)        drstd = Σ_r w·k·d        dmean = -Σ_r scale·a

From the last two, `who` gives the gradient of x through the statistics, a ramp: slope·(x - center) + offset.
"""

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ghostnoise.engine import aten, backends
from ghostnoise.ghosts import Who
from ghostnoise.methods import Batch, Noise, NoiseMethod, Normalizer
from ghostnoise.moments import Affine, Moments, arithmetic_dtype, table_dtype


def measure(x: Tensor, channel_dim: int = 1) -> Moments:
    """The per-sample moments (B, C) of x in float64, as constants."""
    folded = _fold(x.detach(), channel_dim)
    mean, var = backends.serving(folded).moments(folded)
    return Moments(mean.to(table_dtype(x.device)), var)


def normalize(
    x: Tensor,
    normalizer: Normalizer,
    noise: NoiseMethod | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channel_dim: int = 1,
) -> tuple[Tensor, Moments, Moments]:
    """Normalize x, inject `noise` of the normalized x as constants, then apply weight and bias.

    Also returns, as constants, the moments that were measured (B, C), and the statistics of the pools (R, C).
    """
    folded = _fold(x, channel_dim)
    weight = torch.ones(1, device=x.device) if weight is None else weight
    bias = torch.zeros(1, device=x.device) if bias is None else bias
    run = _composite if _needs_composite(folded, weight, bias) else _Normalize.apply
    y, *tables = run(folded, weight, bias, normalizer, noise)
    return _unfold(y, x, channel_dim), Moments(*tables[:2]), Moments(*tables[2:])


def inject(x: Tensor, noise: NoiseMethod, channel_dim: int = 1) -> Tensor:
    """Inject `noise` of x as constants: the gradient of x is that of the transformation alone."""
    folded = _fold(x, channel_dim)
    composite = _needs_composite(folded)
    constant = folded.detach()
    passes = aten if composite else backends.serving(constant)
    moments = aten.measure(constant) if composite else passes.moments(constant)
    whole, dtype = passes.everyone(moments, None), arithmetic_dtype(x)
    made = noise(Batch(moments, whole, torch.ones_like(whole.var), partial(passes.draws, dtype=dtype)))
    shift, scale = (table.to(dtype).expand_as(moments.mean) for table in made)
    affine = Affine(shift, scale, shift.new_zeros(1, shift.shape[1]).expand_as(shift))
    y = aten.apply(folded, *affine).to(x.dtype) if composite else _Inject.apply(folded, *affine)
    return _unfold(y, x, channel_dim)


class _Decision(NamedTuple):
    affine: Affine
    stats: Moments
    noise: Noise | None


def _decide(
    passes: ModuleType,
    moments: Moments,
    weight: Tensor,
    bias: Tensor,
    normalizer: Normalizer,
    noise: NoiseMethod | None,
    x: Tensor,
) -> _Decision:
    """From the moments to what is applied to x; differentiable, but for the noise."""
    dtype, who = arithmetic_dtype(x), normalizer.who

    def spread(table: Tensor) -> Tensor:
        return who.spread(table, x.shape[0])

    stats = who.pool(moments, None if passes is aten else passes)
    rstd, weight, bias = normalizer.rstd(stats.var.to(dtype)), weight.to(dtype), bias.to(dtype)
    # x - mean is taken in the arithmetic of x, with a rounded mean; what rounding takes from it goes into the shift.
    center, lost = _round(stats.mean, dtype)
    factor, rest = rstd * weight, rstd * lost
    if noise is None:
        return _Decision(Affine(*map(spread, (center, factor, weight * rest + bias))), stats, None)
    # Detached, and not only without gradients: forward-mode tangents would pass. Where all samples share one pool, its
    # row stands for all of them.
    samples, pools = _constant(moments), _constant(stats)
    whole = pools if pools.mean.shape[0] == 1 else passes.everyone(samples, None)
    rows = [table if table.shape[0] == 1 else spread(table) for table in (rstd.detach(), factor, rest)]
    batch = Batch(samples, whole, rows[0].square().reciprocal(), partial(passes.draws, dtype=dtype))
    m, k = (table.to(dtype) for table in noise(batch))
    m, scale, shift = passes.blend(m, k, *rows, weight, bias)
    affine = Affine(*(table.expand_as(moments.mean) for table in (spread(center), scale, shift)))
    return _Decision(affine, stats, Noise(m, k))


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor, normalizer: Normalizer, noise: NoiseMethod | None
) -> tuple[Tensor, ...]:
    moments = aten.measure(x)
    affine, stats, _ = _decide(aten, moments, weight, bias, normalizer, noise, x)
    return aten.apply(x, *affine).to(x.dtype), *_constant(moments), *_constant(stats)


class _Normalize(torch.autograd.Function):
    """The fused form of a normalizer; its gradient is derived above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, normalizer: Normalizer, noise: NoiseMethod | None
    ) -> tuple[Tensor, ...]:
        passes = backends.serving(x)
        moments = passes.moments(x)
        affine, stats, made = _decide(passes, moments, weight, bias, normalizer, noise, x)
        ctx.passes, ctx.normalizer, ctx.noise = passes, normalizer, noise
        ctx.save_for_backward(x, weight, bias, *normalizer.who.keep(moments, stats), *(made or ()))
        ctx.mark_non_differentiable(*moments, *stats)
        return passes.transform(x, *affine), *moments, *stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept_mean, kept_var, *noise = ctx.saved_tensors
        normalizer = ctx.normalizer
        if torch.is_grad_enabled() or _needs_composite(dy):
            run = partial(_composite, normalizer=normalizer, noise=ctx.noise)
            pull = torch.func.vjp(lambda *inputs: run(*inputs)[0], x, weight, bias)[1]
            return *pull(dy), None, None
        who: Who = normalizer.who
        kept, dtype = Moments(kept_mean, kept_var), arithmetic_dtype(x)
        stats = who.recall(kept, ctx.passes)
        var = stats.var.to(dtype)
        rstd, (center, lost) = normalizer.rstd(var), _round(stats.mean, dtype)
        scale = rstd * weight.to(dtype)

        def spread(table: Tensor) -> Tensor:
            return who.spread(table.to(dtype), x.shape[0])

        total, moment = ctx.passes.gradient_sums(dy, x, spread(center))
        g_bias, a, d, from_noise = _sums(ctx.passes, who, total, moment, noise, stats.mean.shape[0])
        d = d + lost * a
        g_weight = (rstd * d).sum(0) - from_noise
        dx = None
        if ctx.needs_input_grad[0]:
            gradient = Moments(-scale * a, normalizer.var_gradient(var, rstd, weight * d))
            ramp = who.ramp(kept, stats, gradient, *_sizes(x))
            around, lost = _round(ramp.center, dtype)
            offset = ramp.offset + ramp.slope * lost
            factor = spread(scale) * noise[1] if noise else spread(scale)
            dx = ctx.passes.input_gradient(dy, x, factor, spread(around), spread(ramp.slope), spread(offset))
        return dx, _like(g_weight, weight), _like(g_bias, bias), None, None


def _sums(
    passes: ModuleType, who: Who, total: Tensor, moment: Tensor, noise: list[Tensor], pools: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Σ a over all samples, Σ_r k·a and Σ_r k·d over those of each pool, and Σ k·m·a over all."""
    if noise and pools == 1:
        sums: Tensor = passes.noise_sums(total, moment, *noise)
        return sums[0], sums[1:2], sums[2:3], sums[3]
    if not noise:
        a = who.total(total)
        return a.sum(0), a, who.total(moment), 0.0
    m, k = noise
    noisy = total * k
    return total.sum(0), who.total(noisy), who.total(moment * k), (m * noisy).sum(0)


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


def _constant(moments: Moments) -> Moments:
    return Moments(moments.mean.detach(), moments.var.detach())


def _round(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A mean in `dtype`, and what rounding added to it."""
    rounded = mean.to(dtype)
    return rounded, (rounded - mean).to(dtype)


def _needs_composite(*tensors: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    )


def _sizes(x: Tensor) -> tuple[int, int]:
    """B and S."""
    return x.shape[0], x[0, 0].numel()


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient.to(parameter.dtype).sum_to_size(parameter.shape)


def _fold(x: Tensor, channel_dim: int) -> Tensor:
    """View x as (B, C, *spatial), with one spatial dimension or more."""
    return x.unsqueeze(2) if x.ndim == 2 else x.movedim(channel_dim, 1)


def _unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return y.squeeze(2) if x.ndim == 2 else y.movedim(1, channel_dim)

"""The differentiable operations of the engine: `normalize` and `inject`, each in three forms with equal results.

*Eager* is an autograd function around the steps of a backend (`engine.steps`), with the gradient in closed form; for
the backward pass it saves x and small tables (a normalizer), or one table (noise). *Registered* is the same as
`torch.library` ops (`engine.registered`), which `torch.compile` and dispatch modes see as single operators. *Composite*
is differentiable PyTorch, for `torch.func`, forward-mode AD, second derivatives and export.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine import composite, registered, steps
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import Affine, Backend, NoiseTables, Normalized, Prepared, Saved, State
from ghostnoise.engine.backends.select import select
from ghostnoise.engine.masks import Mask, Valid
from ghostnoise.engine.plan import Correction, Noise, Plan, Reference, positions
from ghostnoise.engine.ranks import Ranks, uncompiled
from ghostnoise.engine.running import Running, Update
from ghostnoise.statistics.moments import Moments, expand_pools, table_dtype
from ghostnoise.statistics.samples import Contributors
from ghostnoise.torch_private import eager_apply, intercepted, needs_operators


class Measured(NamedTuple):
    """The statistics of a batch, as constants: moments (B, C), pooled (R, C); and the backend that computed them.

    With ranks they are those of the whole batch, on every rank. `reference` holds the running statistics that the
    forward pass used, and `updated` is True if it has updated them.
    """

    moments: Moments
    pooled: Moments
    backend: Backend
    reference: Reference | None = None
    updated: bool = False

    def update(
        self, update: Update, contributors: Contributors, batch_size: int, spatial: int, counts: Tensor | None = None
    ) -> None:
        """Update running statistics towards this batch, unless its statistics are not finite."""
        running, population = update
        given = (contributors, self.moments, self.pooled, batch_size, spatial)
        self.update_towards(running, population.moments(*given, self.backend.pool, counts))

    def update_towards(self, running: Running, stats: Moments) -> None:
        """Update running statistics towards `stats` (1, C), unless these are not finite."""
        checks.writable(running[:3], stats.mean)
        self.backend.update_running(*running, stats)


def measure(x: Tensor, channel_dim: int = 1, mask: Mask | None = None) -> Moments:
    """Measure the per-sample moments (B, C) of x in float64, as constants."""
    if mask is not None:
        filled, valid = mask.fill(x.detach(), channel_dim)
        return steps.valid_moments(measure(filled, channel_dim), valid, _fold(filled, channel_dim))
    folded = _fold(x.detach(), channel_dim)
    mean, var = select(folded).moments(folded)
    return Moments(mean.to(table_dtype(x.device)), var)


def normalize(
    x: Tensor,
    plan: Plan,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channel_dim: int = 1,
    ranks: Ranks | None = None,
    mask: Mask | None = None,
) -> tuple[Tensor, Measured]:
    """Normalize x, inject noise of the normalized x as constants, then apply weight and bias.

    Running statistics are updated if the plan says so. With a mask, only values at valid positions contribute, and y is
    0 at the others.
    """
    if mask is not None:
        filled, valid = mask.fill(x, channel_dim)
        y, measured = normalize(filled, plan._replace(valid=valid), weight, bias, channel_dim, ranks)
        return mask.zero(y, channel_dim), measured
    if ranks is not None and torch.compiler.is_compiling():
        outside: tuple[Tensor, Measured] = uncompiled(normalize, x, plan, weight, bias, channel_dim, ranks)
        return outside
    folded = _fold(x, channel_dim)
    if needs_operators(folded, weight, bias):
        _check_no_ranks(ranks)
        y, measured = _composite(folded, weight, bias, plan.evaluated(x.device))
    elif ranks is None and _needs_registered():
        plan = plan.evaluated(x.device)
        y, moments, pooled = registered.normalize(folded, weight, bias, plan)
        measured = Measured(moments, pooled, ATEN, plan.known, updated=True)
    else:
        call = _Call(plan, ranks)
        y, measured = _apply_normalize(folded, weight, bias, call), _measured(call)
    if plan.update is not None and not measured.updated:
        batch_size = x.shape[0] if ranks is None else ranks.batch_size
        measured.update(plan.update, plan.normalizer.contributors, batch_size, positions(folded), plan.counts)
    return _unfold(y, x, channel_dim), measured


def repeat(
    prepared: Prepared, x: Tensor, state: State, at: list[int], noise: Noise | None
) -> tuple[Tensor, Normalized]:
    """Run `normalize` on tensors whose addresses `Prepared.admitted` returned; also returns what the pass made."""
    call = _Repetition(prepared, state, at, noise)
    return _apply_normalize(x, *state[:2], call), call.made


def draws(x: Tensor, channel_dim: int = 1) -> bool:
    """Return whether the backend of x draws samples from a seed, inside of its kernels."""
    if torch.compiler.is_compiling():  # the ops select a backend when they run, and every backend takes a seed
        return x.device.type == "cuda"
    given = x if x.ndim > 2 and channel_dim == 1 else _fold(x.detach(), channel_dim)
    return not needs_operators(x) and select(given).draws


def inject(
    x: Tensor, noise: Noise, channel_dim: int = 1, ranks: Ranks | None = None, mask: Mask | None = None
) -> tuple[Tensor, Moments | None]:
    """Inject noise of x as constants: the gradient of x is that of the transformation alone.

    With a mask, only values at valid positions contribute to the noise, and the result is 0 at the others. Also returns
    the moments (B, C) of the whole batch, which are None if a fused call did not return them.
    """
    if mask is None:
        return _inject(x, noise, channel_dim, ranks, None)
    filled, valid = mask.fill(x, channel_dim)
    y, moments = _inject(filled, noise, channel_dim, ranks, valid)
    return mask.zero(y, channel_dim), moments


def _inject(
    x: Tensor, noise: Noise, channel_dim: int, ranks: Ranks | None, valid: Valid | None
) -> tuple[Tensor, Moments | None]:
    if ranks is not None and torch.compiler.is_compiling():
        outside: tuple[Tensor, Moments | None] = uncompiled(_inject, x, noise, channel_dim, ranks, valid)
        return outside
    folded = _fold(x, channel_dim)
    if needs_operators(folded):
        _check_no_ranks(ranks)
        affine, moments = steps.inject_tables(ATEN, folded.detach(), noise, None, valid)
        y = aten.apply(folded, *(expand_pools(table, x.shape[0]) for table in affine)).to(x.dtype)
    elif ranks is None and _needs_registered():
        y, moments = registered.inject(folded, noise, valid)
    else:
        given = folded.detach()
        affine, moments = steps.inject_tables(select(given), given, noise, ranks, valid)
        y = _apply_inject(folded, *affine)
    return _unfold(y, x, channel_dim), moments


def apply(x: Tensor, affine: Affine, channel_dim: int = 1) -> Tensor:
    """Apply a transformation whose tables have a row per sample, or one for all; differentiable in x and the tables."""
    folded = _fold(x, channel_dim)
    tables = [expand_pools(table, x.shape[0]) for table in affine]
    if torch.is_grad_enabled() or not x.numel() or needs_operators(folded) or _needs_registered():
        y = aten.apply(folded, *tables).to(x.dtype)
    else:
        y = select(folded).transform(folded, Affine(*(table.contiguous() for table in tables)))
    return _unfold(y, x, channel_dim)


def _composite(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Measured]:
    y, moments, pooled = composite.normalize(x, weight, bias, plan)
    return y, Measured(moments, pooled, ATEN, plan.known)


def _measured(call: "_Call") -> Measured:
    _, moments, pooled, _, _, reference, updated = call.made
    return Measured(moments, pooled, call.backend, reference, updated)


class _Call:
    """What a call of `_Normalize` takes beside tensors, and what its forward pass makes."""

    __slots__ = ("backend", "made", "plan", "ranks")

    def __init__(self, plan: Plan, ranks: Ranks | None) -> None:
        self.plan, self.ranks = plan, ranks
        self.backend: Backend
        self.made: Normalized

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Normalized:
        self.backend = select(x)
        return steps.forward(self.backend, x, weight, bias, self.plan, self.ranks)


class _Repetition(_Call):
    """A call that repeats an earlier one."""

    __slots__ = ("at", "prepared", "state")

    def __init__(self, prepared: Prepared, state: State, at: list[int], noise: Noise | None) -> None:
        self.plan, self.ranks = Plan(prepared.normalizer, noise), None
        self.prepared, self.state, self.at, self.backend = prepared, state, at, prepared.backend

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Normalized:
        return self.prepared.forward(x, self.state, self.at, self.plan.noise)


class _Normalize(torch.autograd.Function):
    """The eager form of a normalizer; `engine.steps` derives its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        call.made = made = call.forward(x, weight, bias)
        y, moments, pooled, noise, correction, reference, _ = made
        plan = call.plan
        ctx.backend, ctx.ranks = call.backend, call.ranks
        ctx.plan = plan if reference is None else plan._replace(reference=reference)
        kept = moments if plan.normalizer.contributors.keeps_moments else pooled
        ctx.save_for_backward(x, weight, bias, *kept, *noise, *(correction or ()))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, var, m, k, *correction = ctx.saved_tensors
        if torch.is_grad_enabled() or needs_operators(dy):
            _check_no_ranks(ctx.ranks)
            return *composite.gradient(ctx.plan, x, weight, bias, dy), None
        saved = Saved(Moments(mean, var), NoiseTables(m, k), Correction(*correction) if correction else None)
        needs_x = ctx.needs_input_grad[0]
        dx, g_weight, g_bias = steps.backward(ctx.backend, dy, x, weight, ctx.plan, saved, ctx.ranks, needs_x)
        return dx, _cast(g_weight, weight), _cast(g_bias, bias), None


_apply_normalize = eager_apply(_Normalize)


class _Inject(torch.autograd.Function):
    """The eager form of noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.backend = select(x)
        ctx.save_for_backward(scale)
        y: Tensor = ctx.backend.transform(x, Affine(center, scale, shift))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if torch.is_grad_enabled() or needs_operators(dy):
            return aten.rescale(dy, scale).to(dy.dtype), None, None, None
        return ctx.backend.scale_gradient(dy, scale), None, None, None


_apply_inject = eager_apply(_Inject)


def _needs_registered() -> bool:
    return torch.compiler.is_compiling() or intercepted()


def _check_no_ranks(ranks: Ranks | None) -> None:
    if ranks is not None:
        raise RuntimeError(
            "process_group with torch.func, forward-mode AD or a second derivative: ranks exchange tables only in "
            "eager forward and backward passes; leave process_group out for the statistics of this process alone"
        )


def _cast(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)  # `to` takes time, too


def _fold(x: Tensor, channel_dim: int) -> Tensor:
    """View x as (B, C, *spatial) with at least one spatial dimension."""
    return x.unsqueeze(2) if x.ndim == 2 else x if channel_dim == 1 else x.movedim(channel_dim, 1)


def _unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return y.squeeze(2) if x.ndim == 2 else y if channel_dim == 1 else y.movedim(1, channel_dim)

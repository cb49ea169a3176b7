"""Measure → decide → apply: the forward pass of every method, and its backward pass, step by step.

With the pooled statistics mean and rstd, Batch Renormalization's r and d (1 and 0 without it), noise m and k on the
normalized x, weight w and bias b:

    y = w·k·((x - mean)·rstd·r + d - m) + b

r and d are constants, so they are folded into the parameters, w' = w·r and b' = b + w·d, before anything else (they are
not combined with noise). The rest of this file uses w and b for these:

    y = scale·(x - mean) + shift        scale = w·k·rstd,  shift = b - w·k·m

Let a = Σ dy and d = Σ dy·(x - mean) over positions, per sample, and Σ_r the sum over the samples that share a pool r:

    db = Σ a          dw = Σ k·(rstd·d - m·a)        drstd = Σ_r w·k·d        dmean = -Σ_r scale·a

From the last two, the contributing samples determine the gradient of x through the statistics, which is linear in x:
slope·(x - center) + offset.

If the batch is spread over ranks, moments are gathered, so all ranks decide from the whole batch; m, k and the
transformation of x are those of a rank's own samples. In the backward pass, a, d, db and dw are sums over these; their
contributions to drstd and dmean are gathered and summed for each pool over all ranks. So the gradient of x is that of
the losses of all ranks, and db and dw of all ranks sum to those of the whole batch.

With a mask, x is filled at invalid positions and dy is 0 there (`engine.masks`): the passes over x are the same, and
the moments and their pools are those of the valid positions.
"""

from functools import partial

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import (
    NO_NOISE,
    Affine,
    Backend,
    Gradients,
    NoiseTables,
    Normalized,
    Saved,
    folded,
    folded_weight,
)
from ghostnoise.engine.masks import Valid
from ghostnoise.engine.plan import Batch, Correction, DrawnWithHistory, Noise, Normalizer, Plan, positions
from ghostnoise.engine.ranks import Ranks
from ghostnoise.statistics.laws import mean_count
from ghostnoise.statistics.moments import Moments, Stored, arithmetic_dtype, expand_pools, table_dtype
from ghostnoise.statistics.samples import GhostBatch, LinearTerm, pool_all

WHOLE_BATCH = GhostBatch()


def forward(
    backend: Backend, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, ranks: Ranks | None
) -> Normalized:
    """Measure the moments of x, decide on a transformation, and apply it."""
    alone = ranks is None and plan.valid is None
    if alone and (fused := backend.fused_forward(x, weight, bias, plan)) is not None:
        return fused
    plan = plan.evaluated(x.device)
    moments = _measured(backend.moments(x), plan.valid, x, ranks)
    affine, pooled, noise, correction = decide(backend, moments, weight, bias, plan, x, ranks)
    shared = plan.normalizer.contributors.samples_per_pool(x.shape[0]) if ranks is None else 1
    y = backend.transform(x, affine, shared)
    return Normalized(y, moments, pooled, noise, correction, plan.known)


def decide(
    backend: Backend,
    moments: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    x: Tensor,
    ranks: Ranks | None = None,
) -> tuple[Affine, Moments, NoiseTables, Correction | None]:
    """Turn the moments (B, C) of the whole batch into the transformation of x; differentiable except for noise, r, d.

    Returns the transformation, the statistics of all pools (R, C), the noise, and the correction.
    """
    normalizer, noise, reference = plan.normalizer, plan.noise, plan.known
    dtype, counts = arithmetic_dtype(x), plan.counts
    pooled = backend.pool(normalizer.contributors, moments, None if reference is None else reference.moments, counts)
    correction = reference.correction(pooled, normalizer, dtype) if reference is not None and plan.corrects else None
    weight, bias = folded(correction, weight, bias, dtype)
    shared = normalizer.contributors.samples_per_pool(moments.mean.shape[0])
    own, shared = _own_statistics(pooled, shared, ranks)
    coefficients = backend.coefficients(normalizer, own, weight, bias, dtype)
    if noise is None:
        affine = Affine(coefficients.center, coefficients.factor, coefficients.shift)
        return affine, pooled, NO_NOISE, correction
    # Detached rather than only without gradients, which forward-mode tangents would pass.
    samples, whole = moments.detach(), pooled.detach()
    unit, several = coefficients.rstd.detach().square().reciprocal(), whole.mean.shape[0] > 1
    earlier = noise.stored if isinstance(noise, DrawnWithHistory) else None
    if several:
        if earlier is not None:
            mean, var = backend.pool(WHOLE_BATCH, samples, counts=counts)
            earlier = Stored(*_rescaled(Moments(*earlier[:2]), mean, normalizer.rstd(var)), earlier.counts)
        samples = _normalized_moments(normalizer, samples, whole)
        whole = backend.pool(WHOLE_BATCH, samples, counts=counts)
        unit = torch.ones_like(whole.var)
    batch = _batch(backend, samples, whole, unit, counts, x, several)
    if isinstance(noise, DrawnWithHistory) and earlier is not None:
        batch = _extended(backend, batch, earlier, noise.weighted)
    tables, affine = backend.noisy_affine(noise, batch, coefficients, weight, bias, shared)
    return affine, pooled, tables, correction


def backward(
    backend: Backend,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    plan: Plan,
    saved: Saved,
    ranks: Ranks | None,
    needs_x: bool,
) -> Gradients:
    """Return the gradients of x, weight and bias, as derived above."""
    alone = ranks is None and plan.valid is None
    if alone and (fused := backend.fused_backward(dy, x, weight, plan, saved, needs_x)) is not None:
        return fused
    weight = folded_weight(saved.correction, weight, arithmetic_dtype(x))
    return _backward(backend, dy, x, weight, plan, saved, ranks, needs_x).unfolded(saved.correction)


def _backward(
    backend: Backend,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    plan: Plan,
    saved: Saved,
    ranks: Ranks | None,
    needs_x: bool,
) -> Gradients:
    normalizer, contributors, noise = plan.normalizer, plan.normalizer.contributors, saved.noise
    reference = None if plan.known is None else plan.known.moments
    dtype, batch_size = arithmetic_dtype(x), x.shape[0] if ranks is None else ranks.batch_size
    kept = sample_moments(x, saved.kept) if contributors.keeps_moments and ranks is None else saved.kept
    pooled = backend.pool(contributors, kept, reference, plan.counts) if contributors.keeps_moments else kept
    own, shared = _own_statistics(pooled, contributors.samples_per_pool(batch_size), ranks)
    coefficients = backend.coefficients(normalizer, own, weight, None, dtype)
    sums = backend.gradient_sums(dy, x, coefficients.center, shared)
    g_weight, g_bias, gradient = backend.statistics_gradient(
        normalizer, coefficients, own.var, weight, *sums, noise, shared
    )
    if not needs_x:
        return Gradients(None, g_weight, g_bias)
    all_shared = contributors.samples_per_pool(batch_size)
    if ranks is not None:
        gradient = ranks.add(gradient, pooled.mean.shape[0], all_shared)
    given = (contributors, kept, pooled, gradient, reference, batch_size, positions(x), plan.counts)
    term = backend.linear_term(*given)
    if ranks is not None:
        term = LinearTerm(*(ranks.own(table, all_shared) for table in term))
    # x - center is computed with a rounded center; the offset compensates for the rounding.
    center, slope, offset = term
    rounded = center.to(dtype)
    if center is pooled.mean:
        offset = torch.addcmul(offset, slope, coefficients.rounding)
    elif center.dtype != dtype:
        offset = offset + slope * (rounded - center)
    term = LinearTerm(rounded, slope.to(dtype), offset.to(dtype))
    dx = backend.input_gradient(dy, x, coefficients.factor, noise.k, term, shared)
    return Gradients(dx, g_weight, g_bias)


def sample_moments(x: Tensor, kept: Moments) -> Moments:
    """Return the moments of the samples (B, C) that were kept, or those of a single position if none were."""
    if kept.var.numel() or positions(x) > 1:
        return kept
    mean = x.detach().flatten(1).to(table_dtype(x.device))
    return Moments(mean, torch.zeros_like(mean))


def inject_tables(
    backend: Backend, x: Tensor, noise: Noise, ranks: Ranks | None, valid: Valid | None = None
) -> tuple[Affine, Moments | None]:
    """Measure x and decide on noise alone: `(x - m)·k`, as a transformation with constant tables.

    Also returns the moments (B, C) of the whole batch, or None if a fused call did not return them.
    """
    if ranks is None and valid is None and (fused := backend.fused_noise(x, noise)) is not None:
        return fused, None
    moments = _measured(backend.moments(x), valid, x, ranks)
    counts, dtype = None if valid is None else valid.counts, arithmetic_dtype(x)
    whole = backend.pool(WHOLE_BATCH, moments, counts=counts)
    batch = _batch(backend, moments, whole, torch.ones_like(whole.var), counts, x)
    if isinstance(noise, DrawnWithHistory):
        batch = _extended(backend, batch, noise.stored, noise.weighted)
    return noise_alone(backend, noise, batch, dtype), moments


def noise_alone(backend: Backend, noise: Noise, batch: Batch, dtype: torch.dtype) -> Affine:
    """Decide on noise of a batch that is not normalized: `(x - m)·k`."""
    m, k = backend.noise_tables(noise, batch, dtype)
    zero = torch.zeros(batch.whole.mean.shape, dtype=dtype, device=batch.whole.mean.device)
    return Affine(zero if m is None else m, torch.ones_like(zero) if k is None else k, zero)


def _extended(backend: Backend, batch: Batch, stored: Stored, weighted: bool) -> Batch:
    """Return a batch with the stored samples, in the units of its moments, after its own."""
    dtype, counts = batch.whole.mean.dtype, batch.counts
    pairs = zip(batch.moments, (stored.mean, stored.var), strict=True)
    moments = Moments(*(torch.cat([table.to(dtype), earlier.to(dtype)]) for table, earlier in pairs))
    if not weighted:
        return batch._replace(moments=moments, whole=backend.pool(WHOLE_BATCH, moments))
    if counts is None:
        counts = stored.counts.new_full(batch.moments.mean.shape[:1], batch.spatial)  # type: ignore[arg-type]
    counts = torch.cat([counts.to(dtype), stored.counts.to(dtype)])
    return batch._replace(moments=moments, whole=pool_all(*moments, counts[:, None]), counts=counts)


def valid_moments(moments: Moments, valid: Valid | None, x: Tensor, ranks: Ranks | None = None) -> Moments:
    """Return the moments of the samples of x (B, C) over their valid positions, given those over all positions."""
    if valid is None:
        return moments
    return valid.moments(moments, positions(x), valid.counts if ranks is None else ranks.rows(valid.counts))


def _measured(moments: Moments, valid: Valid | None, x: Tensor, ranks: Ranks | None) -> Moments:
    """Return the moments of all samples of the batch, given those of the samples of x over all positions."""
    moments = valid_moments(moments, valid, x, ranks)
    return moments if ranks is None else ranks.gather(moments)


def _batch(
    backend: Backend,
    samples: Moments,
    whole: Moments,
    unit: Tensor,
    counts: Tensor | None,
    x: Tensor,
    normalized: bool = False,
) -> Batch:
    pool_drawn = partial(backend.pool_drawn, dtype=arithmetic_dtype(x))
    if counts is None:
        return Batch(samples, whole, unit, positions(x), pool_drawn, normalized)
    return Batch(samples, whole, unit, mean_count(counts), pool_drawn, normalized, counts.flatten())


def _normalized_moments(normalizer: Normalizer, samples: Moments, pooled: Moments) -> Moments:
    """Return the moments (B, C) that the samples have after normalization."""
    batch_size = samples.mean.shape[0]
    shared = normalizer.contributors.samples_per_pool(batch_size)
    tables = (pooled.mean, normalizer.rstd(pooled.var))
    return _rescaled(samples, *(expand_pools(table, batch_size, shared) for table in tables))


def _rescaled(samples: Moments, center: Tensor, scale: Tensor) -> Moments:
    """Return the moments that samples have after `(x - center) * scale`."""
    return Moments((samples.mean - center) * scale, samples.var * scale.square())


def _own_statistics(pooled: Moments, samples_per_pool: int, ranks: Ranks | None) -> tuple[Moments, int]:
    """Return the statistics of this rank's samples, and how many consecutive samples share a row of them."""
    if ranks is None:
        return pooled, samples_per_pool
    return Moments(*(ranks.own(table, samples_per_pool) for table in pooled)), 1

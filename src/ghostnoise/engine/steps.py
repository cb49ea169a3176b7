"""The fused form of a normalizer, forward and backward: step by step, or at once where a backend can.

A backend may have `normalize` and `normalize_gradient`: the steps here in one call, with the same results, or None for
what they do not cover.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.distributed import Ranks
from ghostnoise.engine.backends.aten import NoiseTables
from ghostnoise.engine.decide import decide, own_ramp, own_statistics
from ghostnoise.methods import Noise, Normalizer
from ghostnoise.moments import Moments, arithmetic_dtype


class Normalized(NamedTuple):
    """The result, and what was made on the way: moments (B, C), the statistics of pools (R, C), and noise."""

    y: Tensor
    moments: Moments
    stats: Moments
    noise: NoiseTables


class Gradients(NamedTuple):
    """The gradients of x, if it needs one, and of weight and bias."""

    x: Tensor | None
    weight: Tensor
    bias: Tensor


def forward(
    passes: ModuleType,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalizer: Normalizer,
    noise: Noise | None,
    ranks: Ranks | None,
) -> Normalized:
    """Measure x, decide, and apply."""
    if ranks is None and hasattr(passes, "normalize"):
        made: Normalized | None = passes.normalize(x, weight, bias, normalizer, noise)
        if made is not None:
            return made
    moments = passes.moments(x)
    moments = moments if ranks is None else ranks.gather(moments)
    affine, stats, tables = decide(passes, moments, weight, bias, normalizer, noise, arithmetic_dtype(x), ranks)
    y = passes.transform(x, *affine, normalizer.who.each(x.shape[0]) if ranks is None else 1)
    return Normalized(y, moments, stats, tables)


def backward(
    passes: ModuleType,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    normalizer: Normalizer,
    kept: Moments,
    noise: NoiseTables,
    ranks: Ranks | None,
    needs_x: bool,
) -> Gradients:
    """The gradients, as `op` derives them."""
    if ranks is None and hasattr(passes, "normalize_gradient"):
        made: Gradients | None = passes.normalize_gradient(dy, x, weight, normalizer, kept, noise, needs_x)
        if made is not None:
            return made
    dtype, batch_size = arithmetic_dtype(x), x.shape[0] if ranks is None else ranks.batch_size
    stats = normalizer.who.recall(kept, passes)
    own, each = own_statistics(stats, normalizer.who.each(batch_size), ranks)
    standard = passes.standardize(normalizer, own, weight, None, dtype)
    total, moment = passes.gradient_sums(dy, x, standard.center, each)
    g_weight, g_bias, gradient = passes.pull(normalizer, standard, own.var, weight, total, moment, noise, each)
    if not needs_x:
        return Gradients(None, g_weight, g_bias)
    known = (kept, stats, gradient, batch_size, math.prod(x.shape[2:]), passes)
    center, slope, offset = own_ramp(normalizer.who, ranks, *known)
    if center is stats.mean:
        center, offset = standard.center, torch.addcmul(offset, slope, standard.lost)
    elif center.dtype != dtype:
        rounded = center.to(dtype)
        center, offset = rounded, offset + slope * (rounded - center)
    ramp = (center, slope.to(dtype), offset.to(dtype))
    return Gradients(passes.input_gradient(dy, x, standard.factor, *ramp, each, noise[1]), g_weight, g_bias)

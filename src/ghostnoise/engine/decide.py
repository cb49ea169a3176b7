"""Between the passes: from the moments of a batch to what is applied to x, and back.

Where ranks share a batch, all of them decide from the moments and statistics of all its samples, and apply to x what is
for their own.
"""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.distributed import Ranks
from ghostnoise.engine.backends import aten
from ghostnoise.ghosts import Ramp, Who
from ghostnoise.methods import Batch, Noise, Normalizer
from ghostnoise.moments import Affine, Moments, spread


class Decision(NamedTuple):
    """What is applied to x and the noise in it, rows for the samples of x; and the statistics of all pools (R, C)."""

    affine: Affine
    stats: Moments
    noise: aten.NoiseTables


def decide(
    passes: ModuleType,
    moments: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    normalizer: Normalizer,
    noise: Noise | None,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> Decision:
    """From the moments (B, C) of the whole batch to what is applied to x; differentiable, but for the noise."""
    stats = normalizer.who.pool(moments, None if passes is aten else passes)
    own, each = own_statistics(stats, normalizer.who.each(moments.mean.shape[0]), ranks)
    standard = passes.standardize(normalizer, own, weight, bias, dtype)
    if noise is None:
        return Decision(Affine(standard.center, standard.factor, standard.shift), stats, (None, None))
    # Detached, and not only without gradients: forward-mode tangents would pass. Where all samples share one pool, its
    # row stands for all of them.
    samples, pools = constant(moments), constant(stats)
    whole = pools if pools.mean.shape[0] == 1 else passes.everyone(samples, None)
    unit = standard.rstd.detach().square().reciprocal()
    unit = unit if unit.shape[0] == 1 or ranks is not None else spread(unit, samples.mean.shape[0], each)
    batch = Batch(samples, whole, unit, partial(passes.draws, dtype=dtype))
    tables, affine = passes.blend(noise, batch, standard, weight, bias, each)
    return Decision(affine, stats, tables)


def own_statistics(stats: Moments, each: int, ranks: Ranks | None) -> tuple[Moments, int]:
    """The statistics that this rank's samples look at, and how many consecutive ones share a row; from those of all."""
    return (stats, each) if ranks is None else (Moments(*(ranks.own(table, each) for table in stats)), 1)


def own_ramp(
    who: Who,
    ranks: Ranks | None,
    kept: Moments,
    stats: Moments,
    gradient: Moments,
    batch_size: int,
    spatial: int,
    passes: ModuleType,
) -> Ramp:
    """The gradient of x through the statistics, from what this rank's samples add to the gradient of these."""
    if ranks is None:
        return who.ramp(kept, stats, gradient, batch_size, spatial, passes)
    each = who.each(batch_size)
    gradient = ranks.add(gradient, stats.mean.shape[0], each)
    ramp = who.ramp(kept, stats, gradient, batch_size, spatial, passes)
    return Ramp(*(ranks.own(table, each) for table in ramp))


def constant(moments: Moments) -> Moments:
    """The same, without a gradient."""
    return Moments(moments.mean.detach(), moments.var.detach())

"""The paper's double normalization: ghost batch norm seen as batch norm and noise."""

from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine import op
from ghostnoise.ghosts import GhostBatch, everyone, ghost_sizes


class Decomposition(NamedTuple):
    """What GBN(x) = GBN(BN(x)) isolates, per channel (C,) and per ghost batch (G, C).

    `ghost_mean` and `ghost_std` are the statistics μ̂_g and σ̂_g of the ghost batches of the normalized batch; GBN is
    BN where they are 0 and 1. `shift` = σ·μ̂_g = μ_g - μ and `scale` = σ̂_g = σ_g/σ are the same noise in the units
    of x. `sizes` are the samples in each ghost batch.
    """

    mean: Tensor
    std: Tensor
    ghost_mean: Tensor
    ghost_std: Tensor
    shift: Tensor
    scale: Tensor
    sizes: list[int]


@torch.no_grad()
def decompose(x: Tensor, ghost_size: int, *, channel_dim: int = 1) -> Decomposition:
    """Split what ghost batch norm does to a batch into batch norm's part and ghost noise (eqs. 2-6, without eps).

    A channel that is constant over the batch has no noise: 0 and 1.

    >>> x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    >>> d = decompose(x, ghost_size=16)
    >>> torch.allclose(x[:16].mean((0, 2, 3)), d.mean + d.std * d.ghost_mean[0])
    True
    """
    ghost_size = checks.ghost_size(ghost_size)
    checks.layout(x, "decompose", channel_dim)
    checks.trainable(x.shape, "decompose")
    moments = op.measure(x, channel_dim)
    whole, ghosts = everyone(*moments), GhostBatch(ghost_size).pool(moments)
    std, constant = whole.var.sqrt(), whole.var == 0
    shift = ghosts.mean - whole.mean
    scale = (ghosts.var.sqrt() / std).masked_fill(constant, 1)
    hat = (shift / std).masked_fill(constant, 0)
    dtype, sizes = torch.promote_types(x.dtype, torch.float32), ghost_sizes(x.shape[0], ghost_size)
    mean, std, shift, scale, hat = (table.to(dtype) for table in (whole.mean[0], std[0], shift, scale, hat))
    return Decomposition(mean, std, ghost_mean=hat, ghost_std=scale, shift=shift, scale=scale, sizes=sizes)

"""Shuffled ghost batch normalization: the ghost batches of each step are a random partition of the batch."""

from functools import partial

import torch
from torch import Generator, Tensor, nn

from ghostnoise import checks
from ghostnoise.engine.ranks import Group, named
from ghostnoise.engine.recompute import drawing
from ghostnoise.methods.base import NormLayer, checked, decide_batch_norm
from ghostnoise.methods.ghost_batch_norm import check_ghost_values
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.randomness import drawn_by
from ghostnoise.tables import Affine, Moments, normalize, partition, whole_batch

__all__ = [
    "ShuffledGhostBatchNorm",
    "ShuffledGhostBatchNorm1d",
    "ShuffledGhostBatchNorm2d",
    "ShuffledGhostBatchNorm3d",
    "shuffled_ghost_batch_norm",
]


def shuffled_ghost_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None,
    indices: Tensor | None = None,
    generator: Generator | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize the ghost batches of the shuffled batch, each with its own statistics; the order of samples stays.

    The result is that of `ghost_batch_norm` for `input[indices]`, in the order of `input`. `indices` is a permutation
    (B,) of the samples, which several calls may share; if it is None, one is drawn. With the samples of several ranks,
    it must be given, the same on all ranks. A batch of fewer than 2 * `ghost_size` samples is one ghost batch, and
    draws nothing. Evaluation, running statistics, shapes and the other arguments are those of `ghost_batch_norm`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    checks.generator(generator)
    call = checked(
        "shuffled_ghost_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    size = call.extent.shape[0]
    if ghost_size is None:
        checks.no_draws("indices", indices)
    elif indices is not None:
        checks.permutation(indices, size, "of all ranks if there are several")
        indices = indices.to(input.device, torch.int64, copy=True)  # the backward pass needs them unchanged
    if ghost_size is None or size < 2 * ghost_size:
        check_ghost_values(call, ghost_size, "shuffled_ghost_batch_norm")
        return call.train(partial(decide_batch_norm, eps), "unbiased" if ghost_size is None else whole_batch)
    if indices is None and call.extent.ranks is not None:
        raise ValueError(
            f"process_group={named(process_group)!r} without indices: ranks do not share a permutation; give indices=, "
            "the same on all ranks, or process_group=None to shuffle each process's own batch"
        )
    if indices is None:
        indices = torch.randperm(size, device=input.device, **drawn_by(drawing(generator)))
    check_ghost_values(call, ghost_size, "shuffled_ghost_batch_norm", indices)
    pools = partial(shuffled_ghost_batches, indices=indices, ghost_size=ghost_size)
    return call.train(partial(_decide, eps, pools), pools)


def shuffled_ghost_batches(m: Moments, indices: Tensor, ghost_size: int) -> Moments:
    """Pool, for each sample, its ghost batch of the shuffled batch (B, C)."""
    pools, own = partition(m, indices, ghost_size), indices.argsort()
    return Moments(pools.mean[own], pools.var[own], pools.n[own] if isinstance(pools.n, Tensor) else pools.n)


def _decide(eps: float, pools: "partial[Moments]", m: Moments, weight: Tensor | None, bias: Tensor | None) -> Affine:
    return normalize(pools(m), eps).then(weight, bias)


class ShuffledGhostBatchNorm(NormLayer):
    """Normalize the ghost batches of the shuffled batch, each with its own statistics (SGBN).

    Ghost batch norm, whose ghost batches are a new random partition of the batch in each step, whatever the order of
    the samples. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        ghost_size: the number of samples in a ghost batch, N; `None` disables ghost batches.
        generator: draws the permutations; None is the default generator of the device.

    Examples:
        >>> layer = ShuffledGhostBatchNorm2d(16, ghost_size=32)
        >>> layer(torch.randn(100, 16, 8, 8)).shape  # ghost batches of 32, 32 and 36 random samples
        torch.Size([100, 16, 8, 8])
    """

    function = staticmethod(shuffled_ghost_batch_norm)
    options = ("ghost_size", "generator", *NormLayer.options)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ghost_size: int | None,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.generator(generator)
        self.ghost_size, self.generator = checks.ghost_size_or_none(ghost_size), generator


class ShuffledGhostBatchNorm1d(ShuffledGhostBatchNorm, nn.BatchNorm1d):
    """Shuffled ghost batch norm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class ShuffledGhostBatchNorm2d(ShuffledGhostBatchNorm, nn.BatchNorm2d):
    """Shuffled ghost batch norm of (B, C, H, W)."""

    ndims = (4,)


class ShuffledGhostBatchNorm3d(ShuffledGhostBatchNorm, nn.BatchNorm3d):
    """Shuffled ghost batch norm of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="sgbn",
        label="SGBN",
        title="Shuffled ghost batch normalization",
        equation="y = (x - μ_g) / sqrt(σ_g² + eps) over the ghost batches of N samples of the shuffled batch",
        card="shuffled-ghost-batch-norm.md",
        norm=ShuffledGhostBatchNorm,
        partitions=True,
    )
)

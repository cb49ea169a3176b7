"""Normalizers: batch norm, ghost batch norm, exclusive batch norm, and EvalNorm."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise import checks, methods
from ghostnoise.distributed import Extent, Group, Ranks, meet
from ghostnoise.engine import op
from ghostnoise.functional.running import Running, ghost_average, recomputing, whole_batch, whole_batch_unbiased
from ghostnoise.moments import Moments, table_dtype


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Normalize each channel with the mean and variance of the whole batch.

    The arguments of `torch.nn.functional.batch_norm`, and two of a layer's: `num_batches_tracked` is counted up, and
    with `momentum=None` gives the cumulative average. Without running buffers, the batch's statistics are used in
    evaluation too. With a `process_group`, in training the batch is that of all its ranks, which hold equal parts of it
    unless they say `uneven`.

    Shape: (B, C, *spatial) with 2 to 5 dimensions, or the channels in `channel_dim`.
    """
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(x, "batch_norm", running, weight, bias, training, channel_dim, process_group, uneven)
    if not training:
        return infer(x, running, weight, bias, eps, channel_dim)
    population = partial(whole_batch_unbiased, spatial=extent.spatial)
    return train(x, running, weight, bias, methods.batch(eps), population, channel_dim, extent.ranks)


def ghost_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None,
    running_var_from: Literal["ghost", "batch"] = "ghost",
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Normalize consecutive ghost batches of `ghost_size` samples, each with its own statistics (eq. 1).

    Left-over samples join the last ghost batch; a batch smaller than `ghost_size` is one ghost batch, and with
    `ghost_size=None` every batch is. The running variance follows the ghost batches' biased variances, or with
    `running_var_from="batch"` the whole batch's as in `batch_norm`. Evaluation is that of `batch_norm`, as are shapes
    and the other arguments.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    checks.choice("running_var_from", running_var_from, ("ghost", "batch"))
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(x, "ghost_batch_norm", running, weight, bias, training, channel_dim, process_group, uneven)
    if not training:
        return infer(x, running, weight, bias, eps, channel_dim)
    checks.ghost_values(extent.shape, "ghost_batch_norm", extent.spatial, ghost_size)
    method = methods.ghost(eps, ghost_size)
    population = (
        partial(ghost_average, ghost_size=ghost_size)
        if running_var_from == "ghost"
        else partial(whole_batch_unbiased, spatial=extent.spatial)
    )
    return train(x, running, weight, bias, method, population, channel_dim, extent.ranks)


def exclusive_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None = None,
    min_std: float = 0.0,
    clamp_output: float | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Normalize each sample with the statistics of the others in its ghost batch (eqs. 7-8).

    `ghost_size=None` takes the whole batch. In training the output has no bound: `min_std` floors the standard
    deviation that is divided by, `clamp_output` bounds the normalized value before weight and bias. The running
    statistics are the whole batch's, biased. Evaluation is that of `batch_norm`, as are shapes and other arguments.
    """
    size = checks.ghost_size_or_none(ghost_size, least=2)
    checks.number("min_std", min_std, 0)
    if clamp_output is not None:
        checks.number("clamp_output", clamp_output, 0, open_low=True)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(x, "exclusive_batch_norm", running, weight, bias, training, channel_dim, process_group, uneven)
    if not training:
        return infer(x, running, weight, bias, eps, channel_dim)
    checks.other_values(extent.shape, extent.spatial, size)
    method = methods.exclusive(eps, size, min_std)
    if clamp_output is None:
        return train(x, running, weight, bias, method, whole_batch, channel_dim, extent.ranks)
    # No affine transformation clamps: the one option that takes a pass over x of its own, in no less than float32.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = train(wide, running, None, None, method, whole_batch, channel_dim, extent.ranks).clamp(
        -clamp_output, clamp_output
    )
    shape = [-1 if dim == channel_dim % x.ndim else 1 for dim in range(x.ndim)]
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def eval_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    ghost_size: int | None,
    alpha: float | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Train as `ghost_batch_norm`; in evaluation, mix each sample's own moments into the running statistics.

    The share `alpha` is that of oneself in a ghost batch, 1/`ghost_size`, unless given; with `ghost_size=None` it must
    be. Evaluation without running buffers is that of `batch_norm`: the batch's statistics have each sample in them
    already.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    share = checks.share(alpha, ghost_size)
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    extent = check(x, "eval_norm", running, weight, bias, training, channel_dim, process_group, uneven)
    if training:
        checks.ghost_values(extent.shape, "eval_norm", extent.spatial, ghost_size)
        method, average = methods.ghost(eps, ghost_size), partial(ghost_average, ghost_size=ghost_size)
        return train(x, running, weight, bias, method, average, channel_dim, extent.ranks)
    if running.mean is None or running.var is None or x.numel() == 0:
        return infer(x, running, weight, bias, eps, channel_dim)
    table = table_dtype(x.device)
    population = Moments(running.mean.to(table), running.var.to(table))
    method = methods.mixed(eps, population, share)
    return op.normalize(x, method, None, weight, bias, channel_dim)[0]


def check(
    x: Tensor,
    name: str,
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    channel_dim: int,
    process_group: Group,
    uneven: bool,
) -> Extent:
    """The checks that all normalizers share; returns what the batch is, in training with that of the other ranks."""
    channels = {"running_mean": running.mean, "running_var": running.var, "weight": weight, "bias": bias}
    _, spatial = checks.layout(x, name, channel_dim, channels)
    extent = meet(x, spatial, process_group if training else None, uneven)
    if training:
        checks.trainable(extent.shape, name)
        checks.several_values(extent.shape, spatial)
    return extent


def train(
    x: Tensor,
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    method: methods.Normalizer,
    population: Callable[[op.Seen], Moments],
    channel_dim: int,
    ranks: Ranks | None = None,
    noise: methods.Noise | None = None,
) -> Tensor:
    """Normalize as `method` says, and move the running buffers, if any, towards the `population` moments."""
    y, seen = op.normalize(x, method, noise, weight, bias, channel_dim, ranks)
    if (not running.absent or running.num_batches_tracked is not None) and not recomputing():
        running.update(population(seen), seen.passes)
    return y


def infer(
    x: Tensor, running: Running, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int
) -> Tensor:
    """Plain `torch.nn.functional.batch_norm`, with the running buffers or else the batch's own statistics."""
    folded = x if channel_dim == 1 else x.movedim(channel_dim, 1)  # exported, a move to where it is would be an op
    y = F.batch_norm(folded, running.mean, running.var, weight, bias, running.absent, 0.0, eps)
    return y if channel_dim == 1 else y.movedim(1, channel_dim)

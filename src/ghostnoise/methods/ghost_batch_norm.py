"""Ghost batch normalization: small normalization batches inside a large one; and its decomposition into noise."""

from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.engine import general
from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.methods.base import Call, NormLayer, Towards, checked, update_running
from ghostnoise.methods.registry import MeterSpec, MethodSpec, register
from ghostnoise.tables import (
    Affine,
    Moments,
    counts,
    ghost_batches,
    ghost_rows,
    ghost_sizes,
    normalize,
    whole_batch,
)
from ghostnoise.torch_private import in_backward

__all__ = [
    "Decomposition",
    "GhostBatchNorm",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "decompose",
    "ghost_batch_norm",
]

RunningVarFrom = Literal["ghost", "batch", "each", "each-scaled"]
RUNNING_VAR_FROM = get_args(RunningVarFrom)


def ghost_batch_norm(
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
    running_var_from: RunningVarFrom = "ghost",
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize consecutive ghost batches of `ghost_size` samples, each with its own statistics (eq. 1).

    The remaining samples join the last ghost batch; a batch smaller than `ghost_size` is one ghost batch, and
    `ghost_size=None` disables ghost batches. The running variance is updated towards the average of the ghost batches'
    biased variances, or with `running_var_from="batch"` towards that of the whole batch as in `batch_norm`. With "each"
    and "each-scaled" the running statistics are updated once per ghost batch, as `GhostBatchNorm` describes.
    Evaluation, shapes and the other arguments are those of `batch_norm`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    if running_var_from not in RUNNING_VAR_FROM:
        checks.choice("running_var_from", running_var_from, RUNNING_VAR_FROM)
    call = checked(
        "ghost_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    check_ghost_values(call, ghost_size, "ghost_batch_norm")
    decide = partial(decide_ghost_batch_norm, eps, ghost_size)
    tracks = running_mean is not None or running_var is not None or num_batches_tracked is not None
    if tracks and running_var_from in ("each", "each-scaled"):
        y, m = call.normalize(decide)
        _update_for_each(call, m, ghost_size, scaled=running_var_from == "each-scaled")
        return y
    towards: Towards = partial(ghost_batches, ghost_size=ghost_size) if running_var_from == "ghost" else "unbiased"
    return call.train(decide, towards, Plan(eps, ghost_size))


def decide_ghost_batch_norm(
    eps: float, ghost_size: int | None, m: Moments, weight: Tensor | None, bias: Tensor | None
) -> Affine:
    """Normalize each ghost batch with its own statistics."""
    return normalize(ghost_batches(m, ghost_size), eps, 0.0, weight, bias)


def check_ghost_values(call: Call, ghost_size: int | None, name: str, order: Tensor | None = None) -> None:
    """Check that each ghost batch, of the samples in this `order`, has more than one value per channel."""
    extent, valid = call.extent, None
    if extent.counts is not None:
        values = extent.counts if order is None else extent.counts[order]
        valid = torch.stack([part.sum() for part in values.split(_sizes(values.shape[0], ghost_size))])
    checks.ghost_values(extent.shape, name, extent.spatial, ghost_size, valid)
    if ghost_size is not None and extent.shape[0] < 2 * ghost_size:
        checks.few_samples(
            f"{name} of {call.input.shape[call.channel_dim]} channels got a batch of fewer than {2 * ghost_size} "
            f"samples with ghost_size={ghost_size}: with a single ghost batch it is plain batch norm; use larger "
            "batches or a smaller ghost_size",
            call.num_batches_tracked,
        )


def _sizes(batch_size: int, ghost_size: int | None) -> list[int]:
    return [batch_size] if ghost_size is None else ghost_sizes(batch_size, ghost_size)


def _update_for_each(call: Call, m: Moments, ghost_size: int | None, scaled: bool) -> None:
    """Update the running buffers once per ghost batch, as `nn.BatchNorm*d` does if it is called for each of them."""
    mean, var, tracked = call.buffers
    if in_backward():
        return
    ghosts, sizes = ghost_rows(m, ghost_size), _sizes(m.mean.shape[0], ghost_size)
    number, momentum = len(sizes), call.momentum
    momentum = momentum / number if scaled and momentum else momentum

    def column(numbers: list[float]) -> Tensor:
        return m.mean.new_tensor(numbers).unsqueeze(1)

    if isinstance(m.n, Tensor):  # NaN for fewer than 2 values, which do not update anything
        valid = counts(ghosts)
        factors = torch.where(valid > 1, valid / (valid - 1), torch.nan)
    else:
        factors = column([size * m.n / (size * m.n - 1) for size in sizes])
    stats = Moments(ghosts.mean, ghosts.var * factors)
    if not momentum or isinstance(m.n, Tensor):  # a cumulative average, or ghost batches that may be empty
        for row in range(number):
            rows = Moments(*(table[row : row + 1] for table in stats[:2]))
            update_running(mean, var, tracked, momentum, rows)
        return
    # In closed form: after all updates, ghost batch g has the weight momentum * (1 - momentum)^(number - 1 - g).
    total = 1 - (1 - momentum) ** number
    weights = column([momentum * (1 - momentum) ** (number - 1 - row) / total for row in range(number)])
    before = None if tracked is None else tracked.clone()
    averages = Moments(*((weights * table).sum(0, keepdim=True) for table in stats[:2]))
    update_running(mean, var, tracked, total, averages)
    if tracked is not None and before is not None:
        tracked.add_((tracked - before) * (number - 1))  # 0 if the statistics were not finite


class GhostBatchNorm(NormLayer):
    """Normalize consecutive ghost batches of `ghost_size` samples, each with its own statistics (GBN, eq. 1).

    The remaining samples join the last ghost batch, so that none is smaller than `ghost_size`; a smaller batch is one
    ghost batch. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        ghost_size: the number of samples in a ghost batch, N; `None` disables ghost batches.
        running_var_from: "ghost" updates the running variance towards the average of the ghost batches' biased
            variances, "batch" towards the unbiased variance of the whole batch. "each" updates both running statistics
            once per ghost batch, with its mean and unbiased variance, so that `momentum` is applied several times per
            batch, as in pytorch-tabnet; "each-scaled" divides `momentum` by the number of ghost batches, as Composer.

    Examples:
        >>> layer = GhostBatchNorm2d(16, ghost_size=32)
        >>> y = layer(torch.randn(100, 16, 8, 8))  # ghost batches of 32, 32 and 36
        >>> y[:32].mean().abs() < 1e-5
        tensor(True)
    """

    function = staticmethod(ghost_batch_norm)
    options = ("ghost_size", "running_var_from", *NormLayer.options)

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
        running_var_from: RunningVarFrom = "ghost",
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.choice("running_var_from", running_var_from, RUNNING_VAR_FROM)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.running_var_from = running_var_from


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d):
    """Ghost batch norm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d):
    """Ghost batch norm of (B, C, H, W)."""

    ndims = (4,)


class GhostBatchNorm3d(GhostBatchNorm, nn.BatchNorm3d):
    """Ghost batch norm of (B, C, D, H, W)."""

    ndims = (5,)


class Decomposition(NamedTuple):
    """The parts that GBN(x) = GBN(BN(x)) separates, per channel (C,) and per ghost batch (G, C).

    `ghost_mean` and `ghost_std` are the statistics μ̂_g and σ̂_g of the ghost batches of the normalized batch; GBN equals
    BN if they are 0 and 1. `shift` = σ·μ̂_g = μ_g - μ and `scale` = σ̂_g = σ_g/σ are the same noise in the units of x.
    `sizes` are the numbers of samples in the ghost batches.
    """

    mean: Tensor
    std: Tensor
    ghost_mean: Tensor
    ghost_std: Tensor
    shift: Tensor
    scale: Tensor
    sizes: list[int]


@torch.no_grad()
def decompose(input: Tensor, ghost_size: int, *, channel_dim: int = 1) -> Decomposition:
    """Decompose ghost batch norm of a batch into batch norm and ghost noise (eqs. 2-6, without eps).

    A channel that is constant over the batch has no noise: 0 and 1.

    Examples:
        >>> x = torch.randn(64, 3, 8, 8, dtype=torch.float64)
        >>> d = decompose(x, ghost_size=16)
        >>> torch.allclose(x[:16].mean((0, 2, 3)), d.mean + d.std * d.ghost_mean[0])
        True
    """
    ghost_size = checks.ghost_size(ghost_size)
    checks.layout(input, "decompose", channel_dim)
    checks.trainable(input.shape, "decompose")
    m = general.measure(input, channel_dim)
    whole, ghosts = whole_batch(m), ghost_rows(m, ghost_size)
    std, constant = whole.var.sqrt(), whole.var == 0
    shift = ghosts.mean - whole.mean
    scale = (ghosts.var.sqrt() / std).masked_fill(constant, 1)
    hat = (shift / std).masked_fill(constant, 0)
    dtype, sizes = torch.promote_types(input.dtype, torch.float32), ghost_sizes(input.shape[0], ghost_size)
    mean, std, shift, scale, hat = (table.to(dtype) for table in (whole.mean[0], std[0], shift, scale, hat))
    return Decomposition(mean, std, ghost_mean=hat, ghost_std=scale, shift=shift, scale=scale, sizes=sizes)


register(
    MethodSpec(
        name="gbn",
        label="GBN",
        title="Ghost batch normalization",
        equation="y = (x - μ_g) / sqrt(σ_g² + eps) over ghost batches of N samples",
        card="ghost-batch-norm.md",
        norm=GhostBatchNorm,
        partitions=True,
        meter=MeterSpec(sampling="partition"),
    )
)

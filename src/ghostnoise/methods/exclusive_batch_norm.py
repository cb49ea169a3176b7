"""Exclusive batch normalization: each sample is excluded from its own statistics."""

from functools import partial

import torch
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.engine import masks
from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.methods.base import Call, NormLayer, checked
from ghostnoise.methods.registry import MeterSpec, MethodSpec, register
from ghostnoise.tables import Affine, Moments, excluding_sample, mix, normalize

__all__ = [
    "ExclusiveBatchNorm",
    "ExclusiveBatchNorm1d",
    "ExclusiveBatchNorm2d",
    "ExclusiveBatchNorm3d",
    "exclusive_batch_norm",
]


def exclusive_batch_norm(
    input: Tensor,
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
    self_weight: float = 0.0,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize each sample with the statistics of the other samples in its ghost batch (eqs. 7-8).

    `ghost_size=None` takes the whole batch. In training the output has no bound: `min_std` is the least standard
    deviation to divide by, and `clamp_output` bounds the normalized value before weight and bias. `self_weight` is the
    weight a of the sample itself in its statistics, those of the other samples having the rest; it bounds the
    normalized value by sqrt(S/a - 1), S being the number of positions. The running statistics are those of the whole
    batch, with the biased variance. Evaluation, shapes and the other arguments are those of `batch_norm`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size, least=2)
    _check(min_std, clamp_output, self_weight)
    call = checked(
        "exclusive_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    # A mixture of two values has a variance: one value besides the sample itself is enough.
    check_other_values(call, ghost_size, "exclusive_batch_norm", 1 if self_weight else 2)
    decide = partial(decide_exclusive_batch_norm, eps, ghost_size, min_std, self_weight)
    if clamp_output is None:
        plan = None if self_weight else Plan(eps, ghost_size, exclusive=True, min_std=min_std)
        return call.train(decide, "whole", plan)
    # Clamping is not an affine map: this option alone takes a pass over x of its own, in float32 or better.
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    y = call._replace(input=wide, weight=None, bias=None).train(decide, "whole")
    y = y.clamp(-clamp_output, clamp_output)
    shape = [-1 if dim == channel_dim % input.ndim else 1 for dim in range(input.ndim)]
    y = y if weight is None else y * weight.view(shape)
    y = (y if bias is None else y + bias.view(shape)).to(input.dtype)
    return y if call.extent.mask is None else masks.zero(y, call.extent.mask, channel_dim)


def decide_exclusive_batch_norm(
    eps: float,
    ghost_size: int | None,
    min_std: float,
    self_weight: float,
    m: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Affine:
    """Normalize each sample with the statistics of the other samples, mixed with its own by `self_weight`."""
    others = excluding_sample(m, ghost_size)
    if self_weight:
        others = with_sample(others, m, self_weight)
    return normalize(others, eps, min_std, weight, bias)


def with_sample(others: Moments, m: Moments, weight: float) -> Moments:
    """Mix the sample itself into the moments of the others; if these have no values, it is all there is."""
    mixed = mix(others, m, weight)
    if not isinstance(others.n, Tensor):
        return mixed
    pairs = zip(mixed[:2], m[:2], strict=True)
    mean, var = (torch.where(others.n > 0, table, own) for table, own in pairs)
    return Moments(mean, var, m.n)


def check_other_values(call: Call, ghost_size: int | None, name: str, least: int = 2) -> None:
    """Check that `least` values contribute to the statistics of each sample besides the sample itself."""
    extent, valid = call.extent, None
    if extent.counts is not None:
        m = Moments(extent.counts, extent.counts, extent.counts)
        others = excluding_sample(m, ghost_size).n if m.mean.shape[0] > 1 else torch.zeros_like(m.mean)
        valid = others.where(extent.counts > 0, torch.inf)  # type: ignore[union-attr]
    checks.other_values(extent.shape, extent.spatial, ghost_size, name, valid, least)


def _check(min_std: float, clamp_output: float | None, self_weight: float) -> None:
    if min_std != 0.0:
        checks.number("min_std", min_std, 0)
    if self_weight != 0.0:
        checks.number("self_weight", self_weight, 0, 1, open_high=True)
    if clamp_output is not None:
        checks.number("clamp_output", clamp_output, 0, open_low=True)


class ExclusiveBatchNorm(NormLayer):
    """Normalize each sample with the statistics of the other samples in its ghost batch (XBN, eqs. 7-8).

    Training then depends on the sample itself as little as inference does, but the output has no bound, and small ghost
    batches are unstable. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        ghost_size: the number of samples in a ghost batch, 2 or more; None takes the whole batch.
        min_std: the least standard deviation to divide by.
        clamp_output: the largest absolute value of the normalized output, before weight and bias.
        self_weight: the weight of the sample itself in its own statistics, in [0, 1): 1/n makes a ghost batch of n
            samples that of ghost batch norm.

    Examples:
        >>> layer = ExclusiveBatchNorm1d(1, affine=False)
        >>> layer(torch.tensor([[0.0], [1.0], [3.0]]))  # for 0, the others are 1 and 3: mean 2, standard deviation 1
        tensor([[-2.0000],
                [-0.3333],
                [ 4.9999]])
    """

    function = staticmethod(exclusive_batch_norm)
    options = ("ghost_size", "min_std", "clamp_output", "self_weight", *NormLayer.options)
    least_ghost_size = 2

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
        ghost_size: int | None = None,
        min_std: float = 0.0,
        clamp_output: float | None = None,
        self_weight: float = 0.0,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        _check(min_std, clamp_output, self_weight)
        self.ghost_size = checks.ghost_size_or_none(ghost_size, least=2)
        self.min_std, self.clamp_output, self.self_weight = min_std, clamp_output, self_weight


class ExclusiveBatchNorm1d(ExclusiveBatchNorm, nn.BatchNorm1d):
    """Exclusive batch norm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class ExclusiveBatchNorm2d(ExclusiveBatchNorm, nn.BatchNorm2d):
    """Exclusive batch norm of (B, C, H, W)."""

    ndims = (4,)


class ExclusiveBatchNorm3d(ExclusiveBatchNorm, nn.BatchNorm3d):
    """Exclusive batch norm of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="xbn",
        label="XBN",
        title="Exclusive batch normalization",
        equation="y = (x - μ) / sqrt(σ² + eps) over the other samples of the ghost batch",
        card="exclusive-batch-norm.md",
        norm=ExclusiveBatchNorm,
        partitions=True,
        meter=MeterSpec(excludes_self=True, bounded=False),
    )
)

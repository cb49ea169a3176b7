"""EvalNorm: inference depends on the sample itself as training does."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.methods.base import NormLayer, checked
from ghostnoise.methods.ghost_batch_norm import check_ghost_values, decide_ghost_batch_norm
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.tables import Affine, Moments, ghost_batches, mix, normalize

__all__ = ["EvalNorm", "EvalNorm1d", "EvalNorm2d", "EvalNorm3d", "eval_norm"]

SQUARED = "1/N^2"


def eval_norm(
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
    alpha: float | Literal["1/N^2"] | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Train as `ghost_batch_norm`; in evaluation, mix each sample's own moments into the running statistics.

    The weight `alpha` of the sample itself defaults to 1/`ghost_size`, its share in a ghost batch; "1/N^2" is the
    square of that share. It must be a number if `ghost_size` is None. Evaluation without running buffers is that of
    `batch_norm`: each sample already contributes to the statistics of the batch.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    share = _share(alpha, ghost_size)
    call = checked(
        "eval_norm", input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked,
        channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if training:
        check_ghost_values(call, ghost_size, "eval_norm")
        towards = partial(ghost_batches, ghost_size=ghost_size)
        return call.train(partial(decide_ghost_batch_norm, eps, ghost_size), towards, Plan(eps, ghost_size))
    if running_mean is None or running_var is None or input.numel() == 0:
        return call.infer()
    return call.normalize(partial(_decide, eps, share, running_mean, running_var))[0]


def _decide(
    eps: float,
    share: float,
    running_mean: Tensor,
    running_var: Tensor,
    m: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Affine:
    """Normalize each sample with the running statistics, mixed with its own."""
    population = Moments(*(buffer.detach().to(m.mean.dtype)[None] for buffer in (running_mean, running_var)))
    return normalize(mix(population, m, share), eps, 0.0, weight, bias)


def _share(alpha: float | str | None, ghost_size: int | None) -> float:
    """Return the weight of the sample itself: `alpha`, in [0, 1], or for None and "1/N^2" that of the ghost size."""
    if isinstance(alpha, str):
        if alpha != SQUARED:
            raise ValueError(f"alpha={alpha!r}: must be a number in [0, 1], {SQUARED!r}, or None for 1/N")
    elif alpha is not None:
        checks.number("alpha", alpha, 0, 1)
        return float(alpha)
    if ghost_size is None:
        meaning = "alpha defaults to 1/ghost_size" if alpha is None else "N is ghost_size"
        raise ValueError(f"alpha={alpha!r} with ghost_size=None: {meaning}; give one of the two")
    return 1 / ghost_size**2 if alpha == SQUARED else 1 / ghost_size


class EvalNorm(NormLayer):
    """Train as ghost batch norm; in eval, mix each sample's own moments into the running statistics (EN).

        mean = (1-α)·running_mean + α·mean_b
        var  = (1-α)·running_var + α·var_b + α(1-α)·(mean_b - running_mean)²

    Parameters, buffers and state_dict are those of `nn.BatchNorm*d`; the eval output is not. So these layers are not
    instances of `nn.BatchNorm1d`, `2d` or `3d`: code that folds such layers into convolutions leaves them alone. Do not
    pass one to `torch.nn.utils.fuse_conv_bn_eval`, which does not check its type. They are instances of torch's common
    base class, so `torch.optim.swa_utils.update_bn` updates them.

    Args:
        ghost_size: the number of samples in a ghost batch, N; None takes the whole batch, and needs `alpha`.
        alpha: the weight of the sample itself; None is 1/N, its weight in training, and "1/N^2" that of the paper's
            released code.
    """

    function = staticmethod(eval_norm)
    options = ("ghost_size", "alpha", *NormLayer.options)

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
        alpha: float | Literal["1/N^2"] | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        _share(alpha, self.ghost_size)
        self.alpha = alpha


class EvalNorm1d(EvalNorm):
    """EvalNorm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class EvalNorm2d(EvalNorm):
    """EvalNorm of (B, C, H, W)."""

    ndims = (4,)


class EvalNorm3d(EvalNorm):
    """EvalNorm of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="en",
        label="EN",
        title="EvalNorm",
        equation="GBN in training; in eval, the sample's own moments with weight α = 1/N in the running statistics",
        card="eval-norm.md",
        norm=EvalNorm,
        partitions=True,
        changes_inference=True,
    )
)

"""Batch renormalization (Ioffe, 2017): batch norm whose training output is corrected towards the running statistics."""

from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.engine.fused import Buffers, Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.engine.recompute import remembered
from ghostnoise.methods.base import NormLayer, checked
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.tables import Affine, Moments, normalize, whole_batch
from ghostnoise.torch_private import may_run_again

__all__ = ["BatchRenorm", "BatchRenorm1d", "BatchRenorm2d", "BatchRenorm3d", "batch_renorm"]

Transition: TypeAlias = Literal["limits", "correction"]


def batch_renorm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    r_max: float = 3.0,
    d_max: float = 5.0,
    warmup_steps: int = 5000,
    transition_steps: int = 20000,
    transition: Transition = "limits",
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize with the statistics of the batch, and correct the result towards the running statistics.

        y = (x - μ_B) / σ_B · r + d      r = clip(σ_B / σ_run, 1/r_max, r_max),  d = clip((μ_B - μ_run) / σ_run, ±d_max)

    r and d are constants for the gradient; σ² includes eps. Training needs running buffers. For the first
    `warmup_steps` batches, as counted by `num_batches_tracked`, this is `batch_norm`; over the next `transition_steps`
    batches the limits grow linearly to `r_max` and `d_max`; with `transition="correction"` they are at once `r_max` and
    `d_max`, and r - 1 and d grow linearly to what these allow. Without `num_batches_tracked`, both numbers of steps
    must be 0. Evaluation, running statistics, shapes and the other arguments are those of `batch_norm`.
    """
    _check(r_max, d_max, warmup_steps, transition_steps, transition)
    call = checked(
        "batch_renorm", input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked,
        channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    _check_running(running_mean, running_var, num_batches_tracked, warmup_steps, transition_steps)
    buffers: Buffers = (running_mean, running_var, num_batches_tracked)
    # A pass that runs again takes the r and d of the first pass: the buffers have moved on.
    limits = (float(r_max), float(d_max), warmup_steps, transition_steps)
    if may_run_again() or torch.compiler.is_compiling():
        buffers = remembered(partial(_copied, buffers))
    plan = Plan(eps, reference=buffers, limits=limits)
    decide = partial(_decide, eps, Reference(buffers, *limits, transition))
    return call.train(decide, plan=plan if transition == "limits" or not transition_steps else None)


def _copied(buffers: Buffers) -> Buffers:
    mean, var, count = (None if buffer is None else buffer.clone() for buffer in buffers)
    return mean, var, count


class Reference(NamedTuple):
    """The running statistics, and the limits of r and d, which depend on the number of batches."""

    buffers: Buffers
    r_max: float
    d_max: float
    warmup_steps: int
    transition_steps: int
    transition: Transition

    def correction(self, stats: Moments, eps: float) -> tuple[Tensor, Tensor]:
        """Return r and d for the statistics of a batch, as constants for the gradient."""
        running_mean, running_var, count = self.buffers
        assert running_mean is not None
        assert running_var is not None
        mean, var, _ = stats.detach()
        done: Tensor | float = 1.0
        if count is not None and self.transition_steps:
            done = (count.to(mean.dtype) - self.warmup_steps) / self.transition_steps
            done = done.clamp(0, 1)
        elif count is not None:
            done = (count >= self.warmup_steps).to(mean.dtype)
        grown = done if self.transition == "limits" else 1.0
        r_max, d_max = (
            each if isinstance(each, Tensor) else mean.new_tensor(each)
            for each in (1 + (self.r_max - 1) * grown, self.d_max * grown)
        )
        std = (running_var.to(mean.dtype) + eps).sqrt()
        r = ((var + eps).sqrt() / std).clamp(r_max.reciprocal(), r_max)
        d = ((mean - running_mean.to(mean.dtype)) / std).clamp(-d_max, d_max)
        return (r, d) if self.transition == "limits" else (1 + (r - 1) * done, d * done)


def _decide(eps: float, reference: Reference, m: Moments, weight: Tensor | None, bias: Tensor | None) -> Affine:
    stats = whole_batch(m)
    return normalize(stats, eps).then(*reference.correction(stats, eps)).then(weight, bias)


def _check_running(
    mean: Tensor | None, var: Tensor | None, count: Tensor | None, warmup_steps: int, transition_steps: int
) -> None:
    """Check that the buffers that r, d and their limits are computed from are present."""
    if mean is None or var is None:
        raise ValueError(
            "batch_renorm in training without running_mean and running_var: r and d are computed from them; give both, "
            "or use batch_norm"
        )
    if count is None and (warmup_steps or transition_steps):
        raise ValueError(
            f"batch_renorm with warmup_steps={warmup_steps}, transition_steps={transition_steps} and without "
            "num_batches_tracked: it counts the batches; give it, or set both to 0"
        )


def _check(r_max: float, d_max: float, warmup_steps: int, transition_steps: int, transition: Transition) -> None:
    checks.number("r_max", r_max, 1)
    checks.number("d_max", d_max, 0)
    for name, value in (("warmup_steps", warmup_steps), ("transition_steps", transition_steps)):
        if type(value) is not int or value < 0:
            checks.steps(value, least=0, name=name)
    checks.choice("transition", transition, get_args(Transition))


class BatchRenorm(NormLayer):
    """Normalize with the statistics of the batch, and correct the result towards the running statistics (BRN).

        y = (x - μ_B) / σ_B · r + d      r = clip(σ_B / σ_run, 1/r_max, r_max),  d = clip((μ_B - μ_run) / σ_run, ±d_max)

    Within the limits, training computes what inference computes, which helps if batches are small or not independent.
    r and d are constants for the gradient. Parameters, buffers, state_dict and eval output are those of
    `nn.BatchNorm*d`. A forward pass that is recomputed by a checkpoint uses the r and d of the first pass.

    Args:
        track_running_stats: must be True: r and d are computed from the running statistics.
        r_max: the largest r, and the inverse of the smallest; `r_max=1` with `d_max=0` gives batch norm.
        d_max: the largest absolute value of d.
        warmup_steps: the number of batches that are normalized as in batch norm, counted by `num_batches_tracked`.
        transition_steps: the number of batches after these over which the limits grow linearly to `r_max` and `d_max`.
        transition: "limits" lets the limits grow; with "correction" they have their final values at once, and r - 1 and
            d are multiplied by a factor that grows linearly from 0 to 1.

    Examples:
        >>> layer = BatchRenorm2d(16, warmup_steps=0, transition_steps=0)
        >>> layer(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """

    function = staticmethod(batch_renorm)
    options = ("r_max", "d_max", "warmup_steps", "transition_steps", "transition", *NormLayer.options)

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
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 5000,
        transition_steps: int = 20000,
        transition: Transition = "limits",
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        if not track_running_stats:
            raise ValueError(
                f"{type(self).__name__} with track_running_stats=False: r and d are computed from the running "
                "statistics; leave it True, or use batch norm"
            )
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        _check(r_max, d_max, warmup_steps, transition_steps, transition)
        self.r_max, self.d_max = r_max, d_max
        self.warmup_steps, self.transition_steps, self.transition = warmup_steps, transition_steps, transition


class BatchRenorm1d(BatchRenorm, nn.BatchNorm1d):
    """Batch renormalization of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class BatchRenorm2d(BatchRenorm, nn.BatchNorm2d):
    """Batch renormalization of (B, C, H, W)."""

    ndims = (4,)


class BatchRenorm3d(BatchRenorm, nn.BatchNorm3d):
    """Batch renormalization of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="brn",
        label="BRN",
        title="Batch renormalization",
        equation="y = (x - μ_B) / σ_B · r + d with r = clip(σ_B / σ_run), d = clip((μ_B - μ_run) / σ_run)",
        card="batch-renorm.md",
        norm=BatchRenorm,
        example={"warmup_steps": 0, "transition_steps": 0},
    )
)

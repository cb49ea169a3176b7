"""Batch renormalization (Ioffe, 2017): batch norm whose training output is corrected towards the running statistics."""

from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.engine import op
from ghostnoise.engine.plan import Limits, LiveReference, Normalizer, Plan, Reference
from ghostnoise.engine.ranks import Group
from ghostnoise.engine.running import Running
from ghostnoise.methods.base import Call, NormLayer, checked, is_recomputed, whole_batch_unbiased
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import GhostBatch, pool_all

__all__ = ["BatchRenorm", "BatchRenorm1d", "BatchRenorm2d", "BatchRenorm3d", "batch_renorm"]

REMEMBERED = 8  # forward passes of a layer whose running statistics are kept for a recomputation


class Pass(NamedTuple):
    """A forward pass: the mean of its batch (1, C), and the running statistics and limits that it used."""

    mean: Tensor
    reference: Reference


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
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
    _recent: "deque[Pass] | None" = None,
) -> Tensor:
    """Normalize with the statistics of the batch, and correct the result towards the running statistics.

        y = (x - μ_B) / σ_B · r + d      r = clip(σ_B / σ_run, 1/r_max, r_max),  d = clip((μ_B - μ_run) / σ_run, ±d_max)

    r and d are constants for the gradient; σ² includes eps. Training needs running buffers. For the first
    `warmup_steps` batches, as counted by `num_batches_tracked`, this is `batch_norm`; over the next `transition_steps`
    batches the limits grow linearly to `r_max` and `d_max`. Without `num_batches_tracked`, both must be 0. Evaluation,
    running statistics, shapes and the other arguments are those of `batch_norm`.
    """
    _check(r_max, d_max, warmup_steps, transition_steps)
    call = checked(
        "batch_renorm", input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked,
        channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    _check_running(call.running, warmup_steps, transition_steps)
    normalizer = Normalizer(GhostBatch(), eps)
    live = LiveReference(call.running, Limits(r_max, d_max, warmup_steps, transition_steps))
    if _recent is None or torch.compiler.is_compiling():
        return call.train(normalizer, whole_batch_unbiased, reference=live)
    if is_recomputed() and _recent:
        return call.normalize(Plan(normalizer, None, _first_pass(call, _recent)))[0]
    return call.train(normalizer, whole_batch_unbiased, reference=live, after=partial(_remember, _recent))


def _remember(recent: "deque[Pass]", pooled: Moments, reference: Reference | None) -> None:
    assert reference is not None
    recent.append(Pass(pooled.mean.detach() if pooled.mean.requires_grad else pooled.mean, reference))


def _check_running(running: Running, warmup_steps: int, transition_steps: int) -> None:
    """Check that the buffers that r, d and their limits are computed from are present."""
    if running.mean is None or running.var is None:
        raise ValueError(
            "batch_renorm in training without running_mean and running_var: r and d are computed from them; give both, "
            "or use batch_norm"
        )
    if running.num_batches_tracked is None and (warmup_steps or transition_steps):
        raise ValueError(
            f"batch_renorm with warmup_steps={warmup_steps}, transition_steps={transition_steps} and without "
            "num_batches_tracked: it counts the batches; give it, or set both to 0"
        )


def _first_pass(call: Call, recent: "deque[Pass]") -> Reference:
    """Return the running statistics that the first pass over this batch used: of the nearest mean, or the latest.

    Ranks would have to exchange the mean of the batch, so they take the latest pass.
    """
    if call.extent.ranks is not None:
        return recent[-1].reference
    mean = pool_all(*op.measure(call.input, call.channel_dim, call.extent.mask), call.extent.counts).mean
    passes = [each for each in reversed(recent) if each.mean.shape == mean.shape and each.mean.device == mean.device]
    nearest = torch.stack([(each.mean - mean).abs().sum() for each in passes]).argmin()

    def chosen(tables: list[Tensor]) -> Tensor:
        return torch.stack(tables).index_select(0, nearest.unsqueeze(0))[0]

    known = [each.reference for each in passes]
    moments = Moments(chosen([each.moments.mean for each in known]), chosen([each.moments.var for each in known]))
    return Reference(moments, chosen([each.limits for each in known if each.limits is not None]))


def _check(r_max: float, d_max: float, warmup_steps: int, transition_steps: int) -> None:
    checks.number("r_max", r_max, 1)
    checks.number("d_max", d_max, 0)
    checks.steps(warmup_steps, least=0, name="warmup_steps")
    checks.steps(transition_steps, least=0, name="transition_steps")


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

    Examples:
        >>> layer = BatchRenorm2d(16, warmup_steps=0, transition_steps=0)
        >>> layer(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """

    function = staticmethod(batch_renorm)
    repeatable = True
    options = ("r_max", "d_max", "warmup_steps", "transition_steps", "_recent", *NormLayer.options)

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
        _check(r_max, d_max, warmup_steps, transition_steps)
        self.r_max, self.d_max = r_max, d_max
        self.warmup_steps, self.transition_steps = warmup_steps, transition_steps
        self._recent: deque[Pass] = deque(maxlen=REMEMBERED)


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

"""Batch normalization over micro-batches: the statistics are those of this micro-batch and of earlier samples."""

from functools import partial

import torch
from torch import Tensor, nn

from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.history import History
from ghostnoise.methods.base import (
    NormLayer,
    Remembering,
    check_history,
    checked,
    decide_batch_norm,
    history_of,
    stored_samples,
)
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.tables import Affine, Moments, normalize, whole_batch

__all__ = ["MicroBatchNorm", "MicroBatchNorm1d", "MicroBatchNorm2d", "MicroBatchNorm3d", "micro_batch_norm"]


def micro_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    history: History | None = None,
    num_batches_tracked: Tensor | None = None,
    channel_dim: int = 1,
    process_group: Group = None,
    uneven: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize with the mean and variance of this micro-batch and of the samples of a `history` together.

    The samples of this micro-batch are then added to the history. Those in it are constants: the gradient flows through
    the share that this micro-batch has in the statistics. `history=None` is `batch_norm`. Evaluation, running
    statistics, which are those of the micro-batches, shapes and the other arguments are those of `batch_norm`.
    """
    if history is not None:
        check_history(history)
    call = checked(
        "micro_batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps,
        num_batches_tracked, channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    if history is None:
        return call.train(partial(decide_batch_norm, eps), plan=Plan(eps))
    stored = stored_samples(history, input, channel_dim, call.extent)
    return call.train(partial(_decide, eps, stored), remember=history.add)


def _decide(eps: float, stored: Moments, m: Moments, weight: Tensor | None, bias: Tensor | None) -> Affine:
    return normalize(whole_batch(m.join(stored)), eps).then(weight, bias)


class MicroBatchNorm(Remembering, NormLayer):
    """Normalize with the statistics of this micro-batch and of the last H samples before it (MBN).

    For gradient accumulation, and whenever batches are small: the layer keeps the moments of earlier samples, which are
    constants for the gradient. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        history: the number of earlier samples, H, such as the size of the whole batch minus that of a micro-batch; 0 is
            batch norm. The state_dict does not contain them unless asked, see `histories`.

    Examples:
        >>> layer = MicroBatchNorm2d(16, history=56)
        >>> for micro_batch in torch.randn(8, 8, 16, 4, 4):  # the last one is normalized with all 64 samples
        ...     y = layer(micro_batch)
    """

    function = staticmethod(micro_batch_norm)
    options = ("history", *NormLayer.options)

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
        history: int = 256,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        self.history = history_of(history)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{super().extra_repr()}, history={0 if self.history is None else self.history.size}"


class MicroBatchNorm1d(MicroBatchNorm, nn.BatchNorm1d):
    """Batch norm over micro-batches of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class MicroBatchNorm2d(MicroBatchNorm, nn.BatchNorm2d):
    """Batch norm over micro-batches of (B, C, H, W)."""

    ndims = (4,)


class MicroBatchNorm3d(MicroBatchNorm, nn.BatchNorm3d):
    """Batch norm over micro-batches of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="mbn",
        label="MBN",
        title="Batch normalization over micro-batches",
        equation="y = (x - μ) / sqrt(σ² + eps) over this micro-batch and the last H samples before it",
        card="micro-batch-norm.md",
        norm=MicroBatchNorm,
        example={"history": 0},
    )
)

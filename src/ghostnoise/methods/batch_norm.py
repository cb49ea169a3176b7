"""Batch normalization: every sample contributes to the statistics of every sample."""

from functools import partial

from torch import Tensor, nn

from ghostnoise.engine.fused import Plan
from ghostnoise.engine.ranks import Group
from ghostnoise.methods.base import NormLayer, checked, decide_batch_norm
from ghostnoise.methods.registry import MeterSpec, MethodSpec, register

__all__ = ["BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "batch_norm"]


def batch_norm(
    input: Tensor,
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
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize each channel with the mean and variance of the whole batch.

    The arguments are those of `torch.nn.functional.batch_norm`, and five more.

    Args:
        num_batches_tracked: the count of a layer, which is incremented; `momentum=None` uses it for the cumulative
            average.
        channel_dim: the dimension of the channels.
        process_group: the ranks that share the batch in training: None is this process alone, "world" is all ranks.
        uneven: if True, ranks may hold different numbers of samples.
        mask: the valid positions of a padded batch, a bool tensor (B, *positions) that is True where a value is valid.
            Only values at valid positions contribute, each by the same weight; output and gradient are 0 at the others.

    Without running buffers, the statistics of the batch are used in evaluation too.

    Shape:
        (B, C, *spatial) with 2 to 5 dimensions, or with the channels in `channel_dim`.
    """
    call = checked(
        "batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked,
        channel_dim, process_group, uneven, mask,
    )  # fmt: skip
    if not training:
        return call.infer()
    return call.train(partial(decide_batch_norm, eps), plan=Plan(eps))


class BatchNorm(NormLayer):
    """Normalize each channel with the mean and variance of the whole batch, then apply weight and bias.

    Arguments, parameters, buffers, state_dict and eval output are those of the `nn.BatchNorm*d` that it subclasses.
    Three things differ in training: statistics are accurate even if |mean| is large compared to std; a batch whose
    statistics are not finite does not update the running statistics; and neither does a forward pass that runs inside
    a backward pass, which is the recomputation of a checkpoint, so that each batch counts once.

    With a `process_group`, training normalizes over the batch of all its ranks, as `nn.SyncBatchNorm` does, and also on
    CPUs: all ranks must run the layer, forward and backward.
    """

    function = staticmethod(batch_norm)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """Batch norm of (B, C) and (B, C, L)."""

    ndims = (2, 3)


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """Batch norm of (B, C, H, W)."""

    ndims = (4,)


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """Batch norm of (B, C, D, H, W)."""

    ndims = (5,)


register(
    MethodSpec(
        name="bn",
        label="BN",
        title="Batch normalization",
        equation="y = (x - μ) / sqrt(σ² + eps) over the whole batch",
        card="batch-norm.md",
        norm=BatchNorm,
        meter=MeterSpec(),
    )
)

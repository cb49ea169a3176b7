"""Exclusive batch norm: leave yourself out of your statistics."""

import torch
from torch import nn

from ghostnoise import checks, functional
from ghostnoise.distributed import Group
from ghostnoise.layers.batch_norm import BatchNorm


class ExclusiveBatchNorm(BatchNorm):
    """Normalize each sample with the statistics of the others in its ghost batch (XBN, eqs. 7-8).

    Training then depends on oneself as little as inference does, but the output has no bound, and small ghost
    batches are unstable. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group, uneven: as in `BatchNorm*d`.
        ghost_size: samples in a ghost batch, 2 or more; None takes the whole batch.
        min_std: the least standard deviation to divide by.
        clamp_output: the largest absolute value of the normalized output, before weight and bias.

    >>> layer = ExclusiveBatchNorm1d(1, affine=False)
    >>> layer(torch.tensor([[0.0], [1.0], [3.0]]))  # 0 among 1 and 3: mean 2, standard deviation 1
    tensor([[-2.0000],
            [-0.3333],
            [ 4.9999]])
    """

    function = staticmethod(functional.exclusive_batch_norm)
    options = ("ghost_size", "min_std", "clamp_output", *BatchNorm.options)

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
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.number("min_std", min_std, 0)
        if clamp_output is not None:
            checks.number("clamp_output", clamp_output, 0, open_low=True)
        self.ghost_size = checks.ghost_size_or_none(ghost_size, least=2)
        self.min_std, self.clamp_output = min_std, clamp_output


class ExclusiveBatchNorm1d(ExclusiveBatchNorm, nn.BatchNorm1d):
    """Exclusive batch norm of (B, C) and (B, C, L)."""


class ExclusiveBatchNorm2d(ExclusiveBatchNorm, nn.BatchNorm2d):
    """Exclusive batch norm of (B, C, H, W)."""


class ExclusiveBatchNorm3d(ExclusiveBatchNorm, nn.BatchNorm3d):
    """Exclusive batch norm of (B, C, D, H, W)."""

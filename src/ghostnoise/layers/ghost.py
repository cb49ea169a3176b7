"""Ghost batch norm: small normalization batches inside a large one."""

from typing import Literal

import torch
from torch import nn

from ghostnoise import checks, functional
from ghostnoise.distributed import Group
from ghostnoise.layers.batch_norm import BatchNorm


class GhostBatchNorm(BatchNorm):
    """Normalize consecutive ghost batches of `ghost_size` samples, each with its own statistics (GBN, eq. 1).

    Left-over samples join the last ghost batch, so that none is smaller than `ghost_size`; a smaller batch is one
    ghost batch. Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group, uneven: as in `BatchNorm*d`.
        ghost_size: samples in a ghost batch, N; None: the whole batch is one.
        running_var_from: "ghost" follows the ghost batches' biased variances, "batch" the whole batch's unbiased one.

    >>> layer = GhostBatchNorm2d(16, ghost_size=32)
    >>> y = layer(torch.randn(100, 16, 8, 8))  # ghost batches of 32, 32 and 36
    >>> y[:32].mean().abs() < 1e-5
    tensor(True)
    """

    function = staticmethod(functional.ghost_batch_norm)
    options = ("ghost_size", "running_var_from", *BatchNorm.options)

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
        running_var_from: Literal["ghost", "batch"] = "ghost",
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.choice("running_var_from", running_var_from, ("ghost", "batch"))
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.running_var_from = running_var_from


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d):
    """Ghost batch norm of (B, C) and (B, C, L)."""


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d):
    """Ghost batch norm of (B, C, H, W)."""


class GhostBatchNorm3d(GhostBatchNorm, nn.BatchNorm3d):
    """Ghost batch norm of (B, C, D, H, W)."""

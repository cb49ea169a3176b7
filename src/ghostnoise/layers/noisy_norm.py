"""Batch norm with ghost noise between its normalization and its weight and bias."""

import torch
from torch import Generator, nn

from ghostnoise import checks, functional
from ghostnoise.distributed import Group
from ghostnoise.laws import Dof, Kind
from ghostnoise.layers.batch_norm import BatchNorm


class GhostNoiseBatchNorm(BatchNorm):
    """Normalize with the whole batch, inject the noise of random ghost batches, then scale and shift (GNI, eq. 9).

    Each sample gets the noise of `ghost_size` samples of the batch, drawn with replacement. Parameters, buffers,
    state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group, uneven: as in `BatchNorm*d`.
        ghost_size: samples in a ghost batch, N: any positive number; smaller is stronger noise, None is no noise.
        noise_eps: added to the variances whose ratio is the scale noise.
        shift, scale: which parts of the noise to inject.
        generator: draws the samples; the device's default one if None.

    >>> layer = GhostNoiseBatchNorm2d(16, ghost_size=32)
    >>> layer(torch.randn(64, 16, 8, 8)).shape
    torch.Size([64, 16, 8, 8])
    >>> nn.BatchNorm2d(16).load_state_dict(layer.state_dict())
    <All keys matched successfully>
    """

    function = staticmethod(functional.ghost_noise_batch_norm)
    options = ("ghost_size", "noise_eps", "shift", "scale", "generator", *BatchNorm.options)

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
        noise_eps: float = 1e-3,
        shift: bool = True,
        scale: bool = True,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.number("noise_eps", noise_eps, 0)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.shift, self.scale, self.generator = noise_eps, shift, scale, generator


class GhostNoiseBatchNorm1d(GhostNoiseBatchNorm, nn.BatchNorm1d):
    """Batch norm with ghost noise of (B, C) and (B, C, L)."""


class GhostNoiseBatchNorm2d(GhostNoiseBatchNorm, nn.BatchNorm2d):
    """Batch norm with ghost noise of (B, C, H, W)."""


class GhostNoiseBatchNorm3d(GhostNoiseBatchNorm, nn.BatchNorm3d):
    """Batch norm with ghost noise of (B, C, D, H, W)."""


class AnalyticalGhostNoiseBatchNorm(BatchNorm):
    """Normalize with the whole batch, inject noise from ghost noise's analytical law, then scale and shift (AGNI).

    Parameters, buffers, state_dict and eval output are those of `nn.BatchNorm*d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `nn.BatchNorm*d`.
        process_group, uneven: as in `BatchNorm*d`.
        ghost_size: samples in a ghost batch, N; None: no noise.
        noise_eps: added to the variances whose ratio is the scale noise.
        kind: "fc", the law of fully connected layers (eqs. 11-12), or "conv", that of convolutional ones (eqs. 15-16).
        dof: "paper" draws around the true mean, χ²(N)/N; "exact" around the drawn one, for "fc" χ²(N-1)/N.
        shift, scale: which parts of the noise to inject.
        generator: draws the noise; the device's default one if None.
    """

    function = staticmethod(functional.analytical_ghost_noise_batch_norm)
    options = ("ghost_size", "noise_eps", "kind", "dof", "shift", "scale", "generator", *BatchNorm.options)

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
        noise_eps: float = 1e-3,
        kind: Kind = "fc",
        dof: Dof = "paper",
        shift: bool = True,
        scale: bool = True,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            process_group=process_group, uneven=uneven,
        )  # fmt: skip
        checks.number("noise_eps", noise_eps, 0)
        checks.choice("kind", kind, ("fc", "conv"))
        checks.choice("dof", dof, ("paper", "exact"))
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.noise_eps, self.kind, self.dof = noise_eps, kind, dof
        self.shift, self.scale, self.generator = shift, scale, generator


class AnalyticalGhostNoiseBatchNorm1d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm1d):
    """Batch norm with analytical ghost noise of (B, C) and (B, C, L)."""


class AnalyticalGhostNoiseBatchNorm2d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm2d):
    """Batch norm with analytical ghost noise of (B, C, H, W)."""


class AnalyticalGhostNoiseBatchNorm3d(AnalyticalGhostNoiseBatchNorm, nn.BatchNorm3d):
    """Batch norm with analytical ghost noise of (B, C, D, H, W)."""

"""Ghost noise on its own, for any place in any network."""

from torch import Generator, Tensor

from ghostnoise import checks, distributed, functional
from ghostnoise.distributed import Group
from ghostnoise.laws import Dof, Kind
from ghostnoise.tracing import Leaf


class GhostNoise(Leaf):
    """Shift and scale each sample as the statistics of a random ghost batch would have, in training (GNI, eq. 10).

        y = (x - (m - μ)) / sqrt((s² + eps) / (σ² + eps))

    with the batch's moments μ and σ², and m and s² those of `ghost_size` samples drawn with replacement. In eval, x
    is returned as it is.

    Args:
        ghost_size: samples in a ghost batch, N: any positive number; smaller is stronger noise, None is no noise.
        eps: added to the variances whose ratio is the scale noise.
        shift, scale: which parts of the noise to inject.
        channel_dim: where the channels are: 1, or -1 for tokens (B, T, C).
        generator: draws the samples; the device's default one if None.
        process_group: the ranks that share a batch: None is this process alone, "world" all, or a process group.
        uneven: let ranks hold different numbers of samples, or none, and exchange these numbers first; without, they
            must be equal, and nothing notices if they are not.

    Shape: 2 to 5 dimensions, the batch first; any memory format.

    >>> import torch
    >>> from torch import nn
    >>> after_layer_norm = nn.Sequential(nn.LayerNorm(32), GhostNoise(ghost_size=12, channel_dim=-1))
    >>> after_layer_norm(torch.randn(64, 10, 32)).shape
    torch.Size([64, 10, 32])
    """

    def __init__(
        self,
        ghost_size: int | None,
        eps: float = 1e-3,
        *,
        shift: bool = True,
        scale: bool = True,
        channel_dim: int = 1,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        checks.number("eps", eps, 0)
        checks.dimension(channel_dim)
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.eps, self.shift, self.scale, self.channel_dim, self.generator = eps, shift, scale, channel_dim, generator
        self.process_group, self.uneven = distributed.named(process_group), uneven

    def forward(self, x: Tensor) -> Tensor:
        """Inject noise in training."""
        if not self.training:
            return x
        return functional.ghost_noise(
            x, self.ghost_size, self.eps, shift=self.shift, scale=self.scale, channel_dim=self.channel_dim,
            generator=self.generator, process_group=self.process_group, uneven=self.uneven,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The settings."""
        own = (
            f"ghost_size={self.ghost_size}, eps={self.eps}, shift={self.shift}, scale={self.scale}, "
            f"channel_dim={self.channel_dim}"
        )
        return ", ".join([own, *distributed.described(self.process_group, self.uneven)])


class AnalyticalGhostNoise(Leaf):
    """Shift and scale each sample and channel by noise from ghost noise's analytical law, in training (AGNI).

    As `GhostNoise`, with m and s² drawn around the batch's moments: from N(0, σ²/N) and σ²·χ²(N)/N for `kind="fc"`
    (eqs. 11-12), and for `kind="conv"` from the law with the variances between and within samples that the batch has
    (eqs. 15-16). In eval, x is returned as it is.

    Args:
        ghost_size: samples in a ghost batch, N; None: no noise.
        eps: added to the variances whose ratio is the scale noise.
        kind: "fc" or "conv".
        dof: "paper" draws around the true mean, χ²(N)/N; "exact" around the drawn one, for "fc" χ²(N-1)/N.
        shift, scale: which parts of the noise to inject.
        channel_dim: where the channels are: 1, or -1 for tokens (B, T, C).
        generator: draws the noise; the device's default one if None.
        process_group: the ranks that share a batch: None is this process alone, "world" all, or a process group.
        uneven: let ranks hold different numbers of samples, or none, and exchange these numbers first; without, they
            must be equal, and nothing notices if they are not.
    """

    def __init__(
        self,
        ghost_size: int | None,
        eps: float = 1e-3,
        *,
        kind: Kind = "fc",
        dof: Dof = "paper",
        shift: bool = True,
        scale: bool = True,
        channel_dim: int = 1,
        generator: Generator | None = None,
        process_group: Group = None,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        checks.number("eps", eps, 0)
        checks.dimension(channel_dim)
        checks.choice("kind", kind, ("fc", "conv"))
        checks.choice("dof", dof, ("paper", "exact"))
        self.ghost_size = checks.ghost_size_or_none(ghost_size)
        self.eps, self.kind, self.dof, self.shift, self.scale = eps, kind, dof, shift, scale
        self.channel_dim, self.generator = channel_dim, generator
        self.process_group, self.uneven = distributed.named(process_group), uneven

    def forward(self, x: Tensor) -> Tensor:
        """Inject noise in training."""
        if not self.training:
            return x
        return functional.analytical_ghost_noise(
            x, self.ghost_size, self.eps, kind=self.kind, dof=self.dof, shift=self.shift, scale=self.scale,
            channel_dim=self.channel_dim, generator=self.generator, process_group=self.process_group,
            uneven=self.uneven,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The settings."""
        own = (
            f"ghost_size={self.ghost_size}, eps={self.eps}, kind={self.kind!r}, dof={self.dof!r}, "
            f"shift={self.shift}, scale={self.scale}, channel_dim={self.channel_dim}"
        )
        return ", ".join([own, *distributed.described(self.process_group, self.uneven)])

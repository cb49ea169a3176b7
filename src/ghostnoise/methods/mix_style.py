"""MixStyle: each sample gets a mixture of its own style and that of another sample of the batch.

Zhou et al., *Domain Generalization with MixStyle* (2021).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.engine import general
from ghostnoise.engine.recompute import drawing
from ghostnoise.masking import mask_of
from ghostnoise.methods.base import zeroed
from ghostnoise.methods.noise_base import (
    check_positions,
    check_style,
    checked_input,
    drawn_for_call,
    only_where,
    standard_deviations,
)
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.randomness import drawn_by
from ghostnoise.tables import Affine, Moments, table_dtype
from ghostnoise.torch_private import standard_gamma
from ghostnoise.tracing import Leaf

__all__ = ["MixStyle", "mix_style"]


def mix_style(
    input: Tensor,
    p: float = 0.5,
    concentration: float = 0.1,
    noise_eps: float = 1e-6,
    *,
    channel_dim: int = 1,
    indices: Tensor | None = None,
    weights: Tensor | None = None,
    generator: Generator | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Replace the mean and standard deviation of each sample's channels by a mixture with those of another sample.

        y = (x - μ_b) / σ_b · (λ_b·σ_b + (1 - λ_b)·σ_π(b)) + λ_b·μ_b + (1 - λ_b)·μ_π(b)

    μ and σ are over the positions of a sample, with the unbiased variance plus `noise_eps`, and constants for the
    gradient. The call as a whole has noise with probability `p`; otherwise it returns the input.

    Args:
        concentration: of the symmetric Beta distribution that the weights λ are drawn from.
        channel_dim: the dimension of the channels.
        indices: the partner of each sample, a permutation (B,); drawn if it is None.
        weights: the weight λ of each sample's own style (B,); drawn if it is None.
        generator: draws them, and whether the call has noise; None is the default generator of the device.
        mask: the valid positions of a padded batch; see `batch_norm`. A sample with fewer than 2 valid positions has no
            style: it stays, and so does a sample whose partner it is.

    Shape:
        (B, C, *spatial) with 3 to 5 dimensions and several positions, or with the channels in `channel_dim`.
    """
    _check(p, concentration, noise_eps, generator)
    extent = checked_input(input, "mix_style", channel_dim, None, False, mask)
    check_positions(extent, "mix_style")
    rows, device, generator = input.shape[0], input.device, drawing(generator)
    called = drawn_for_call(p, device, generator)
    if indices is None:
        indices = torch.randperm(rows, device=device, **drawn_by(generator))
    else:
        checks.permutation(indices, rows, "the partner of each")
        indices = indices.to(device, torch.int64, copy=True)
    if weights is None:
        weights = _beta(concentration, rows, device, generator)
    elif weights.shape != (rows,):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)}: must be (B,) = ({rows},), the share of each sample's own style"
        )
    if called is not None and checks.readable(called) and not called:
        return zeroed(input, mask, "mix_style", channel_dim)
    noise = Mixture(indices, weights.detach().to(device, table_dtype(device)), noise_eps, called)
    return general.run(input, partial(_decide, noise), (), extent, channel_dim)[0]


class Mixture(NamedTuple):
    """The partner of each sample (B,), the weight of its own style (B,), and whether the call has noise (1,)."""

    indices: Tensor
    weights: Tensor
    eps: float
    called: Tensor | None


def _decide(noise: Mixture, m: Moments) -> Affine:
    """Mix the styles of samples and of their partners, as constants."""
    mean = m.mean.detach()
    std, several = standard_deviations(m.detach(), noise.eps)
    own = noise.weights[:, None]
    mixed_mean, mixed_std = (own * table + (1 - own) * table[noise.indices] for table in (mean, std))
    if several is not None:
        several = several & several[noise.indices]
    return only_where(noise.called, only_where(several, Affine(mean, mixed_std / std, mixed_mean)))


def _beta(concentration: float, rows: int, device: torch.device, generator: Generator | None) -> Tensor:
    """Draw from the symmetric Beta distribution (rows,)."""
    dtype = table_dtype(device)
    gamma = standard_gamma(torch.full((2, rows), concentration, dtype=dtype, device=device), **drawn_by(generator))
    first, second = gamma.clamp_min(torch.finfo(dtype).tiny)  # small concentrations underflow
    share: Tensor = first / (first + second)
    return share


def _check(p: float, concentration: float, noise_eps: float, generator: Generator | None) -> None:
    check_style(p, noise_eps, generator)
    checks.number("concentration", concentration, 0, open_low=True)


class MixStyle(Leaf):
    """Mix the style of each sample with that of another sample of the batch, in training.

        y = (x - μ_b) / σ_b · (λ_b·σ_b + (1 - λ_b)·σ_π(b)) + λ_b·μ_b + (1 - λ_b)·μ_π(b)

    The style of a sample is the mean and standard deviation of its channels over positions; λ_b is drawn from
    Beta(α, α) for each sample, and π is a random permutation. In eval mode the input is returned unchanged.

    Args:
        p: the probability that a call has noise.
        concentration: α of the Beta distribution.
        noise_eps: added to the variances.
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        generator: draws the noise; None is the default generator of the device.

    Shape:
        3 to 5 dimensions, the batch first, in any memory format; the output has the same shape.

    Examples:
        >>> layer = MixStyle(p=1.0)
        >>> layer(torch.randn(32, 16, 8, 8)).shape
        torch.Size([32, 16, 8, 8])
    """

    def __init__(
        self,
        p: float = 0.5,
        concentration: float = 0.1,
        noise_eps: float = 1e-6,
        *,
        channel_dim: int = 1,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        _check(p, concentration, noise_eps, generator)
        checks.dimension(channel_dim)
        self.p, self.concentration, self.noise_eps = p, concentration, noise_eps
        self.channel_dim, self.generator = channel_dim, generator

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix styles in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training or self.p == 0:
            return zeroed(input, mask, type(self).__name__, self.channel_dim)
        return mix_style(
            input, self.p, self.concentration, self.noise_eps, channel_dim=self.channel_dim, generator=self.generator,
            mask=mask,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the settings."""
        return (
            f"p={self.p}, concentration={self.concentration}, noise_eps={self.noise_eps}, "
            f"channel_dim={self.channel_dim}"
        )


register(
    MethodSpec(
        name="mixstyle",
        label="MixStyle",
        title="MixStyle",
        equation="y = (x - μ_b) / σ_b · (λσ_b + (1-λ)σ_π) + λμ_b + (1-λ)μ_π, λ ~ Beta(α, α), π a permutation",
        card="mix-style.md",
        noise=MixStyle,
        inserts=True,
        placements=("after",),
        example={"p": 0.9},
    )
)

"""Distribution uncertainty (DSU): the style of each sample is drawn anew, as uncertain as the batch shows styles to be.

Li et al., *Uncertainty Modeling for Out-of-Distribution Generalization* (2022).
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
from ghostnoise.tracing import Leaf

__all__ = ["DistributionUncertainty", "distribution_uncertainty"]


def distribution_uncertainty(
    input: Tensor,
    p: float = 0.5,
    noise_eps: float = 1e-6,
    *,
    channel_dim: int = 1,
    draws: Tensor | None = None,
    generator: Generator | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Replace the mean and standard deviation of each sample's channels by random ones.

        y = (x - μ_b) / σ_b · (σ_b + ε_σ·Σ_σ) + μ_b + ε_μ·Σ_μ        ε ~ N(0, 1) for each sample and channel

    μ and σ are over the positions of a sample; Σ_μ and Σ_σ are the standard deviations of these over the batch. All
    variances are unbiased, plus `noise_eps`; the gradient flows through all of them. The call as a whole has noise with
    probability `p`; otherwise it returns the input.

    Args:
        channel_dim: the dimension of the channels.
        draws: ε_μ and ε_σ (2, B, C); drawn if it is None.
        generator: draws them, and whether the call has noise; None is the default generator of the device.
        mask: the valid positions of a padded batch; see `batch_norm`. A sample with fewer than 2 valid positions has no
            style: it stays, and does not contribute to Σ.

    Shape:
        (B, C, *spatial) with 3 to 5 dimensions, several samples and several positions, or with the channels in
        `channel_dim`.
    """
    check_style(p, noise_eps, generator)
    extent = checked_input(input, "distribution_uncertainty", channel_dim, None, False, mask)
    check_positions(extent, "distribution_uncertainty")
    _check_samples(extent.counts, input.shape)
    shape, device, generator = (2, input.shape[0], input.shape[channel_dim]), input.device, drawing(generator)
    called = drawn_for_call(p, device, generator)
    if draws is None:
        draws = torch.randn(shape, dtype=table_dtype(device), device=device, **drawn_by(generator))
    elif draws.shape != shape:
        raise ValueError(
            f"draws of shape {tuple(draws.shape)}: must be (2, B, C) = {shape}, standard normal numbers for the means "
            "and the standard deviations; use torch.randn"
        )
    if called is not None and checks.readable(called) and not called:
        return zeroed(input, mask, "distribution_uncertainty", channel_dim)
    noise = Uncertainty(draws.detach().to(device, table_dtype(device)), noise_eps, called)
    return general.run(input, partial(_decide, noise), (), extent, channel_dim)[0]


class Uncertainty(NamedTuple):
    """The normal numbers (2, B, C), and whether the call has noise (1,)."""

    draws: Tensor
    eps: float
    called: Tensor | None


def _decide(noise: Uncertainty, m: Moments) -> Affine:
    """Draw styles around those of the samples."""
    std, several = standard_deviations(m, noise.eps)
    mean_noise, std_noise = noise.draws
    scale = (std + std_noise * _spread(std, several, noise.eps)) / std
    shift = m.mean + mean_noise * _spread(m.mean, several, noise.eps)
    return only_where(noise.called, only_where(several, Affine(m.mean, scale, shift)))


def _spread(table: Tensor, counted: Tensor | None, eps: float) -> Tensor:
    """Return the standard deviation (1, C) over the samples that count (B, 1), all if it is None; unbiased."""
    if counted is None:
        return (table.var(0, keepdim=True) + eps).sqrt()
    weights = counted.to(table.dtype)
    count = weights.sum()
    mean = (weights * table).sum(0, keepdim=True) / count.clamp_min(1)
    var = (weights * (table - mean).square()).sum(0, keepdim=True) / (count - 1).clamp_min(1)
    return (var + eps).sqrt()


def _check_samples(counts: Tensor | None, shape: torch.Size) -> None:
    """Check that several samples have a style."""
    masked = counts is not None and checks.readable(counts)
    there = int((counts > 1).sum()) if masked and counts is not None else shape[0]
    if there < 2:
        with_style = " with 2 valid positions or more" if masked else ""
        raise ValueError(
            f"batch of {there} samples{with_style}, of shape {tuple(shape)}: distribution_uncertainty needs 2 or more, "
            "whose styles differ; use a larger batch"
        )


class DistributionUncertainty(Leaf):
    """Draw the style of each sample anew around its own, as uncertain as styles are in the batch, in training (DSU).

        y = (x - μ_b) / σ_b · (σ_b + ε_σ·Σ_σ) + μ_b + ε_μ·Σ_μ        ε ~ N(0, 1) for each sample and channel

    The style of a sample is the mean and standard deviation of its channels over positions, and Σ is the standard
    deviation of these over the batch. In eval mode the input is returned unchanged.

    Args:
        p: the probability that a call has noise.
        noise_eps: added to the variances.
        channel_dim: the dimension of the channels: 1, or -1 for tokens (B, T, C).
        generator: draws the noise; None is the default generator of the device.

    Shape:
        3 to 5 dimensions, the batch first, in any memory format; the output has the same shape.

    Examples:
        >>> layer = DistributionUncertainty(p=1.0)
        >>> layer(torch.randn(32, 16, 8, 8)).shape
        torch.Size([32, 16, 8, 8])
    """

    def __init__(
        self,
        p: float = 0.5,
        noise_eps: float = 1e-6,
        *,
        channel_dim: int = 1,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        check_style(p, noise_eps, generator)
        checks.dimension(channel_dim)
        self.p, self.noise_eps = p, noise_eps
        self.channel_dim, self.generator = channel_dim, generator

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Draw styles in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training or self.p == 0:
            return zeroed(input, mask, type(self).__name__, self.channel_dim)
        return distribution_uncertainty(
            input, self.p, self.noise_eps, channel_dim=self.channel_dim, generator=self.generator, mask=mask
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"p={self.p}, noise_eps={self.noise_eps}, channel_dim={self.channel_dim}"


register(
    MethodSpec(
        name="dsu",
        label="DSU",
        title="Distribution uncertainty",
        equation="y = (x - μ_b) / σ_b · (σ_b + ε_σ·Σ_σ) + μ_b + ε_μ·Σ_μ, Σ the deviation of styles over the batch",
        card="distribution-uncertainty.md",
        noise=DistributionUncertainty,
        inserts=True,
        placements=("after",),
        example={"p": 0.9},
    )
)

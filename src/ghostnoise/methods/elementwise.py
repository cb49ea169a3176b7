"""Noise that does not depend on the batch: dropout and additive Gaussian noise, the paper's baselines.

They do not use the engine.
"""

from typing import Literal

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.engine import masks
from ghostnoise.engine.ops import arithmetic_dtype
from ghostnoise.engine.recompute import drawing
from ghostnoise.masking import mask_of
from ghostnoise.methods.base import zeroed
from ghostnoise.methods.registry import MethodSpec, register
from ghostnoise.randomness import drawn_by
from ghostnoise.tracing import Leaf

__all__ = ["AdditiveGaussianNoise", "NoisyDropout", "additive_gaussian_noise", "noisy_dropout"]

Distribution = Literal["bernoulli", "gaussian"]
Per = Literal["element", "channel"]
Spread = Literal["variance", "std"]


def noisy_dropout(
    input: Tensor,
    p: float = 0.5,
    *,
    distribution: Distribution = "bernoulli",
    per: Per = "element",
    p_sets: Spread = "variance",
    channel_dim: int = 1,
    generator: Generator | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Multiply the input by noise of mean 1 and variance p/(1-p), drawn per element, or per channel of each sample.

    `distribution="bernoulli"` is dropout: 0 with probability p, else 1/(1-p). `distribution="gaussian"` draws from
    N(1, p/(1-p)) (eq. 14), or with `p_sets="std"` from a normal distribution with the standard deviation p/(1-p), as in
    the paper's released code. With a `mask` (B, *positions), see `batch_norm`, the output is 0 where it is False.
    """
    _check_dropout(p, distribution, per, p_sets)
    if per == "element":
        checks.floating(input, "noisy_dropout")
        shape = list(input.shape)
    else:
        checks.layout(input, "noisy_dropout", channel_dim)
        shape = [size if dim in (0, channel_dim % input.ndim) else 1 for dim, size in enumerate(input.shape)]
    input = zeroed(input, mask, "noisy_dropout", channel_dim)
    if p == 0:
        return input
    # In half precision, neither p nor noise close to 1 has enough digits; the default dtype may be half precision too.
    dtype = arithmetic_dtype(input)
    if distribution == "gaussian":
        noise = torch.randn(shape, dtype=dtype, device=input.device, **drawn_by(drawing(generator)))
        std = (p / (1 - p)) ** 0.5 if p_sets == "variance" else p / (1 - p)
        noise.mul_(std).add_(1)
    else:
        kept = torch.rand(shape, dtype=dtype, device=input.device, **drawn_by(drawing(generator))) >= p
        noise = kept.to(dtype).mul_(1 / (1 - p) if p < 1 else 0)
    return (input * noise).to(input.dtype)


def additive_gaussian_noise(
    input: Tensor,
    std: float,
    *,
    channel_dim: int = 1,
    generator: Generator | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Add N(0, std²) to each element of the input.

    With a `mask` (B, *positions), see `batch_norm`, the output is 0 where it is False; only the mask depends on
    `channel_dim`.
    """
    checks.number("std", std, 0)
    checks.floating(input, "additive_gaussian_noise")
    input = zeroed(input, mask, "additive_gaussian_noise", channel_dim)
    if std == 0:
        return input
    noise = torch.randn(input.shape, dtype=arithmetic_dtype(input), device=input.device, **drawn_by(drawing(generator)))
    y = (input + noise.mul_(std)).to(input.dtype)
    return y if mask is None else masks.zero(y, mask, channel_dim)


class NoisyDropout(Leaf):
    """Multiply the input by Bernoulli or Gaussian noise of mean 1 and variance p/(1-p), in training only.

    Args:
        p: the drop probability; for Gaussian noise, that of the dropout with the same variance.
        distribution: "bernoulli" or "gaussian".
        per: "element" for one draw per element, or "channel" for one per sample and channel.
        p_sets: whether p/(1-p) is the "variance" or the "std" of Gaussian noise.
        channel_dim: the dimension of the channels, for `per="channel"`.
        generator: draws the noise; None is the default generator of the device.

    Shape:
        any; the output has the same shape.

    Examples:
        >>> NoisyDropout(0.2, distribution="gaussian", per="channel")
        NoisyDropout(p=0.2, distribution='gaussian', per='channel')
    """

    def __init__(
        self,
        p: float = 0.5,
        *,
        distribution: Distribution = "bernoulli",
        per: Per = "element",
        p_sets: Spread = "variance",
        channel_dim: int = 1,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        _check_dropout(p, distribution, per, p_sets)
        checks.generator(generator)
        checks.dimension(channel_dim)
        self.p, self.distribution, self.per, self.p_sets = p, distribution, per, p_sets
        self.channel_dim, self.generator = channel_dim, generator

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply noise in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training:
            return zeroed(input, mask, type(self).__name__, self.channel_dim)
        return noisy_dropout(
            input, self.p, distribution=self.distribution, per=self.per, p_sets=self.p_sets,
            channel_dim=self.channel_dim, generator=self.generator, mask=mask,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the settings."""
        p_sets = "" if self.p_sets == "variance" else f", p_sets={self.p_sets!r}"
        channel_dim = "" if self.channel_dim == 1 else f", channel_dim={self.channel_dim}"
        return f"p={self.p}, distribution={self.distribution!r}, per={self.per!r}{p_sets}{channel_dim}"


class AdditiveGaussianNoise(Leaf):
    """Add N(0, std²) to each element of the input, in training only (EAGN).

    Args:
        std: the standard deviation of the noise.
        channel_dim: the dimension of the channels, which a mask does not have.
        generator: draws the noise; None is the default generator of the device.

    Shape:
        any; the output has the same shape.

    Examples:
        >>> AdditiveGaussianNoise(0.1)
        AdditiveGaussianNoise(std=0.1)
    """

    def __init__(self, std: float, *, channel_dim: int = 1, generator: Generator | None = None) -> None:
        super().__init__()
        checks.number("std", std, 0)
        checks.generator(generator)
        checks.dimension(channel_dim)
        self.std, self.channel_dim, self.generator = std, channel_dim, generator

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add noise in training. `mask` is that of `BatchNorm2d.forward`."""
        mask = mask_of(self, input, mask, self.channel_dim)
        if not self.training:
            return zeroed(input, mask, type(self).__name__, self.channel_dim)
        return additive_gaussian_noise(
            input, self.std, channel_dim=self.channel_dim, generator=self.generator, mask=mask
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"std={self.std}" if self.channel_dim == 1 else f"std={self.std}, channel_dim={self.channel_dim}"


def _check_dropout(p: float, distribution: Distribution, per: Per, p_sets: Spread) -> None:
    checks.choice("distribution", distribution, ("bernoulli", "gaussian"))
    checks.choice("per", per, ("element", "channel"))
    checks.choice("p_sets", p_sets, ("variance", "std"))
    if p_sets == "std" and distribution != "gaussian":
        raise ValueError(f"p_sets='std' with distribution={distribution!r}: only for 'gaussian'; leave p_sets out")
    checks.number("p", p, 0, 1, open_high=distribution == "gaussian")


register(
    MethodSpec(
        name="dropout",
        label="dropout",
        title="Dropout with Bernoulli or Gaussian noise",
        equation="y = x · noise of mean 1 and variance p/(1-p), per element or per channel",
        card="noisy-dropout.md",
        noise=NoisyDropout,
        placements=("branch",),
        example={"p": 0.1},
    )
)
register(
    MethodSpec(
        name="eagn",
        label="EAGN",
        title="Element-wise additive Gaussian noise",
        equation="y = x + N(0, std²)",
        card="additive-gaussian-noise.md",
        noise=AdditiveGaussianNoise,
        placements=("inside", "after"),
        example={"std": 0.1},
    )
)

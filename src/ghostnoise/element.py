"""Noise that is drawn per element or per channel regardless of the batch: dropout and additive noise.

They stand outside the engine, as what the paper compares ghost noise with.
"""

from typing import Literal

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.randomness import drawn_by
from ghostnoise.tracing import Leaf

DropoutKind = Literal["bernoulli", "gaussian"]
DropoutPer = Literal["element", "channel"]


def noisy_dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    kind: DropoutKind = "bernoulli",
    per: DropoutPer = "element",
    channel_dim: int = 1,
    generator: Generator | None = None,
) -> Tensor:
    """Multiply x by noise of mean 1 and variance p/(1-p), drawn per element, or per channel of each sample.

    `kind="bernoulli"` is dropout: 0 with probability p, else 1/(1-p). `kind="gaussian"` is N(1, p/(1-p)) (eq. 14).
    """
    _check_dropout(p, kind, per)
    if per == "element":
        checks.floating(x, "noisy_dropout")
        shape = list(x.shape)
    else:
        checks.layout(x, "noisy_dropout", channel_dim)
        shape = [size if dim in (0, channel_dim % x.ndim) else 1 for dim, size in enumerate(x.shape)]
    if p == 0:
        return x
    if kind == "gaussian":
        noise = torch.randn(shape, dtype=x.dtype, device=x.device, **drawn_by(generator))
        return x * noise.mul_((p / (1 - p)) ** 0.5).add_(1)
    kept = torch.rand(shape, device=x.device, **drawn_by(generator)) >= p
    return x * kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0)


def additive_gaussian_noise(x: Tensor, std: float, *, generator: Generator | None = None) -> Tensor:
    """Add N(0, std²) to each element of x."""
    checks.number("std", std, 0)
    checks.floating(x, "additive_gaussian_noise")
    if std == 0:
        return x
    return x + torch.randn(x.shape, dtype=x.dtype, device=x.device, **drawn_by(generator)).mul_(std)


class NoisyDropout(Leaf):
    """Multiply x by Bernoulli or Gaussian noise of mean 1 and variance p/(1-p) in training; eval leaves x alone.

    Args:
        p: the drop rate, or for Gaussian noise the rate of the dropout that has its variance.
        kind: "bernoulli" or "gaussian".
        per: "element", or "channel" for one draw per sample and channel.
        channel_dim: where the channels are, for `per="channel"`.
        generator: draws the noise; the device's default one if None.

    >>> NoisyDropout(0.2, kind="gaussian", per="channel")
    NoisyDropout(p=0.2, kind='gaussian', per='channel')
    """

    def __init__(
        self,
        p: float = 0.5,
        *,
        kind: DropoutKind = "bernoulli",
        per: DropoutPer = "element",
        channel_dim: int = 1,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        _check_dropout(p, kind, per)
        checks.dimension(channel_dim)
        self.p, self.kind, self.per, self.channel_dim, self.generator = p, kind, per, channel_dim, generator

    def forward(self, x: Tensor) -> Tensor:
        """Apply noise in training."""
        if not self.training:
            return x
        return noisy_dropout(
            x, self.p, kind=self.kind, per=self.per, channel_dim=self.channel_dim, generator=self.generator
        )

    def extra_repr(self) -> str:
        """The settings that differ from nn.Dropout's."""
        channel_dim = "" if self.channel_dim == 1 else f", channel_dim={self.channel_dim}"
        return f"p={self.p}, kind={self.kind!r}, per={self.per!r}{channel_dim}"


class AdditiveGaussianNoise(Leaf):
    """Add N(0, std²) to each element of x in training; eval leaves x alone.

    >>> AdditiveGaussianNoise(0.1)
    AdditiveGaussianNoise(std=0.1)
    """

    def __init__(self, std: float, *, generator: Generator | None = None) -> None:
        super().__init__()
        checks.number("std", std, 0)
        self.std, self.generator = std, generator

    def forward(self, x: Tensor) -> Tensor:
        """Add noise in training."""
        return additive_gaussian_noise(x, self.std, generator=self.generator) if self.training else x

    def extra_repr(self) -> str:
        """The noise's strength."""
        return f"std={self.std}"


def _check_dropout(p: float, kind: DropoutKind, per: DropoutPer) -> None:
    checks.choice("kind", kind, ("bernoulli", "gaussian"))
    checks.choice("per", per, ("element", "channel"))
    checks.number("p", p, 0, 1, open_high=kind == "gaussian")

"""The pieces of a network that the settings decide: norms, activations, and noise at the end of residual branches."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from ghostnoise.conversion.table import METHODS
from ghostnoise.distributed import WORLD, initialized
from ghostnoise.element import AdditiveGaussianNoise, NoisyDropout
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.noisy import NoisyBatchNorm1d, NoisyBatchNorm2d, NoisyGroupNorm, NoisyLayerNorm
from ghostnoise.lab.settings import CUTTING, NormSettings, Placement

Normalization = Literal["batch", "layer", "none"]
# Where each noise can be. The paper has dropout in branches, and additive noise before or after the affine.
PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "gni": ("inside", "after", "activation"),
    "agni": ("inside", "after", "activation"),
    "eagn": ("inside", "after"),
    "dropout": ("branch",),
}


class Task(NamedTuple):
    """What a network is built for, and how wide: the shape of an image, the classes, the network's width or widths."""

    shape: tuple[int, int, int]
    classes: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """Gives a network of one kind of normalization its pieces, with the noise of `settings` at `placement`.

    `channel_dim` is where the network has its channels: 1 in images, -1 in tokens.
    """

    settings: NormSettings
    normalization: Normalization
    placement: Placement | None
    channel_dim: int = 1

    def norm(self, channels: int, ndim: int = 2) -> nn.Module:
        """A norm of `channels`, of (B, C, H, W), or with `ndim=1` of (B, C)."""
        if self.normalization == "batch":
            return self._batch_norm(channels, ndim)
        if self.placement in ("inside", "after"):
            noise: Any = {"noise": self.noise(), "inside": self.placement == "inside"}
            if self.channel_dim == -1:
                return NoisyLayerNorm(channels, **noise)
            return NoisyGroupNorm(1, channels, **noise)
        return nn.LayerNorm(channels) if self.channel_dim == -1 else nn.GroupNorm(1, channels)

    def activation(self, kind: type[nn.Module] = nn.ReLU) -> nn.Module:
        """An activation, with noise before it if that is its place."""
        return nn.Sequential(self.noise(), kind()) if self.placement == "activation" else kind()

    def branch(self) -> nn.Module:
        """What follows the second norm of a residual branch: noise if that is its place, else nothing."""
        return self.noise() if self.placement == "branch" else nn.Identity()

    def noise(self) -> nn.Module:
        """The noise of the method, as a layer of its own."""
        settings = self.settings
        options = noise_options(settings, standalone=True)
        if settings.method == "eagn":
            return AdditiveGaussianNoise(**options)
        if settings.method == "dropout":
            return NoisyDropout(**options, channel_dim=self.channel_dim)
        layer: Any = METHODS[settings.method].noise
        made: nn.Module = layer(
            settings.ghost_size, channel_dim=self.channel_dim, process_group=group(settings), **options
        )
        return made

    def _batch_norm(self, channels: int, ndim: int) -> nn.Module:
        method, ranks = self.settings.method, group(self.settings)
        shared: Any = {"eps": self.settings.eps, "momentum": self.settings.momentum}
        if method in CUTTING or (self.placement == "inside" and method in METHODS):
            sized = {"ghost_size": self.settings.ghost_size} | noise_options(self.settings)
            return METHODS[method].ranked[ndim - 1](channels, **shared, **sized, process_group=ranks)
        if self.placement in ("inside", "after"):
            noisy = NoisyBatchNorm1d if ndim == 1 else NoisyBatchNorm2d
            inside = self.placement == "inside"
            return noisy(channels, **shared, noise=self.noise(), inside=inside, process_group=ranks)
        if ranks is not None:
            return METHODS["bn"].ranked[ndim - 1](channels, **shared, process_group=ranks)
        return nn.BatchNorm1d(channels, **shared) if ndim == 1 else nn.BatchNorm2d(channels, **shared)


def refuse_batch_norm_settings(settings: NormSettings, name: str) -> None:
    """Refuse what is not the default where no batch norm would have it."""
    if (settings.eps, settings.momentum) != (1e-5, 0.1):
        raise UserError(
            f"norm.eps={settings.eps}, norm.momentum={settings.momentum} for {name!r} and method {settings.method!r}: "
            "settings of batch norms, and none would have them; leave them out"
        )


def group(settings: NormSettings) -> str | None:
    """The ranks that share a batch, as a layer takes them; None where this process is all there is."""
    return WORLD if settings.scope == "global" and initialized() else None


OPTIONS = ("components", "noise_eps", "law", "dof", "p", "distribution", "per", "std")


def noise_options(settings: NormSettings, standalone: bool = False) -> dict[str, Any]:
    """The method's options, as its batch norm or its standalone layer takes them."""
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    return _renamed(given, standalone)


def _renamed(options: dict[str, Any], standalone: bool) -> dict[str, Any]:
    """Under the names that the layers have."""
    if standalone and "noise_eps" in options:
        options["eps"] = options.pop("noise_eps")
    if (components := options.pop("components", None)) is not None:
        options |= {"shift": components != "scale", "scale": components != "shift"}
    return {{"law": "kind", "distribution": "kind"}.get(name, name): value for name, value in options.items()}

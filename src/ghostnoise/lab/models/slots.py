"""The parts of a network that depend on `[norm]`: norms, activations, and noise in residual branches."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from ghostnoise.engine.ranks import WORLD, initialized
from ghostnoise.lab.config.methods import NormSettings, Placement, methods
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.noisy import NoisyBatchNorm1d, NoisyBatchNorm2d, NoisyGroupNorm, NoisyLayerNorm

Normalization = Literal["batch", "layer", "none"]


class Task(NamedTuple):
    """The shape of a sample, (C, H, W) or (C, L); the number of classes; the width or widths of the network."""

    shape: tuple[int, ...]
    classes: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """Builds the norms and activations of a network, with the noise of `settings` at `placement`.

    `channel_dim` is the dimension of the channels: 1 for images, -1 for tokens.
    """

    settings: NormSettings
    normalization: Normalization
    placement: Placement | None
    channel_dim: int = 1

    def norm(self, channels: int, ndim: int = 2) -> nn.Module:
        """Build a norm for inputs (B, C, H, W), or with `ndim=1` for (B, C) and (B, C, L)."""
        if self.normalization == "batch":
            return self._batch_norm(channels, ndim)
        if self.placement in ("inside", "after"):
            noise: Any = {"noise": self.noise(), "inside": self.placement == "inside"}
            if self.channel_dim == -1:
                return NoisyLayerNorm(channels, **noise)
            return NoisyGroupNorm(1, channels, **noise)
        return nn.LayerNorm(channels) if self.channel_dim == -1 else nn.GroupNorm(1, channels)

    def activation(self, kind: type[nn.Module] = nn.ReLU) -> nn.Module:
        """Build an activation, with noise before it if that is the placement."""
        return nn.Sequential(self.noise(), kind()) if self.placement == "activation" else kind()

    def branch(self) -> nn.Module:
        """Build what follows the second norm of a residual branch: noise if that is the placement, else nothing."""
        return self.noise() if self.placement == "branch" else nn.Identity()

    def noise(self) -> nn.Module:
        """Build the standalone noise layer of the method."""
        settings, layer = self.settings, self.settings.noise
        options = sized(settings) | noise_options(settings)
        takes = inspect.signature(layer).parameters
        options |= {"channel_dim": self.channel_dim} if "channel_dim" in takes else {}
        options |= {"process_group": group(settings)} if "process_group" in takes else {}
        made: nn.Module = layer(**options)
        return made

    def _batch_norm(self, channels: int, ndim: int) -> nn.Module:
        norm, ranks = self.settings, group(self.settings)
        shared: Any = {"eps": norm.eps, "momentum": norm.momentum}
        own = self.placement == "inside" or (norm.replaces_batch_norm and norm.method != "bn")
        if norm.norms is not None and own:
            options = sized(norm) | norm.options
            made: nn.Module = norm.norms[ndim - 1](channels, **shared, **options, process_group=ranks)
            return made
        if self.placement in ("inside", "after"):
            noisy = NoisyBatchNorm1d if ndim == 1 else NoisyBatchNorm2d
            inside = self.placement == "inside"
            return noisy(channels, **shared, noise=self.noise(), inside=inside, process_group=ranks)
        plain = methods()["bn"].norms
        if ranks is not None and plain is not None:
            synchronized: nn.Module = plain[ndim - 1](channels, **shared, process_group=ranks)
            return synchronized
        return nn.BatchNorm1d(channels, **shared) if ndim == 1 else nn.BatchNorm2d(channels, **shared)


def refuse_batch_norm_settings(settings: NormSettings, name: str) -> None:
    """Raise a UserError for settings of batch norms in a network that has none."""
    if (settings.eps, settings.momentum) != (1e-5, 0.1):
        raise UserError(
            f"norm.eps={settings.eps}, norm.momentum={settings.momentum} for {name!r} and method {settings.method!r}: "
            "settings of batch norms, which it does not have; leave them out"
        )


def group(settings: NormSettings) -> str | None:
    """Return the `process_group` of the layers: all ranks for the global scope; None without other ranks."""
    return WORLD if settings.scope == "global" and initialized() else None


def noise_options(settings: NormSettings) -> dict[str, Any]:
    """Return the options of the standalone noise layer; raises a UserError for one that only its batch norm has."""
    takes = inspect.signature(settings.noise).parameters
    for name, value in settings.options.items():
        if name not in takes and value != settings.defaults[name]:
            raise UserError(
                f"norm.{name}={value!r} for {settings.method!r} outside batch norms: an option of noise inside batch "
                f"norms only; use norm.placement=inside in a network that has them, or leave {name} out"
            )
    return {name: value for name, value in settings.options.items() if name in takes}


def sized(settings: NormSettings) -> dict[str, Any]:
    """Return the ghost size as a keyword, for methods that have one."""
    return {"ghost_size": settings.ghost_size} if settings.has("ghost_size") else {}

"""Variants of the batch norms that only conversion creates: followed by timm's drop and act, or lazy."""

import functools
from typing import Any

from torch import Tensor, nn

from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from ghostnoise.torch_private import AnyLazyNorm


class Activated(NormLayer):
    """A batch norm that is followed by `drop` and `act`, as in timm's `BatchNormAct2d`."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize, drop, and activate."""
        y: Tensor = self.act(self.drop(super().forward(input, mask)))
        return y


@functools.cache
def activated(norm: Any) -> type[Any]:
    """Return the variant of a batch norm that is followed by `drop` and `act`."""
    doc = f"`{norm.__name__}`, followed by `drop` and `act`."
    return type(f"Activated{norm.__name__}", (Activated, norm), {"__module__": __name__, "__doc__": doc})


def __getattr__(name: str) -> Any:
    """Return an activated variant by its name, for pickle."""
    norms: list[Any] = []
    if name.startswith("Activated"):
        norms = [norm for spec in registry.specs().values() for norm in spec.norms or ()]
    for norm in norms:
        if name == f"Activated{norm.__name__}":
            return activated(norm)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Lazy(AnyLazyNorm):
    """A lazy batch norm that becomes `cls_to_become`; `convert` sets this class and the options of the layer."""

    cls_to_become: Any

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run as the layer that this has become: torch looks up `forward` before the hook that changes the class."""
        y: Tensor = self.cls_to_become.forward(self, input, mask)
        return y

    def initialize_parameters(self, input: Tensor) -> None:
        """Infer the number of channels from the input, or from a state_dict that was loaded before."""
        super().initialize_parameters(input)
        known = [tensor.shape[0] for tensor in (self.weight, self.running_mean) if tensor is not None]
        self.num_features = known[0] if known else input.shape[1]


class LazyNorm1d(Lazy, nn.LazyBatchNorm1d):
    """A lazy batch norm of (B, C) and (B, C, L)."""


class LazyNorm2d(Lazy, nn.LazyBatchNorm2d):
    """A lazy batch norm of (B, C, H, W)."""


class LazyNorm3d(Lazy, nn.LazyBatchNorm3d):
    """A lazy batch norm of (B, C, D, H, W)."""

"""The methods that `[norm]` can name, as the lab sees them: an adapter of the library's methods.

Nothing else in the lab lists methods. Importing this module does not import torch; calling `methods()` does.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

Placement = Literal["inside", "after", "activation", "branch"]
GhostSize = Literal["required", "optional", "none"]
Share = Annotated[float, Field(ge=0, lt=1)]
Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]

REQUIRED: Any = ...
"""The default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """An option of a method: a setting of `[norm]`, and a keyword of its layers."""

    name: str
    annotation: Any
    default: Any = REQUIRED


@dataclass(frozen=True)
class MethodInfo:
    """A method: its settings, its layers, and where a network can have it."""

    name: str
    ghost_size: GhostSize = "none"
    least_ghost_size: int = 1
    partitions: bool = False
    """Whether the batch is partitioned into ghost batches, which then must fit the batch."""
    placements: tuple[Placement, ...] = ()
    """Where its noise can be injected; empty for methods without noise."""
    options: tuple[Option, ...] = ()
    norms: tuple[Any, ...] | None = None
    """Its batch norms for inputs with 0 (or 1), 2 and 3 spatial dimensions."""
    noise: Any = None
    """Its standalone noise layer."""

    @property
    def shares(self) -> bool:
        """Whether statistics and draws can be shared over processes."""
        return self.norms is not None

    @property
    def replaces_batch_norm(self) -> bool:
        """Whether it is a batch norm without injected noise."""
        return self.norms is not None and not self.placements


NONE = MethodInfo("none")
"""The network's own normalization, where that is not a batch norm."""
COMPONENTS = Option("components", Literal["both", "shift", "scale"], "both")
NOISE_EPS = Option("noise_eps", Least0, 1e-3)
ANALYTICAL = (
    COMPONENTS, Option("law", Literal["fc", "conv"], "fc"), Option("dof", Literal["paper", "exact"], "paper"), NOISE_EPS
)  # fmt: skip
DROPOUT = (
    Option("p", Share),
    Option("distribution", Literal["bernoulli", "gaussian"], "bernoulli"),
    Option("per", Literal["element", "channel"], "element"),
)


@cache
def methods() -> dict[str, MethodInfo]:
    """Return all methods by name, "none" first."""
    from ghostnoise.conversion.table import METHODS
    from ghostnoise.element import AdditiveGaussianNoise, NoisyDropout

    around: tuple[Placement, ...] = ("inside", "after", "activation")
    norms = {name: method.ranked for name, method in METHODS.items()}
    made = [
        NONE,
        MethodInfo("bn", norms=norms["bn"]),
        MethodInfo("gbn", "required", partitions=True, norms=norms["gbn"]),
        MethodInfo("xbn", "optional", least_ghost_size=2, partitions=True, norms=norms["xbn"]),
        MethodInfo("en", "required", partitions=True, norms=norms["en"]),
        MethodInfo(
            "gni", "required", placements=around, options=(COMPONENTS, NOISE_EPS), norms=norms["gni"],
            noise=METHODS["gni"].noise,
        ),
        MethodInfo(
            "agni", "required", placements=around, options=ANALYTICAL, norms=norms["agni"], noise=METHODS["agni"].noise
        ),
        # As in the paper: additive noise before or after the affine, dropout in residual branches.
        MethodInfo(
            "eagn", placements=("inside", "after"), options=(Option("std", Least0),), noise=AdditiveGaussianNoise
        ),
        MethodInfo("dropout", placements=("branch",), options=DROPOUT, noise=NoisyDropout),
    ]  # fmt: skip
    return {info.name: info for info in made}


def options() -> dict[str, list[str]]:
    """Return all options with the methods that have them."""
    found: dict[str, list[str]] = {}
    for info in methods().values():
        for option in info.options:
            found.setdefault(option.name, []).append(info.name)
    return found

"""The methods that `[norm]` can name, as the lab sees them: an adapter of the library's methods.

Nothing else in the lab lists methods. Importing this module does not import torch; calling `methods()` does.
"""

from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticKnownError

from ghostnoise.version import NUMERICS

if TYPE_CHECKING:
    from ghostnoise.methods.registry import MethodSpec

Placement = Literal["inside", "after", "activation", "branch"]
GhostSize = Literal["required", "optional", "none"]
Share = Annotated[float, Field(ge=0, lt=1)]
Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _alpha(value: object) -> object:
    """Accept a number in [0, 1] or "1/N^2" as the `alpha` of EvalNorm; a union of types would report two mistakes."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "1/N^2" or (number and 0 <= value <= 1):  # type: ignore[operator]
        return float(value) if number else value  # type: ignore[arg-type]
    raise PydanticKnownError("literal_error", {"expected": "a number in [0, 1], or '1/N^2'"})


AnyAlpha = Annotated[Any, PlainValidator(_alpha)]

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
    numerics: int = 1
    """How often its results have changed by more than rounding while those of other methods did not, plus 1."""

    @property
    def shares(self) -> bool:
        """Whether statistics and draws can be shared over processes."""
        return self.norms is not None

    @property
    def replaces_batch_norm(self) -> bool:
        """Whether it is a batch norm without injected noise."""
        return self.norms is not None and not self.placements


NONE = MethodInfo("none")
"""The network's own normalization, if that is not a batch norm."""
RANGES = {"p": Share, "std": Least0, "noise_eps": Least0, "min_std": Least0, "self_weight": Share, "alpha": AnyAlpha}
"""Ranges of options that recipes check before a network is built; the layers check all of them."""
STATED = ("p",)
"""Options that a recipe must state although the layer has a default."""


@cache
def methods() -> dict[str, MethodInfo]:
    """Return all methods of the library's registry by name, "none" first."""
    from ghostnoise.methods import registry

    return {"none": NONE} | {name: _info(spec) for name, spec in registry.specs().items()}


def _info(spec: "MethodSpec") -> MethodInfo:
    return MethodInfo(
        name=spec.name,
        ghost_size=spec.ghost_size,
        least_ghost_size=spec.least_ghost_size,
        partitions=spec.partitions,
        placements=spec.placements,
        options=tuple(_option(each.name, each.type, each.default) for each in spec.options),
        norms=spec.norms,
        noise=spec.noise,
        numerics=spec.numerics,
    )


def _option(name: str, annotation: Any, default: Any) -> Option:
    required = default is Parameter.empty or name in STATED
    finite = Annotated[float, Field(allow_inf_nan=False)] if annotation is float else annotation
    return Option(name, RANGES.get(name, finite), REQUIRED if required else default)


def numerics(method: object) -> int:
    """Return the numerics number of runs that this version trains with a method.

    It is higher than all earlier ones of the method. A method that this version does not know has the common number.
    """
    info = methods().get(method) if isinstance(method, str) else None
    return NUMERICS + (info.numerics - 1 if info else 0)


@cache
def options() -> dict[str, list[str]]:
    """Return all options with the methods that have them."""
    found: dict[str, list[str]] = {}
    for info in methods().values():
        for option in info.options:
            found.setdefault(option.name, []).append(info.name)
    return found

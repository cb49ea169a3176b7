"""`[norm]`: a kind for each method, with the options of its layers, derived from the library's registry of methods.

Nothing else in the lab lists methods. Importing this module does not import torch; calling `methods()` does.
"""

from collections.abc import Iterable
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, create_model
from pydantic_core import PydanticKnownError

from ghostnoise.lab.config.section import Above0, Count, Least0, Section, Share, Tree
from ghostnoise.version import NUMERICS

if TYPE_CHECKING:
    from ghostnoise.methods.registry import Option

Placement = Literal["inside", "after", "activation", "branch"]
NONE = "none"
"""The network's own normalization, if that is not a batch norm."""


class NormSettings(Section):
    """How the network is normalized, and which noise is injected where; its kinds are the methods.

    A kind also describes its method: which layers it has, and where a network can have it.
    """

    TAG = "method"
    method: str
    """"bn", or "none" for the network's own normalization where that is not a batch norm; else a method's name."""
    ghost_size: Count | None = None
    """Samples in a ghost batch; without it, XBN uses the whole batch."""
    scope: Literal["local", "global"] = "local"
    """Whether statistics and draws use the samples of each process, or those of all processes."""
    placement: Placement | None = None
    """Noise between normalization and affine ("inside"), after the affine ("after"), before each activation
    ("activation"), or after the second normalization of each residual branch ("branch")."""
    eps: Above0 = 1e-5
    """Added to the variances of a batch norm."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Momentum of the running statistics."""

    placements: ClassVar[tuple[Placement, ...]] = ()
    """Where the noise of the method can be injected; empty for methods without noise."""
    partitions: ClassVar[bool] = False
    """Whether the batch is partitioned into ghost batches, which then must fit the batch."""
    least_ghost_size: ClassVar[int] = 1
    norms: ClassVar[tuple[Any, ...] | None] = None
    """The batch norms of the method for inputs with 0 (or 1), 2 and 3 spatial dimensions."""
    noise: ClassVar[Any] = None
    """The standalone noise layer of the method."""
    numerics: ClassVar[int] = 1
    """How often its results have changed by more than rounding while those of other methods did not, plus 1."""
    replaces_batch_norm: ClassVar[bool] = False
    """Whether it is a batch norm without injected noise."""
    defaults: ClassVar[Tree] = {}
    """The options of the method with their defaults; `...` for those that must be given."""

    @classmethod
    def kinds(cls) -> dict[str, type["NormSettings"]]:
        """Return the methods by name."""
        return methods()

    @property
    def options(self) -> Tree:
        """The options of the method that are set or have a default: keywords of its layers."""
        given = {name: getattr(self, name) for name in self.defaults}
        return {name: value for name, value in given.items() if value is not None}

    def identifying(self) -> Tree:
        """Return the settings that identify a run.

        Without options that have their default: so an option that is added to a method changes no identity.
        """
        return {name: value for name, value in super().identifying().items() if self.defaults.get(name) != value}

    def __reduce__(self) -> Any:
        """Pickle the settings alone: the classes of the kinds have no module."""
        return NormSettings.model_validate, (self.model_dump(exclude_none=True),)


def _alpha(value: object) -> object:
    """Accept a number in [0, 1] or "1/N^2" as the `alpha` of EvalNorm; a union of types would report two mistakes."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "1/N^2" or (number and 0 <= value <= 1):  # type: ignore[operator]
        return float(value) if number else value  # type: ignore[arg-type]
    raise PydanticKnownError("literal_error", {"expected": "a number in [0, 1], or '1/N^2'"})


AnyAlpha = Annotated[Any, PlainValidator(_alpha)]
FINITE = Annotated[float, Field(allow_inf_nan=False)]
RANGES = {"p": Share, "std": Least0, "noise_eps": Least0, "min_std": Least0, "self_weight": Share, "alpha": AnyAlpha}
"""Ranges of options that recipes check before a network is built; the layers check all of them."""
STATED = ("p",)
"""Options that a recipe must state although the layer has a default."""


@cache
def methods() -> dict[str, type[NormSettings]]:
    """Return the kinds of `[norm]` by method, for all methods of the library's registry, "none" first."""
    from ghostnoise.methods import registry

    found = {NONE: kind(NONE)}
    for name, spec in registry.specs().items():
        found[name] = kind(
            name, spec.ghost_size, spec.options, placements=spec.placements, partitions=spec.partitions,
            least_ghost_size=spec.least_ghost_size, norms=spec.norms, noise=spec.noise, numerics=spec.numerics,
        )  # fmt: skip
    return found


def kind(name: str, ghost_size: str = "none", options: "Iterable[Option]" = (), **facts: Any) -> type[NormSettings]:
    """Return the kind of a method; `facts` are class attributes of `NormSettings`."""
    fields: Tree = {"method": (Literal[name], ...)}
    if ghost_size != "optional":
        fields["ghost_size"] = (Count, ...) if ghost_size == "required" else (None, None)
    if not facts.get("placements"):
        fields["placement"] = (None, None)
    if facts.get("norms") is None:
        fields["scope"] = (Literal["local"], "local")
    defaults: Tree = {}
    for each in options:
        required = each.default is Parameter.empty or each.name in STATED
        annotation = RANGES.get(each.name, FINITE if each.type is float else each.type)
        defaults[each.name] = ... if required else each.default
        fields[each.name] = (annotation, defaults[each.name])
    made: type[NormSettings] = create_model(name, __base__=NormSettings, __module__=__name__, **fields)
    replaces = facts.get("norms") is not None and not facts.get("placements")
    for fact, value in (facts | {"defaults": defaults, "replaces_batch_norm": replaces}).items():
        setattr(made, fact, value)
    return made


def numerics(method: object) -> int:
    """Return the numerics number of runs that this version trains with a method.

    It is higher than all earlier ones of the method. A method that this version does not know has the common number.
    """
    found = methods().get(method) if isinstance(method, str) else None
    return NUMERICS + (found.numerics - 1 if found else 0)

"""Which modules of a model are measured, and where their channels are."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from ghostnoise.conversion.channels import is_activation, known_channel_dim
from ghostnoise.conversion.selection import Found, check_model, everything, is_batch_norm, is_norm_layer, listing
from ghostnoise.conversion.table import NOISES

Side: TypeAlias = Literal["input", "output"]


class Place(NamedTuple):
    """A module, and whether what goes in or what comes out is measured."""

    found: Found
    side: Side

    @property
    def name(self) -> str:
        """The module's first name."""
        return self.found.names[0] or type(self.found.module).__name__


def places(model: nn.Module, modules: str | Sequence[str] | None, side: Side | None) -> list[Place]:
    """The modules whose names match `modules`, or else the normalization layers.

    Batch norms and ghost noise are measured at their input, others at their output, where noise would follow.
    """
    check_model(model, "Meter")
    found = everything(model)
    if modules is None:
        chosen = _normalizing(found)
        if not chosen:
            raise ValueError(
                f"no normalization layer in this {type(model).__name__}: give modules= the names of others to measure, "
                f"or patterns such as '*relu*'; it has {_nameable(found)}"
            )
    else:
        chosen = _named(found, [modules] if isinstance(modules, str) else list(modules), type(model).__name__)
    return [Place(each, side or _side(each.module)) for each in chosen]


def channel_dim(place: Place, x: Tensor, given: int | None) -> int:
    """Where the channels of x are: as given, as the type of the module tells, or where its weights fit alone."""
    module = place.found.module
    known = given
    if given is None and isinstance(module, NOISES):
        known = module.channel_dim
    elif given is None and not (is_activation(module) and x.ndim == 3):  # tokens (B, T, C), or a sequence (B, C, L)
        known = known_channel_dim(module)
    if known is not None and not -x.ndim < known < x.ndim:
        raise ValueError(
            f"channel_dim={known}: must be a dimension of the {place.side} of {place.found}, of shape "
            f"{tuple(x.shape)}, other than the batch; use 1, or -1 where channels come last"
        )
    if known is not None:
        return known
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        fitting = [dim for dim in {1, x.ndim - 1} if x.shape[dim] == weight.numel()]
        if len(fitting) == 1:
            return fitting[0]
    raise ValueError(
        f"channel_dim is not known for {place.found}, with a tensor of shape {tuple(x.shape)}: give channel_dim=1, or "
        "-1 where channels come last"
    )


def tensor_in(value: Any, place: Place) -> Tensor:
    """The tensor that a module got or gave: the first one, if there are several."""
    each = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    x = next((item for item in each if isinstance(item, Tensor)), None)
    if x is None:
        raise ValueError(
            f"{place.found} has no tensor as its {place.side}: Meter needs one; leave the module out of modules="
        )
    return x


def _normalizing(found: list[Found]) -> list[Found]:
    """Norms, and noise that stands alone; of a norm that holds noise, one of the two.

    Batch norms measure for their noise. Other norms leave it to the noise, since their output would have it already.
    """
    norms = [each for each in found if is_batch_norm(each.module)]
    inside = {child for norm in norms for child in norm.module.modules()} - {norm.module for norm in norms}
    noises = [each for each in found if isinstance(each.module, NOISES) and each.module not in inside]
    others = [
        each
        for each in found
        if is_norm_layer(each.module)
        and not is_batch_norm(each.module)
        and not isinstance(each.module, NOISES)
        and not any(isinstance(child, NOISES) for child in each.module.modules())
    ]
    chosen = {each.module for each in (*norms, *noises, *others)}
    return [each for each in found if each.module in chosen]


def _named(found: list[Found], patterns: list[str], kind: str) -> list[Found]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for each in found for name in each.names):
            names = [name for each in found for name in each.names if name]
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"modules has {pattern!r}, which nothing in this {kind} matches: {meant}{_nameable(found)}"
            )
    if not patterns:
        raise ValueError("modules is empty: give names or patterns, or None for the normalization layers")
    return [
        each for each in found if any(fnmatchcase(name, pattern) for name in each.names for pattern in patterns)
    ]  # fmt: skip


def _nameable(found: list[Found]) -> str:
    leaves = [each for each in found if each.names[0] and not list(each.module.children())]
    return listing(leaves, most=8) or "none to name"


def _side(module: nn.Module) -> Side:
    return "input" if is_batch_norm(module) or isinstance(module, NOISES) else "output"

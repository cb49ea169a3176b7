"""Code that gives the measured layers of a model ghost noise, as `advise` prints it.

`Meter` records a `Placement` for each layer while it has the model: how `ghostnoise.convert` can select the layer, and
where the channels are. `convert_calls` makes the code from the placements alone, so it also works for a stored reading.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.utils import parametrize

from ghostnoise.conversion.insertion import CHILD
from ghostnoise.conversion.targets import Found, is_activation, is_batch_norm, known_channel_dim
from ghostnoise.methods import registry

How: TypeAlias = Literal["convert", "after", "before", "set", "impossible"]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
BATCH_NORM = "batch norm"


@dataclass(frozen=True)
class Placement:
    """How a measured layer can get ghost noise."""

    how: How
    """"convert": a batch norm, which is converted. "after" and "before": noise is inserted at the module. "set": a
    noise layer of the user, whose ghost size is set. "impossible": a container, or a module with several outputs."""
    name: str
    """Name of the module in the model."""
    channel_dim: int | None
    """Dimension of the channels that was measured, -1 if they come last; None if both 1 and -1 are right."""
    known: bool
    """Whether `convert` knows the channel dimension from the type of the module."""
    types: tuple[tuple[str, int], ...]
    """Types that select the module: the name to import each by, and how many modules of the model it selects that were
    not to be measured. For a batch norm, only `BATCH_NORM`."""


def placements(chosen: Sequence[tuple[Found, str]], model: Sequence[Found]) -> list[Placement]:
    """Return the placements of modules, each with the side to measure; channel dimensions are added with batches."""
    hosts = [_host(found, model) or found for found, _ in chosen]
    others = {each.module for each in model} - {host.module for host in hosts}
    others = {module for module in others if not isinstance(module, registry.inserted())}
    return [_placement(found, host, side, others) for (found, side), host in zip(chosen, hosts, strict=True)]


def _placement(found: Found, host: Found, side: str, others: set[nn.Module]) -> Placement:
    module: Any = host.module
    how = _how(found.module, side)
    if how == "convert":
        return Placement(how, host.names[0], None, True, ((BATCH_NORM, sum(map(is_batch_norm, others))),))
    if host is not found:
        how = "before" if module.ghost_noise.insertion_point.before else "after"
    known = known_channel_dim(module) is not None and not is_activation(module)
    kinds = [kind for kind in parametrize.type_before_parametrizations(module).__mro__ if issubclass(kind, nn.Module)]
    types = [
        (path, sum(isinstance(each, kind) for each in others))
        for kind in kinds
        if kind is not nn.Module and (path := _import_path(kind))
    ]
    types.sort(key=lambda each: not each[0].startswith("torch.nn."))  # stable: otherwise the most derived type first
    return Placement(how, host.names[0], None, known, tuple(types))


def with_channel_dim(found: Placement, channel_dim: int, ndim: int, single: bool) -> Placement:
    """Add the channel dimension of a batch of `ndim` dimensions; `single`: whether it is the only value."""
    dim = channel_dim % ndim
    how: How = found.how if single or found.how in ("convert", "set") else "impossible"
    return replace(found, how=how, channel_dim=None if ndim == 2 else -1 if dim == ndim - 1 else dim)


def convert_calls(placements: Sequence[Placement], ghost_size: int) -> list[str]:
    """Return lines of Python that give these layers of `model` ghost noise; empty if that is impossible for all."""
    calls, imports = [], ["import ghostnoise"]
    start = f'ghostnoise.convert(model, "gni", ghost_size={ghost_size}'
    norms = [each for each in placements if each.how == "convert"]
    if norms:
        all_of_them = not any(dict(each.types)[BATCH_NORM] for each in norms)
        calls.append(f"{start})" if all_of_them else f"{start}, where={_by_name(norms)})")
    for how in ("after", "before"):
        for dim, group in _by_channel_dim([each for each in placements if each.how == how]):
            types, rest = _selecting_types(group, placements)
            selected = [each for each in group if each not in rest]
            if types:
                expressions = ", ".join(map(_expression, types))
                argument = f"{how}={expressions}" if len(types) == 1 else f"{how}=({expressions})"
                imports += map(_import, types)
                calls.append(f"{start}, {argument}{_dim_argument(dim, selected)})")
            if rest:
                argument = f"{how}=nn.Module, where={_by_name(rest)}"
                imports.append("from torch import nn")
                calls.append(f"{start}, {argument}{_dim_argument(dim, rest)})")
    own = [each.name for each in placements if each.how == "set"]
    calls += [f"model.get_submodule({name!r}).ghost_size = {ghost_size}" for name in own]
    if not any(call.startswith("ghostnoise.") for call in calls):
        imports = []
    return [*dict.fromkeys(imports), *calls]


def _how(module: nn.Module, side: str) -> How:
    if is_batch_norm(module):
        return "convert"
    if isinstance(module, registry.noises()):
        return "set"
    if isinstance(module, CONTAINERS):
        return "impossible"
    return "after" if side == "output" else "before"


def _host(found: Found, model: Sequence[Found]) -> Found | None:
    """Return the module at which `convert` inserted a noise layer; None if it is not an inserted noise layer."""
    if not (isinstance(found.module, registry.noises()) and hasattr(found.module, "insertion_point")):
        return None
    name = found.names[0].removesuffix(CHILD).removesuffix(".")
    return next((each for each in model if name in each.names), None)


def _import_path(kind: type[Any]) -> str | None:
    """Return the shortest name by which a type can be imported; None if it cannot, as inside of a function."""
    if kind.__module__ == "__main__" or kind.__qualname__ != kind.__name__ or kind.__name__.startswith("_"):
        return None
    parts = kind.__module__.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    fitting = [name for name in modules if getattr(sys.modules.get(name), kind.__name__, None) is kind]
    return f"{fitting[0]}.{kind.__name__}" if fitting else None


def _import(path: str) -> str:
    module, _, name = path.rpartition(".")
    return "from torch import nn" if module == "torch.nn" else f"from {module} import {name}"


def _expression(path: str) -> str:
    module, _, name = path.rpartition(".")
    return f"nn.{name}" if module == "torch.nn" else name


def _dim_argument(dim: int, placements: Sequence[Placement]) -> str:
    return "" if all(each.known for each in placements) else f", channel_dim={dim}"


def _by_channel_dim(placements: Sequence[Placement]) -> list[tuple[int, list[Placement]]]:
    """Group layers by channel dimension; those for which 1 and -1 are both right join layers of their type."""
    groups: dict[int, list[Placement]] = {}
    for each in placements:
        if each.channel_dim is not None:
            groups.setdefault(each.channel_dim, []).append(each)
    for each in placements:
        if each.channel_dim is None:
            alike = [dim for dim, group in groups.items() if any(other.types == each.types for other in group)]
            dim = next(
                iter([*(dim for dim in alike if dim in (1, -1)), *(dim for dim in (-1, 1) if dim in groups)]), -1
            )
            groups.setdefault(dim, []).append(each)
    return list(groups.items())


def _selecting_types(group: Sequence[Placement], measured: Sequence[Placement]) -> tuple[list[str], list[Placement]]:
    """Return types that select layers of the group and no other module, and the layers that need their names."""
    chosen: list[str] = []
    rest = list(group)
    for path in dict.fromkeys(path for each in group for path, _ in each.types):
        selected = [each for each in measured if path in dict(each.types)]
        unambiguous = _expression(path) not in map(_expression, chosen)
        exact = all(each in group and not dict(each.types)[path] for each in selected)
        if unambiguous and exact and any(each in rest for each in selected):
            chosen.append(path)
            rest = [each for each in rest if each not in selected]
    return chosen, rest


def _by_name(placements: Sequence[Placement]) -> str:
    names = [each.name for each in placements]
    condition = f"name == {names[0]!r}" if len(names) == 1 else f"name in {tuple(names)!r}"
    return f"lambda name, module: {condition}"

"""A table of the layers of this library in a model."""

from collections import Counter
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from ghostnoise import checks
from ghostnoise.conversion import insertion, swap, wrappers
from ghostnoise.conversion.schedules import has_ghost_size, schedule_of
from ghostnoise.conversion.targets import Found, everything, listing
from ghostnoise.conversion.variants import Lazy
from ghostnoise.methods import registry
from ghostnoise.text import counted
from ghostnoise.torch_private import backward_hooks, forward_hooks, is_lazy_hook


class LayerSummary(NamedTuple):
    """A layer of this library in a model; `was` is empty for noise on its own."""

    name: str
    layer: str
    was: str
    method: str
    ghost_size: int | None
    scope: str
    notes: str


class Summary(tuple[LayerSummary, ...]):
    """The layers of this library in a model; prints as a table, in which equal layers share a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no ghostnoise layers"
        groups: dict[tuple[Any, ...], list[str]] = {}
        for row in self:
            groups.setdefault(row[1:], []).append(row.name)
        cells = [LayerSummary._fields, *((listing(names), *map(str, group)) for group, names in groups.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(["  ".join(line).rstrip() for line in lines] + [self._total()])

    def _total(self) -> str:
        """Return the number of layers, with their methods and ghost sizes."""
        kinds = Counter(row.method + (f", ghost size {row.ghost_size}" if row.ghost_size else "") for row in self)
        parts = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()]
        return f"{counted(len(self), 'layer')}: {'; '.join(parts)}"


def summary(model: nn.Module) -> Summary:
    """Return the layers of this library in `model`, one row each; print it to see a table with a line for equal layers.

    The `method` is the most specific name that `convert` has for the layer, such as "gni-shift". The `scope` is "local"
    for statistics of this process alone, and "global" for those of a process group.

    Examples:
        >>> from ghostnoise import convert
        >>> print(summary(convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "gni", ghost_size=16)))
        name  layer                  was          method  ghost_size  scope  notes
        ----  ---------------------  -----------  ------  ----------  -----  -----
        1     GhostNoiseBatchNorm1d  BatchNorm1d  gni     16          local
        1 layer: gni, ghost size 16
    """
    checks.module(model, "summary")
    rows, wrapped = [], {wrapper.norm: wrapper for wrapper in wrappers.wrappers(model)}
    for found in everything(model):
        if swap.is_ours(found.module):
            rows.append(_norm(found, wrapped.get(found.module)))
        noise = insertion.inserted(found.module)
        if noise is not None:
            rows.append(_row(found, noise, type(noise), "", [_side(found, noise)]))
        if isinstance(found.module, registry.inserted()) and not insertion.is_inserted(found.module):
            rows.append(_row(found, found.module, type(found.module), "", []))
    return Summary(rows)


def _norm(found: Found, wrapper: wrappers.Wrapper | None) -> LayerSummary:
    module = found.module
    notes = ["lazy"] if isinstance(module, Lazy) else []
    if wrapper is not None:
        library = wrapper.defined.__module__.partition(".")[0]
        notes.append(f"in {library}'s {type(wrapper.found.module).__name__}")
    if parametrize.is_parametrized(module):
        notes.append(f"parametrized: {', '.join(module.parametrizations)}")  # type: ignore[arg-type]
    return _row(found, module, swap.current(module), swap.origin(module).layer.__name__, notes)


def _row(found: Found, layer: Any, kind: type[nn.Module], was: str, notes: list[str]) -> LayerSummary:
    schedule = schedule_of(layer)
    if schedule is not None:
        notes.append(type(schedule).__name__)
    tables = (*forward_hooks(found.module), *backward_hooks(found.module))
    hooks = sum(_is_foreign(hook) for table in tables for hook in table.values())
    if hooks:
        notes.append(f"hooks: {hooks}")
    if len(found.names) > 1:
        notes.append(f"also {', '.join(found.names[1:])}")
    size = layer.ghost_size if has_ghost_size(layer) else None
    method = swap.name_of(kind, vars(layer))
    scope = "local" if getattr(layer, "process_group", None) is None else "global"
    return LayerSummary(found.names[0], kind.__name__, was, method, size, scope, "; ".join(notes))


def _is_foreign(hook: Any) -> bool:
    ours = insertion.is_watch(hook) or hook in (insertion.inject_before, insertion.inject_after)
    return not (ours or is_lazy_hook(hook))


def _side(found: Found, noise: Any) -> str:
    kind = parametrize.type_before_parametrizations(found.module).__name__
    return f"{'before' if noise.insertion_point.before else 'after'} {kind}"

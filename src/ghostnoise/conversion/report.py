"""What a conversion has made of a model."""

from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from ghostnoise.conversion import insertion, scopes, swap, table, watch
from ghostnoise.conversion.schedules import schedule_of
from ghostnoise.conversion.selection import Found, check_model, everything
from ghostnoise.conversion.variants import Lazy

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Row(NamedTuple):
    """A layer of this library in a model; `was` is empty for standalone noise."""

    name: str
    layer: str
    was: str
    method: str
    ghost_size: int | None
    scope: str
    notes: str


class Summary(tuple[Row, ...]):
    """The rows; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no ghostnoise layers"
        cells = [Row._fields, *(tuple(map(str, row)) for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join("  ".join(line).rstrip() for line in lines)


def summary(model: nn.Module) -> Summary:
    """The layers of this library in `model`, a row each: print it for a table.

    >>> from ghostnoise import convert
    >>> print(summary(convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "gni", ghost_size=16)))
    name  layer                  was          method  ghost_size  scope  notes
    ----  ---------------------  -----------  ------  ----------  -----  -----
    1     GhostNoiseBatchNorm1d  BatchNorm1d  gni     16          local
    """
    check_model(model, "summary")
    rows = []
    for found in everything(model):
        if swap.is_ours(found.module):
            rows.append(_norm(found))
        noise = insertion.inserted(found.module)
        if noise is not None:
            rows.append(_row(found, noise, type(noise), "", [_place(found, noise)]))
        if isinstance(found.module, table.NOISES) and not hasattr(found.module, "place"):
            rows.append(_row(found, found.module, type(found.module), "", []))
    return Summary(rows)


def _norm(found: Found) -> Row:
    module = found.module
    notes = ["lazy"] if isinstance(module, Lazy) else []
    if parametrize.is_parametrized(module):
        notes.append(f"parametrized: {', '.join(module.parametrizations)}")  # type: ignore[arg-type]
    return _row(found, module, swap.current(module), swap.origin(module).layer.__name__, notes)


def _row(found: Found, layer: Any, kind: type[nn.Module], was: str, notes: list[str]) -> Row:
    size = getattr(layer, "ghost_size", None)
    method = table.name_of(kind, vars(layer))
    schedule = schedule_of(layer)
    if schedule is not None:
        notes.append(type(schedule).__name__)
    hooks = sum(_is_theirs(hook) for name in HOOKS for hook in getattr(found.module, name).values())
    if hooks:
        notes.append(f"hooks: {hooks}")
    if len(found.names) > 1:
        notes.append(f"also {', '.join(found.names[1:])}")
    return Row(found.names[0], kind.__name__, was, method, size, scopes.name_of(layer), "; ".join(notes))


def _is_theirs(hook: Any) -> bool:
    infers = getattr(hook, "__name__", "") == "_infer_parameters"  # a lazy layer's own
    return not (infers or watch.is_watch(hook) or hook in (insertion.inject_before, insertion.inject_after))


def _place(found: Found, noise: Any) -> str:
    kind = parametrize.type_before_parametrizations(found.module).__name__
    return f"{'before' if noise.place.before else 'after'} {kind}"

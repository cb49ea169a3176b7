"""The sections of a recipe that make it an experiment: `[grid]`, `[select]` and `[report]`.

`[grid]` has the `seeds`, `axes` that are crossed, `zip` for axes that go together, and `methods`: a label, the settings
that make it, and where it differs: other `axes`, and those that it goes `without`. `[select]` names the axes that are
tuned on the validation images. `paper` holds the paper's numbers.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.overrides import RESERVED
from ghostnoise.lab.validation import KEYS, RULES, spelled, unknown


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as one with dotted keys."""
    pairs: dict[str, Any] = {}
    for name, value in tables.items():
        nested = isinstance(value, Mapping)
        pairs |= {f"{name}.{key}": each for key, each in flat(value).items()} if nested else {name: value}
    return pairs


def _flat(given: object) -> object:
    """TOML reads `norm.method = ...` as a table in a table."""
    return flat(given) if isinstance(given, Mapping) else given


class Part(BaseModel):
    """A table of an experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]
Table = Annotated[Axes, BeforeValidator(_flat)]


class Method(Part):
    """A line of a table, or a curve of a figure."""

    label: Annotated[str, Field(min_length=1)]
    set: Annotated[dict[str, Any], BeforeValidator(_flat)] = {}
    axes: Table = {}
    without: list[str] = []
    paper: str | dict[str, str] | None = None
    """The paper's number, or one for each value of the first axis."""


class GridSettings(Part):
    """`[grid]`."""

    seeds: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)] = [0]
    axes: Table = {}
    zip: list[Table] = []
    methods: Annotated[list[Method], Field(min_length=1)]

    def tables(self) -> list[Axes]:
        """All tables of axes."""
        return [self.axes, *self.zip, *(method.axes for method in self.methods)]

    def names(self) -> list[str]:
        """What any axis changes."""
        return list(dict.fromkeys(key for table in self.tables() for key in table))

    def labels(self) -> list[str]:
        """What the methods are called."""
        return [method.label for method in self.methods]


class Select(Part):
    """`[select]`."""

    axes: Annotated[list[str], Field(min_length=1)]
    metric: Literal["accuracy", "best_accuracy", "loss"] = "accuracy"


class ReportSettings(Part):
    """`[report]`: the form of the figure, and what the claim says."""

    form: Literal["curves", "bars", "noise"] = "bars"
    x: str | None = None
    """The axis of a figure with curves."""
    baseline: str | None = None
    """The method that others are compared with, the first if unset."""
    claims: list[str] = []
    """Such as "GNI > GBN": the best cells of two methods."""
    law_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    """The ghost size of the law that is drawn beside measured noise."""


Kind = TypeVar("Kind", bound=Part)


def read(kind: type[Kind], given: object, name: str) -> Kind:
    """A section out of what was written; each mistake is a line of the error."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError("\n".join(_line(each, name) for each in error.errors(include_url=False))) from None


def check(grid: GridSettings, select: Select | None, report: ReportSettings) -> None:
    """Raise a UserError with a line for each thing that the sections name and that is not there, or is there twice."""
    lines = [*_of_grid(grid), *_of_select(grid, select), *_of_report(grid, report)]
    if lines:
        raise UserError("\n".join(lines))


def _line(mistake: ErrorDetails, name: str) -> str:
    where = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in mistake["loc"])
    match mistake["type"]:
        case "extra_forbidden":
            return f"{where}: unknown; leave it out"
        case "missing":
            return f"{where}: missing; it has no default, give one"
        case kind:
            rule = RULES[kind].format(**mistake.get("ctx", {})) if kind in RULES else mistake["msg"]
            return f"{where}={spelled(mistake['input'])}: {rule}"


def _of_grid(grid: GridSettings) -> Iterator[str]:
    for key in dict.fromkeys([*grid.names(), *(key for method in grid.methods for key in method.set)]):
        if key == "seed":
            yield "grid: seed is no axis; give grid.seeds"
        elif key in RESERVED:
            yield f"grid: {key}: set by {RESERVED[key]}, and no axis; leave it out"
        elif key not in KEYS:
            yield f"grid: {unknown(key)}"
    axes, labels = grid.names(), grid.labels()
    for method in grid.methods:
        yield from (f"grid: {method.label} without {key}: no such axis" for key in method.without if key not in axes)
        shared = [*grid.axes, *(key for table in grid.zip for key in table)]
        for key in method.set:
            if key in method.axes or (key in shared and key not in method.without):
                yield f"grid: {method.label} sets {key}, which is an axis; add it to the method's `without`"
    for table in grid.zip:
        if len({len(values) for values in table.values()}) > 1:
            counts = " and ".join(f"{key} has {len(values)} values" for key, values in table.items())
            yield f"grid.zip: {counts}; must be as many"
        yield from (f"grid.zip: {key} is in grid.axes too; take one out" for key in table if key in grid.axes)
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        yield f"grid: two methods are called {label}; rename one"


def _of_select(grid: GridSettings, select: Select | None) -> Iterator[str]:
    for key in select.axes if select else ():
        if key not in grid.names():
            yield f"select.axes: {key} is no axis of the grid; it has {', '.join(grid.names()) or 'none'}"


def _of_report(grid: GridSettings, report: ReportSettings) -> Iterator[str]:
    named = [report.baseline, *(word.strip() for claim in report.claims for word in claim.split(">"))]
    for label in dict.fromkeys(named):
        if label is not None and label not in grid.labels():
            yield f"report: there is no method {label!r}; there are {', '.join(grid.labels())}"
    if report.form == "curves" and report.x not in grid.names():
        there = ", ".join(grid.names()) or "it has none"
        yield f"report.x={report.x!r}: curves need an axis of the grid: {there}"

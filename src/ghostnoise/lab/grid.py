"""The runs of an experiment: methods by axes by seeds, and which of them are tuned before others are tested.

A recipe's `[grid]` has the `seeds`, `axes` that are crossed, `zip` for axes that go together, and `methods`: a label,
the settings that make it, and where it differs: other `axes`, and those that it goes `without`. `[select]` names the
axes that are tuned on the validation images; the best cell of each method is then trained on all training images, and
tested. `paper` holds the paper's numbers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ghostnoise.lab import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.overrides import Tree, applied, values_of
from ghostnoise.lab.settings import Settings
from ghostnoise.lab.validation import KEYS, mistakes_of, unknown, validated

Axes = dict[str, list[Any]]


def flat(given: object) -> object:
    """Nested tables as one with dotted keys: TOML reads `norm.method = ...` as a table in a table."""
    if not isinstance(given, Mapping):
        return given
    pairs: dict[str, Any] = {}
    for name, value in given.items():
        inner = flat(value)
        pairs |= {f"{name}.{key}": each for key, each in inner.items()} if isinstance(inner, dict) else {name: inner}
    return pairs


class Part(BaseModel):
    """A table of the grid."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Values = Annotated[list[Any], Field(min_length=1)]
Table = Annotated[dict[str, Values], BeforeValidator(flat)]


class Method(Part):
    """A line of a table, or a curve of a figure."""

    label: Annotated[str, Field(min_length=1)]
    set: Annotated[dict[str, Any], BeforeValidator(flat)] = {}
    axes: Table = {}
    without: list[str] = []
    paper: str | dict[str, str] | None = None
    """The paper's number, or one for each value of the first axis."""


class GridSettings(Part):
    """`[grid]`."""

    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    axes: Table = {}
    zip: list[Table] = []
    methods: Annotated[list[Method], Field(min_length=1)]


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


@dataclass(frozen=True)
class Cell:
    """A method at a place on its axes: the runs that differ in their seed alone."""

    method: str
    at: tuple[tuple[str, Any], ...]
    settings: Settings
    paper: str | None = None

    @property
    def name(self) -> str:
        """The method and its place."""
        return " ".join([self.method, *(f"{key.rpartition('.')[2]}={value}" for key, value in self.at)])

    def run(self, seed: int) -> Settings:
        """The settings of one run."""
        return self.settings.model_copy(update={"seed": seed})


@dataclass(frozen=True)
class Experiment:
    """A recipe with its grid."""

    recipe: recipe.Recipe
    grid: GridSettings
    select: Select | None
    report: ReportSettings
    tree: Tree
    smoke: bool = False

    @property
    def seeds(self) -> list[int]:
        """The seeds of every cell."""
        return self.grid.seeds

    def cells(self) -> list[Cell]:
        """All cells; those that are tuned first, if any are, score the validation images."""
        split = {"data.evaluate": "validation"} if self.select else {}
        made = [cell for method in self.grid.methods for cell in self._cells(method, split)]
        return _distinct(made, self.smoke)

    def tested(self, cell: Cell) -> Cell:
        """A tuned cell as it is tested: trained on all training images."""
        settings = cell.settings
        data = settings.data.model_copy(update={"evaluate": "test"})
        return replace(cell, settings=settings.model_copy(update={"data": data}))

    def _cells(self, method: Method, more: Mapping[str, Any]) -> Iterator[Cell]:
        for at in itertools.product(*_axes(self.grid, method)):
            place = [pair for group in at for pair in group]
            tree = applied(self.tree, {**method.set, **more, **dict(place)})
            settings = recipe.complete(validated(tree, place=f"{method.label}: "), self.smoke)
            yield Cell(method.label, tuple(place), settings, _paper(method, place))


def load(
    name_or_path: str, overrides: Sequence[str] = (), *, smoke: bool = False, seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> Experiment:  # fmt: skip
    """A recipe's experiment; an override of an axis leaves that one value of it. `only` keeps methods by label."""
    chosen = recipe.load(name_or_path, overrides, smoke=smoke)
    if "grid" not in chosen.plan:
        raise UserError(f"recipe {name_or_path}: has no [grid]; `ghostnoise train {name_or_path}` runs it once")
    kinds: dict[str, type[Part]] = {"grid": GridSettings, "select": Select, "report": ReportSettings}
    grid, select, report = (_read(kind, chosen.plan.get(name), name) for name, kind in kinds.items())
    grid = _fixed(grid, overrides)
    _check(grid, select, report)
    if only:
        grid = _only(grid, only)
    if seeds is not None:
        grid = grid.model_copy(update={"seeds": list(dict.fromkeys(seeds))})
    if smoke:
        grid = _smaller(grid)
    return Experiment(chosen, grid, select, report or ReportSettings(), chosen.tree, smoke)


def _read(kind: type[Part], given: object, name: str) -> Any:
    if given is None:
        return None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError("\n".join(mistakes_of(error, f"{name}."))) from None


def _axes(grid: GridSettings, method: Method) -> list[list[list[tuple[str, Any]]]]:
    """The axes of a method: each a list of places, each of them pairs of key and value."""
    own = {**grid.axes, **method.axes}
    crossed = {key: values for key, values in own.items() if key not in method.without}
    groups = [[[(key, value)] for value in values] for key, values in crossed.items()]
    for table in grid.zip:
        kept = {key: values for key, values in table.items() if key not in method.without and key not in method.axes}
        if kept:
            groups.append([list(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)])
    return groups


def _check(grid: GridSettings, select: Select | None, report: ReportSettings | None) -> None:
    """All keys are settings, axes that go together are of one length, and labels are met once."""
    lines = []
    tables = [grid.axes, *grid.zip, *(method.axes for method in grid.methods), *(each.set for each in grid.methods)]
    for key in dict.fromkeys(key for table in tables for key in table):
        if key == "seed":
            lines.append("grid: seed is no axis; give grid.seeds")
        elif key not in KEYS:
            lines.append(f"grid: {unknown(key)}")
    axes = {
        *grid.axes,
        *(key for table in grid.zip for key in table),
        *(key for each in grid.methods for key in each.axes),
    }
    for method in grid.methods:
        lines += [f"grid: {method.label} without {key}: no such axis" for key in method.without if key not in axes]
    lines += [
        f"grid.zip: {' and '.join(f'{key} has {len(values)} values' for key, values in table.items())}; must be as many"
        for table in grid.zip
        if len({len(values) for values in table.values()}) > 1
    ]
    labels = [method.label for method in grid.methods]
    lines += [
        f"grid: two methods are called {label}; rename one"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    if select:
        lines += [f"select.axes: {key} is no axis of the grid" for key in select.axes if key not in axes]
    if report:
        named = [report.baseline, *(word.strip() for claim in report.claims for word in claim.split(">"))]
        lines += [
            f"report: there is no method {label!r}; there are {', '.join(labels)}"
            for label in named
            if label and label not in labels
        ]
        if report.form == "curves" and report.x not in axes:
            lines.append(
                f"report.x={report.x!r}: curves need an axis of the grid: {', '.join(sorted(axes)) or 'it has none'}"
            )
    if lines:
        raise UserError("\n".join(lines))


def _fixed(grid: GridSettings, overrides: Sequence[str]) -> GridSettings:
    """With one value on the axes that the command line names; what methods set is not to be changed there."""
    given = values_of(overrides)
    if "seed" in given:
        raise UserError("seed: an experiment has several; give --seeds")
    for method in grid.methods:
        for key in method.set:
            if key in given:
                raise UserError(f"{key}: what tells the methods of this experiment apart; choose one with --only LABEL")

    def narrowed(table: Axes) -> Axes:
        return {key: [given[key]] if key in given else values for key, values in table.items()}

    methods = [method.model_copy(update={"axes": narrowed(method.axes)}) for method in grid.methods]
    zipped = [table for table in grid.zip if not any(key in given for key in table)]
    freed = {key: [given[key]] for table in grid.zip for key in table if key in given}
    return grid.model_copy(update={"axes": narrowed(grid.axes) | freed, "zip": zipped, "methods": methods})


def _only(grid: GridSettings, labels: Sequence[str]) -> GridSettings:
    there = [method.label for method in grid.methods]
    for label in labels:
        if label not in there:
            raise UserError(f"--only {label}: no such method; there are {', '.join(there)}")
    return grid.model_copy(update={"methods": [method for method in grid.methods if method.label in labels]})


def _smaller(grid: GridSettings) -> GridSettings:
    """The first two seeds, and the ends of every axis."""

    def ends(table: Axes) -> Axes:
        return {
            key: list(dict.fromkeys([values[0], values[-1]])) if _plain(values) else values[:2]
            for key, values in table.items()
        }

    methods = [method.model_copy(update={"axes": ends(method.axes)}) for method in grid.methods]
    update = {
        "seeds": grid.seeds[:2],
        "axes": ends(grid.axes),
        "zip": [ends(table) for table in grid.zip],
        "methods": methods,
    }
    return grid.model_copy(update=update)


def _plain(values: list[Any]) -> bool:
    return all(not isinstance(value, list) for value in values)


def _distinct(cells: list[Cell], forgiving: bool) -> list[Cell]:
    """Refuse two cells that are the same run; shrunk ones may well be."""
    found: dict[str, Cell] = {}
    for cell in cells:
        key = recipe.identity(cell.settings)
        if key not in found:
            found[key] = cell
        elif not forgiving:
            raise UserError(f"grid: {found[key].name} and {cell.name} are the same run; take one of them out")
    return list(found.values())


def _paper(method: Method, place: list[tuple[str, Any]]) -> str | None:
    if isinstance(method.paper, dict):
        return method.paper.get(str(place[0][1])) if place else None
    return method.paper

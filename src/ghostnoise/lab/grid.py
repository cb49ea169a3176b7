"""The runs of an experiment: methods by axes by seeds, and which of them are tuned before others are tested."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ghostnoise.lab import recipe, sections
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.overrides import Tree, Unset, applied, values_of
from ghostnoise.lab.sections import Axes, GridSettings, Method, ReportSettings, Select
from ghostnoise.lab.settings import Settings
from ghostnoise.lab.validation import validated

__all__ = ["Axes", "Cell", "Experiment", "GridSettings", "Method", "ReportSettings", "Select", "load"]

Pairs = tuple[tuple[str, Any], ...]
SMOKE_SEEDS = 2


@dataclass(frozen=True)
class Cell:
    """A method at a place on its axes: the runs that differ in their seed alone."""

    method: str
    at: Pairs
    settings: Settings
    paper: str | None = None

    @property
    def name(self) -> str:
        """The method and its place."""
        return _named(self.method, self.at)

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
        """All cells; with `[select]`, as they are tuned: they score the validation images."""
        return list(self._made)

    def group(self, cell: Cell) -> str:
        """The method and its place on the axes that are not tuned: one cell of each group is tested."""
        tuned = self.select.axes if self.select else []
        return _named(cell.method, tuple(pair for pair in cell.at if pair[0] not in tuned))

    def tested(self, cell: Cell) -> Cell:
        """A tuned cell as it is tested: trained on all training images."""
        settings = cell.settings
        data = settings.data.model_copy(update={"evaluate": "test"})
        return replace(cell, settings=settings.model_copy(update={"data": data}))

    @cached_property
    def _made(self) -> list[Cell]:
        split = {"data.evaluate": "validation"} if self.select else {}
        made = [cell for method in self.grid.methods for cell in self._cells(method, split)]
        return _distinct(made, self.smoke)

    def _cells(self, method: Method, more: Mapping[str, Any]) -> Iterator[Cell]:
        base = {**method.set, **more}
        for groups in itertools.product(*_places(self.grid, method)):
            at = tuple(itertools.chain.from_iterable(groups))
            tree = applied(self.tree, base | dict(at))
            settings = recipe.complete(validated(tree, place=f"{_named(method.label, at)}: "), self.smoke)
            yield Cell(method.label, at, settings, _paper(method, at))


def load(
    name_or_path: str, overrides: Sequence[str] = (), *, smoke: bool = False, seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> Experiment:  # fmt: skip
    """A recipe's experiment; an override of an axis leaves that one value of it. `only` keeps methods by label."""
    chosen = recipe.load(name_or_path, overrides, smoke=smoke)
    if "grid" not in chosen.plan:
        raise UserError(f"recipe {name_or_path}: has no [grid]; `ghostnoise train {name_or_path}` runs it once")
    grid = sections.read(GridSettings, chosen.plan["grid"], "grid")
    select = sections.read(Select, chosen.plan["select"], "select") if "select" in chosen.plan else None
    report = sections.read(ReportSettings, chosen.plan.get("report", {}), "report")
    sections.check(grid, select, report)
    if only:
        grid = _only(grid, only)
    grid = _fixed(grid, values_of(overrides), select)
    if seeds is not None:
        if not seeds:
            raise UserError("--seeds: none given; give some, such as 0..4")
        grid = grid.model_copy(update={"seeds": list(dict.fromkeys(seeds))})
    if smoke:
        grid = _smaller(grid)
    return Experiment(chosen, grid, select, report, chosen.tree, smoke)


def _places(grid: GridSettings, method: Method) -> list[list[Pairs]]:
    """The axes of a method, each a list of places; those that go together are one."""
    crossed = {key: values for key, values in {**grid.axes, **method.axes}.items() if key not in method.without}
    places: list[list[Pairs]] = [[((key, value),) for value in values] for key, values in crossed.items()]
    for table in grid.zip:
        kept = {key: values for key, values in table.items() if key not in method.without and key not in method.axes}
        if kept:
            places.append([tuple(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)])
    return places


def _fixed(grid: GridSettings, given: Mapping[str, Any], select: Select | None) -> GridSettings:
    """With one value on the axes that the command line names; what methods set is not to be changed there.

    A method that goes without an axis and sets that key itself is a line beside the others, and keeps its value.
    """
    if "seed" in given:
        raise UserError("seed: an experiment has several; give --seeds")
    if select and "data.evaluate" in given:
        raise UserError("data.evaluate: [select] tunes on validation images, and tests on the others; leave it out")
    set_by_methods = (key for method in grid.methods for key in method.set if key not in method.without)
    for key in (key for key in set_by_methods if key in given):
        raise UserError(f"{key}: what tells the methods of this experiment apart; choose one with --only LABEL")

    def narrowed(table: Axes) -> Axes:
        values = {key: [given[key]] if key in given else values for key, values in table.items()}
        return {key: each for key, each in values.items() if each != [Unset.UNSET]}

    freed = narrowed({key: values for table in grid.zip for key, values in table.items() if key in given})
    zipped = [{key: values for key, values in table.items() if key not in given} for table in grid.zip]
    return _with_tables(grid, narrowed).model_copy(update={"axes": narrowed(grid.axes) | freed, "zip": zipped})


def _with_tables(grid: GridSettings, change: Callable[[Axes], Axes]) -> GridSettings:
    methods = [method.model_copy(update={"axes": change(method.axes)}) for method in grid.methods]
    zipped = [change(table) for table in grid.zip]
    return grid.model_copy(update={"axes": change(grid.axes), "zip": zipped, "methods": methods})


def _only(grid: GridSettings, labels: Sequence[str]) -> GridSettings:
    for label in labels:
        if label not in grid.labels():
            raise UserError(f"--only {label}: no such method; there are {', '.join(grid.labels())}")
    return grid.model_copy(update={"methods": [method for method in grid.methods if method.label in labels]})


def _smaller(grid: GridSettings) -> GridSettings:
    """The first two seeds, and the ends of every axis."""

    def ends(table: Axes) -> Axes:
        return {key: values[:1] + values[1:][-1:] for key, values in table.items()}

    return _with_tables(grid, ends).model_copy(update={"seeds": grid.seeds[:SMOKE_SEEDS]})


def _distinct(cells: list[Cell], forgiving: bool) -> list[Cell]:
    """Refuse two cells that are the same run; shrunk ones may well be."""
    found: dict[str, Cell] = {}
    for cell in cells:
        first = found.setdefault(cell.settings.model_dump_json(), cell)
        if first is not cell and not forgiving:
            raise UserError(f"grid: {first.name} and {cell.name} are the same run; take one of them out")
    return list(found.values())


def _named(method: str, at: Pairs) -> str:
    return " ".join([method, *(f"{key.rpartition('.')[2]}={value}" for key, value in at)])


def _paper(method: Method, at: Pairs) -> str | None:
    if isinstance(method.paper, dict):
        return method.paper.get(str(at[0][1])) if at else None
    return method.paper

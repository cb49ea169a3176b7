"""Experiments: recipes with the sections `[grid]`, `[select]` and `[report]`.

`[grid]` has the `seeds`, the `axes` that are crossed, `zip` for axes that change together, and `methods`: a label, the
settings of the method, and its differences: other `axes`, those that it goes `without`, and other `seeds`. `[select]`
names the axes that are tuned on the validation images. `paper` holds the paper's results.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.overrides import (
    RESERVED,
    RULES,
    SECTIONS,
    Unset,
    applied,
    flat,
    known,
    several,
    spelled,
    unknown,
    validated,
    values_of,
)
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.config.section import Tree
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.garbage import uncollected
from ghostnoise.lab.run import Pairs, Run, Stage, named
from ghostnoise.text import did_you_mean

Resolve = Callable[[Settings], Settings]
SMOKE_SEEDS = 2
MAX_RUNS = 100_000  # of a grid


def _flat(given: object) -> object:
    """Flatten the nested tables that TOML makes of `norm.method = ...`."""
    return flat(given) if isinstance(given, Mapping) else given


class Part(BaseModel):
    """A table of an experiment's sections."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]
Table = Annotated[Axes, BeforeValidator(_flat)]


def _once(seeds: list[int]) -> list[int]:
    """Refuse a seed that appears twice, since its run would count twice."""
    for seed, count in Counter(seeds).items():
        if count > 1:
            raise ValueError(f"the seed {seed} appears twice; remove one")
    return seeds


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_once)]


class Method(Part):
    """A row of a table, or a curve of a figure."""

    label: Annotated[str, Field(min_length=1)]
    set: Annotated[dict[str, Any], BeforeValidator(_flat)] = {}
    axes: Table = {}
    without: list[str] = []
    seeds: Seeds | None = None
    """Its seeds, if they are not those of the grid."""
    paper: str | dict[str, str] | None = None
    """The paper's result, or one for each value of the first axis."""


class GridSettings(Part):
    """`[grid]`."""

    seeds: Seeds = [0]
    axes: Table = {}
    zip: list[Table] = []
    methods: Annotated[list[Method], Field(min_length=1)]

    def tables(self) -> list[Axes]:
        """All tables of axes."""
        return [self.axes, *self.zip, *(method.axes for method in self.methods)]

    def names(self) -> list[str]:
        """The settings that are axes."""
        return list(dict.fromkeys(key for table in self.tables() for key in table))

    def labels(self) -> list[str]:
        """The labels of the methods."""
        return [method.label for method in self.methods]


class Select(Part):
    """`[select]`."""

    axes: Annotated[list[str], Field(min_length=1)]
    metric: Literal["accuracy", "best_accuracy", "loss"] = "accuracy"


class ReportSettings(Part):
    """`[report]`: the form of the figure, and the claims to test."""

    form: Literal["curves", "bars", "noise"] = "bars"
    x: str | None = None
    """The axis of a figure with curves."""
    baseline: str | None = None
    """The method that the others are compared with; the first if unset."""
    claims: list[str] = []
    """Comparisons such as "GNI > GBN", between the best cells of two methods."""
    law_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    """The ghost size of the theoretical distribution that is drawn beside measured noise."""


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
        """The seeds of the grid, which its methods have unless they have their own."""
        return self.grid.seeds

    def seeds_of(self, label: str) -> list[int]:
        """Return the seeds of a method."""
        own = next(method.seeds for method in self.grid.methods if method.label == label)
        return self.grid.seeds if own is None else own

    def runs(self, resolve: Resolve = lambda settings: settings) -> list[Run]:
        """Return the runs that do not depend on others: with `[select]` those that are tuned, otherwise all.

        A group with a single cell has nothing to tune, and is tested directly. `resolve` fills in what depends on the
        machine.
        """
        with uncollected():
            groups = Counter(self.group(run) for run in self._made)
            made = []
            for run in self._made:
                tuned = self.select is not None and groups[self.group(run)] > 1
                made += self._seeded(run, "tune", resolve) if tuned else self._tests(run, resolve)
        return made

    def tests(self, winners: Mapping[str, Run], resolve: Resolve = lambda settings: settings) -> list[Run]:
        """Return the runs that test the winners."""
        return [run for winner in winners.values() for run in self._tests(winner, resolve)]

    def winners(self, runs: Iterable[Run]) -> dict[str, Run]:
        """Return a run of the best cell of each group whose tuning is complete, by the mean over seeds.

        The first of equal cells is chosen, and a cell with a diverged run is not. All results of a group must have been
        computed with methods of the same age, so that a sweep and a report choose the same cell.
        """
        groups: dict[str, list[Run]] = {}
        for run in runs:
            if run.stage == "tune":
                groups.setdefault(self.group(run), []).append(run)
        chosen = {group: self._best(tuned) for group, tuned in groups.items()}
        return {group: run for group, run in chosen.items() if run is not None}

    def group(self, run: Run) -> str:
        """Return the method and its values on the axes that are not tuned; one cell of each group is tested."""
        tuned = self.select.axes if self.select else []
        return named(run.label, tuple(pair for pair in run.at if pair[0] not in tuned))

    def _best(self, tuned: Sequence[Run]) -> Run | None:
        assert self.select is not None
        if any(run.result is None for run in tuned) or len({run.numerics.behind for run in tuned}) > 1:
            return None
        metric, scores = self.select.metric, dict[str, list[Any]]()
        for run in tuned:
            score = None if run.status == "diverged" else (run.result or {}).get(metric)
            scores.setdefault(run.cell, []).append(score)
        means = {cell: statistics.fmean(found) for cell, found in scores.items() if None not in found}
        best = (min if metric == "loss" else max)(means, key=means.__getitem__, default=None)
        return next((run for run in tuned if run.cell == best), None)

    def _tests(self, run: Run, resolve: Resolve) -> list[Run]:
        """Return the runs of a cell, with `[select]` as it is tested: trained on all training images."""
        if self.select is not None:
            data = run.settings.data.model_copy(update={"evaluate": "test"})
            run = replace(run, given=run.settings.model_copy(update={"data": data}))
        return self._seeded(run, "test", resolve)

    def _seeded(self, run: Run, stage: Stage, resolve: Resolve) -> list[Run]:
        settings = resolve(run.settings)  # does not depend on the seed
        return [
            Run.planned(
                self.recipe.name, settings.model_copy(update={"seed": seed}), run.label, run.at, run.paper, stage
            )
            for seed in self.seeds_of(run.label)
        ]

    def cells(self) -> list[Run]:
        """Return a run of each cell, with the recipe's seed; with `[select]`, as it is tuned: on validation images."""
        return list(self._made)

    @cached_property
    def _made(self) -> list[Run]:
        more = {"data.evaluate": "validation"} if self.select else {}
        made = [
            Run.planned(self.recipe.name, settings, method.label, at, _paper(method, at))
            for method in self.grid.methods
            for at, settings in _expanded(self.tree, self.grid, method, more, self.smoke)
        ]
        return _distinct(made, self.smoke)


def _expanded(
    tree: Tree, grid: GridSettings, method: Method, more: Mapping[str, Any], smoke: bool
) -> Iterator[tuple[Pairs, Settings]]:
    """Yield the points of a method on the axes, with their settings.

    The points of a large grid share most sections, so a section is made once for all points that agree on its axes; a
    change of the network also changes `[norm]`.
    """
    places, made = _places(grid, method), dict[tuple[str, tuple[int, ...]], Any]()
    keys_of = [{key for pairs in place for key, _ in pairs} for place in places]
    touching = {
        section: [at for at, keys in enumerate(keys_of) if any(_touches(key, section) for key in keys)]
        for section in (*SECTIONS, "seed")
    }
    for at in itertools.product(*(range(len(place)) for place in places)):
        pairs = tuple(pair for place, index in zip(places, at, strict=True) for pair in place[index])
        spots = {name: (name, tuple(at[axis] for axis in axes)) for name, axes in touching.items()}
        if missing := [name for name, spot in spots.items() if spot not in made]:
            given = applied(tree, {**method.set, **more, **dict(pairs)})
            shared = {name: made[spot] for name, spot in spots.items() if made.get(spot) is not None}
            settings = validated(given | shared, place=f"{named(method.label, pairs)}: ")
            made.update((spots[name], getattr(settings, name)) for name in missing)
            made[spots["norm"]] = recipe.placed(made[spots["norm"]], settings.model.name)
        sections = {name: made[spot] for name, spot in spots.items()}
        yield pairs, recipe.complete(Settings.model_construct(**sections), smoke)


def _touches(key: str, section: str) -> bool:
    return key.partition(".")[0] == section or (key == "model.name" and section == "norm")


def load(
    name_or_path: str, overrides: Sequence[str] = (), *, smoke: bool = False, seeds: Sequence[int] | None = None,
    only: Sequence[str] = (), variant: str | None = None,
) -> Experiment:  # fmt: skip
    """Load a recipe's experiment. `only` selects methods by label.

    Overriding an axis keeps only the given values, and an override with several values is an axis: so
    `norm.ghost_size=4,8,16` makes a grid of a recipe that has none, as several seeds do.
    """
    singles, axes = several(overrides)
    values = values_of(singles)
    given = {key: [value] for key, value in values.items()} | axes
    if "seed" in given:
        raise UserError("seed: an experiment has several seeds; give --seeds")
    # Settings of one of several methods need not fit that of the recipe.
    chosen = recipe.load(name_or_path, [] if "norm.method" in axes else singles, smoke=smoke, variant=variant)
    tree = applied(chosen.tree, values)
    if "grid" in chosen.plan:
        grid = _read(GridSettings, chosen.plan["grid"], "grid")
        select = _read(Select, chosen.plan["select"], "select") if "select" in chosen.plan else None
        report = _read(ReportSettings, chosen.plan.get("report", {}), "report")
    elif axes or seeds is not None:
        grid, select, report = _made_up(tree, axes)
        given.pop("norm.method", None)  # a value for each row
    else:
        raise UserError(
            f"recipe {name_or_path}: has no [grid]; `ghostnoise train {name_or_path}` runs it once; several values "
            "make a grid of it, such as norm.ghost_size=4,8,16 or --seeds 0..4"
        )
    _check(grid, select, report)
    if only:
        grid = _only(grid, only)
    grid = _fixed(grid, given, select)
    if seeds is not None:
        if not seeds:
            raise UserError("--seeds: none given; give some, such as 0..4")
        grid = _with_seeds(grid, lambda own: list(dict.fromkeys(seeds)))
    if smoke:
        grid = _smaller(grid)
    _check_size(grid)
    return Experiment(chosen, grid, select, report, tree, smoke)


def _places(grid: GridSettings, method: Method) -> list[list[Pairs]]:
    """Return the axes of a method, each as a list of values; axes that are zipped are one."""
    crossed = {key: values for key, values in {**grid.axes, **method.axes}.items() if key not in method.without}
    places: list[list[Pairs]] = [[((key, value),) for value in values] for key, values in crossed.items()]
    for table in grid.zip:
        kept = {key: values for key, values in table.items() if key not in method.without and key not in method.axes}
        if kept:
            places.append([tuple(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)])
    return places


def _made_up(tree: Tree, axes: Axes) -> tuple[GridSettings, None, ReportSettings]:
    """Make a grid of axes; if the method is one of them, the methods are rows, each without the axes of the others."""
    axes = dict(axes)
    rows: list[Tree] = []
    for name in axes.pop("norm.method", [tree["norm"]["method"]]):
        kind = NormSettings.kind(name)
        without = [key for key in axes if key.startswith("norm.") and kind and not kind.has(key.removeprefix("norm."))]
        rows.append({"label": str(name).upper(), "set": {"norm.method": name}, "without": without})
    numbers = (key for key, values in axes.items() if all(isinstance(value, int | float) for value in values))
    report: Tree = {"form": "curves", "x": x} if (x := next(numbers, None)) else {}
    given = {"seeds": [tree.get("seed", 0)], "axes": axes, "methods": rows}
    return _read(GridSettings, given, "grid"), None, _read(ReportSettings, report, "report")


def _check_size(grid: GridSettings) -> None:
    """Refuse a grid of too many runs before any of them is made."""
    runs = 0
    for method in grid.methods:
        runs += math.prod(map(len, _places(grid, method))) * len(grid.seeds if method.seeds is None else method.seeds)
    if runs > MAX_RUNS:
        raise UserError(f"grid: {runs:,} runs; must be at most {MAX_RUNS:,}: give fewer values on its axes, or --only")


def _fixed(grid: GridSettings, given: Axes, select: Select | None) -> GridSettings:
    """Keep the given values on the axes that are overridden; settings that distinguish methods cannot be overridden.

    A method that goes without an axis and sets that key itself keeps its own value. A key with several values that is
    no axis becomes one.
    """
    if select and "data.evaluate" in given:
        raise UserError(
            "data.evaluate: [select] tunes on the validation images and tests on the test images; leave it out"
        )
    set_by_methods = (key for method in grid.methods for key in method.set if key not in method.without)
    for key in (key for key in set_by_methods if key in given):
        raise UserError(f"{key}: distinguishes the methods of this experiment; choose one with --only LABEL")

    def narrowed(table: Axes) -> Axes:
        values = {key: given.get(key, values) for key, values in table.items()}
        return {key: each for key, each in values.items() if each != [Unset.UNSET]}

    freed = narrowed({key: values for table in grid.zip for key, values in table.items() if key in given})
    freed |= {key: values for key, values in given.items() if len(values) > 1 and key not in grid.names()}
    zipped = [{key: values for key, values in table.items() if key not in given} for table in grid.zip]
    return _with_tables(grid, narrowed).model_copy(update={"axes": narrowed(grid.axes) | freed, "zip": zipped})


def _with_seeds(grid: GridSettings, change: Callable[[list[int]], list[int]]) -> GridSettings:
    """Change the seeds of the grid and of the methods that have their own."""
    methods = [
        method if method.seeds is None else method.model_copy(update={"seeds": change(method.seeds)})
        for method in grid.methods
    ]
    return grid.model_copy(update={"seeds": change(grid.seeds), "methods": methods})


def _with_tables(grid: GridSettings, change: Callable[[Axes], Axes]) -> GridSettings:
    methods = [method.model_copy(update={"axes": change(method.axes)}) for method in grid.methods]
    zipped = [change(table) for table in grid.zip]
    return grid.model_copy(update={"axes": change(grid.axes), "zip": zipped, "methods": methods})


def _only(grid: GridSettings, labels: Sequence[str]) -> GridSettings:
    for label in labels:
        if label not in grid.labels():
            meant = did_you_mean(label, grid.labels())
            known = f"there are {', '.join(grid.labels())}"
            raise UserError(f"--only {label}: no such method; {known}{meant and '; ' + meant}")
    return grid.model_copy(update={"methods": [method for method in grid.methods if method.label in labels]})


def _smaller(grid: GridSettings) -> GridSettings:
    """Keep the first two seeds, and the first and last value of every axis."""

    def ends(table: Axes) -> Axes:
        return {key: values[:1] + values[1:][-1:] for key, values in table.items()}

    return _with_seeds(_with_tables(grid, ends), lambda seeds: seeds[:SMOKE_SEEDS])


def _distinct(cells: list[Run], forgiving: bool) -> list[Run]:
    """Refuse two cells that are the same run, unless `forgiving`: shrunk cells may be equal."""
    found: dict[str, Run] = {}
    for run in cells:
        first = found.setdefault(run.identity, run)
        if first is not run and not forgiving:
            raise UserError(f"grid: {first.cell} and {run.cell} are the same run; remove one of them")
    return list(found.values())


def _paper(method: Method, at: Pairs) -> str | None:
    if isinstance(method.paper, dict):
        return method.paper.get(str(at[0][1])) if at else None
    return method.paper


Kind = TypeVar("Kind", bound=Part)


def _read(kind: type[Kind], given: object, name: str) -> Kind:
    """Validate a section; each mistake is a line of the error."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError("\n".join(_line(each, name) for each in error.errors(include_url=False))) from None


def _check(grid: GridSettings, select: Select | None, report: ReportSettings) -> None:
    """Raise a UserError with a line for each name that does not exist, or exists twice."""
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
            own_rule = mistake["msg"].removeprefix("Value error, ")
            rule = RULES[kind].format(**mistake.get("ctx", {})) if kind in RULES else own_rule
            return f"{where}={spelled(mistake['input'])}: {rule}"


def _of_grid(grid: GridSettings) -> Iterator[str]:
    for key in dict.fromkeys([*grid.names(), *(key for method in grid.methods for key in method.set)]):
        if key == "seed":
            yield "grid: seed cannot be an axis; give grid.seeds"
        elif key in RESERVED:
            yield f"grid: {key}: set by {RESERVED[key]}, and cannot be an axis; leave it out"
        elif not known(key):
            yield f"grid: {unknown(key)}"
    axes, labels = grid.names(), grid.labels()
    for method in grid.methods:
        yield from (
            f"grid: {method.label} without {key}: the grid has no such axis"
            for key in method.without
            if key not in axes
        )
        shared = [*grid.axes, *(key for table in grid.zip for key in table)]
        for key in method.set:
            if key in method.axes or (key in shared and key not in method.without):
                yield f"grid: {method.label} sets {key}, which is an axis; add it to the method's `without`"
    for table in grid.zip:
        if len({len(values) for values in table.values()}) > 1:
            counts = " and ".join(f"{key} has {len(values)} values" for key, values in table.items())
            yield f"grid.zip: {counts}; give each as many"
        yield from (f"grid.zip: {key} is also in grid.axes; remove one" for key in table if key in grid.axes)
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        yield f"grid: two methods are called {label}; rename one"


def _of_select(grid: GridSettings, select: Select | None) -> Iterator[str]:
    for key in select.axes if select else ():
        if key not in grid.names():
            yield f"select.axes: {key} is not an axis of the grid; it has {', '.join(grid.names()) or 'none'}"


def _of_report(grid: GridSettings, report: ReportSettings) -> Iterator[str]:
    named = [report.baseline, *(word.strip() for claim in report.claims for word in claim.split(">"))]
    for label in dict.fromkeys(named):
        if label is not None and label not in grid.labels():
            yield f"report: no method is called {label!r}; there are {', '.join(grid.labels())}"
    if report.form == "curves" and report.x not in grid.names():
        there = ", ".join(grid.names()) or "it has none"
        yield f"report.x={report.x!r}: curves need an axis of the grid: {there}"

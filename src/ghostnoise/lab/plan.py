"""The runs of an experiment as points with an identity, and which cells won.

Both the sweep, which runs them, and the report, which reads them, ask here.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ghostnoise.lab import recipe
from ghostnoise.lab.grid import Cell, Experiment
from ghostnoise.lab.settings import Settings
from ghostnoise.lab.store.scan import Found

Stage = Literal["tune", "test"]
Resolve = Callable[[Settings], Settings]
# What only the machine knows. A report may be made on another one than the runs.
OF_THE_MACHINE = {"device": "auto", "processes": 1}


@dataclass(frozen=True)
class Point:
    """One run: a cell with a seed."""

    cell: Cell
    seed: int
    stage: Stage
    settings: Settings
    identity: str
    """The name of its folder."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.cell.name} seed {self.seed}" + (" (tuning)" if self.stage == "tune" else "")

    @cached_property
    def key(self) -> str:
        """The same wherever it runs."""
        return key(self.settings)


def first_points(experiment: Experiment, resolve: Resolve) -> list[Point]:
    """The runs that wait for no other: those that are tuned, or all.

    With `[select]`, a group with one cell has nothing to tune, and is tested at once.
    """
    cells = experiment.cells()
    if experiment.select is None:
        return [point for cell in cells for point in points(experiment, cell, "test", resolve)]
    sizes = Counter(map(experiment.group, cells))
    made = []
    for cell in cells:
        tuned = sizes[experiment.group(cell)] > 1
        chosen = cell if tuned else experiment.tested(cell)
        made += points(experiment, chosen, "tune" if tuned else "test", resolve)
    return made


def test_points(experiment: Experiment, winners: Mapping[str, Cell], resolve: Resolve) -> list[Point]:
    """The runs that test the winners."""
    cells = [experiment.tested(cell) for cell in winners.values()]
    return [point for cell in cells for point in points(experiment, cell, "test", resolve)]


def points(experiment: Experiment, cell: Cell, stage: Stage, resolve: Resolve) -> list[Point]:
    """A cell's runs, one for each seed."""
    settings = resolve(cell.settings)  # the seed changes nothing there
    tree = recipe.canonical_tree(settings)
    return [
        Point(cell, seed, stage, settings.model_copy(update={"seed": seed}), recipe.digest(tree | {"seed": seed}))
        for seed in experiment.seeds
    ]


def winners(
    experiment: Experiment, tuned: Iterable[Point], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Cell]:
    """The best cell of each group whose tuning is over, by the mean over seeds; the first of equals.

    Groups are those of `Experiment.group`: the method's label, and its place on axes that are not tuned. A cell with a
    run that diverged is not chosen. `results` are those of finished and diverged runs, by the points' key.
    """
    if experiment.select is None:
        return {}
    metric = experiment.select.metric
    sign = -1 if metric == "loss" else 1
    groups: dict[str, dict[str, tuple[Cell, list[Any]]]] = {}
    waiting = set()
    for point in tuned:
        if point.stage != "tune":
            continue
        group = experiment.group(point.cell)
        result = results.get(point.key)
        if result is None:
            waiting.add(group)
        else:
            score = None if result.get("status") == "diverged" else result.get(metric)
            groups.setdefault(group, {}).setdefault(point.cell.name, (point.cell, []))[1].append(score)
    chosen = {}
    for group, cells in groups.items():
        scored = [(sign * statistics.fmean(scores), cell) for cell, scores in cells.values() if None not in scores]
        if group not in waiting and scored:
            chosen[group] = max(scored, key=lambda each: each[0])[1]
    return chosen


def key(settings: Settings) -> str:
    """The settings' identity without what only the machine knows."""
    train = settings.train.model_copy(update=OF_THE_MACHINE)
    data = settings.data.model_copy(update={"stand_in": False})
    return recipe.identity(settings.model_copy(update={"train": train, "data": data}))


def key_of(found: Found) -> str | None:
    """The key of a run folder, or None if its settings are not ours to read."""
    try:
        return key(recipe.stored(found.settings))
    except ValueError:
        return None

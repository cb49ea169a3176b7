"""The plan of an experiment: its runs with their identities, and the cells that are selected for testing.

Used by the sweep, which runs them, and by the report, which reads them.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.grid import Cell, Experiment
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.garbage import uncollected

if TYPE_CHECKING:  # it imports torch
    from ghostnoise.lab.store.scan import Found

Stage = Literal["tune", "test"]
Resolve = Callable[[Settings], Settings]


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
        """Its name in tables."""
        return f"{self.cell.name} seed {self.seed}" + (" (tuning)" if self.stage == "tune" else "")

    @cached_property
    def key(self) -> str:
        """An identity that does not depend on the machine."""
        return recipe.key(self.settings)


@uncollected()
def first_points(experiment: Experiment, resolve: Resolve) -> list[Point]:
    """Return the runs that do not depend on others: with `[select]` those that are tuned, otherwise all.

    A group with a single cell has nothing to tune, and is tested directly.
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
    """Return the runs that test the winners."""
    cells = [experiment.tested(cell) for cell in winners.values()]
    return [point for cell in cells for point in points(experiment, cell, "test", resolve)]


def points(experiment: Experiment, cell: Cell, stage: Stage, resolve: Resolve) -> list[Point]:
    """Return the runs of a cell, one for each seed."""
    settings = resolve(cell.settings)  # does not depend on the seed
    seeded = [settings.model_copy(update={"seed": seed}) for seed in experiment.seeds_of(cell)]
    return [Point(cell, each.seed, stage, each, recipe.identity(each)) for each in seeded]


def winners(
    experiment: Experiment, tuned: Iterable[Point], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Cell]:
    """Return the best cell of each group whose tuning is complete, by the mean over seeds; the first of equal ones.

    Groups are those of `Experiment.group`. A cell with a diverged run is not chosen. `results` holds those of finished
    and diverged runs, by the key of their points.
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


def key_of(found: "Found") -> str | None:
    """Return the key of a run folder, or None if its settings cannot be read."""
    try:
        return recipe.key(recipe.stored(found.settings))
    except ValueError:
        return None

"""The runs of an experiment as points with an identity, and which of them are over.

Both the sweep, which runs them, and the report, which reads them, ask here.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ghostnoise.lab import recipe
from ghostnoise.lab.grid import Cell, Experiment
from ghostnoise.lab.settings import Settings
from ghostnoise.lab.store.scan import Found

Stage = Literal["tune", "test"]
# What only the machine knows. A report may be made on another one than the runs.
OF_THE_MACHINE = {"device": "auto", "processes": 1}


@dataclass(frozen=True)
class Point:
    """One run: a cell with a seed."""

    cell: Cell
    seed: int
    stage: Stage
    settings: Settings

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.cell.name} seed {self.seed}"

    @property
    def identity(self) -> str:
        """The name of its folder."""
        return recipe.identity(self.settings)

    @property
    def key(self) -> str:
        """The same wherever it runs."""
        return key(self.settings)


Resolve = Callable[[Settings], Settings]


def first_points(experiment: Experiment, resolve: Resolve) -> list[Point]:
    """The runs that wait for no other: those that are tuned, or all.

    A method with one cell has nothing to tune, and is tested at once.
    """
    made = []
    for cell in experiment.cells():
        stage: Stage = "tune" if experiment.select and _tuned(experiment, cell.method) else "test"
        made += points(
            experiment, experiment.tested(cell) if experiment.select and stage == "test" else cell, stage, resolve
        )
    return made


def test_points(experiment: Experiment, winners: Mapping[str, Cell], resolve: Resolve) -> list[Point]:
    """The runs that test the winners."""
    return [
        point for cell in winners.values() for point in points(experiment, experiment.tested(cell), "test", resolve)
    ]


def points(experiment: Experiment, cell: Cell, stage: Stage, resolve: Resolve) -> list[Point]:
    """A cell's runs, one for each seed."""
    return [Point(cell, seed, stage, resolve(cell.run(seed))) for seed in experiment.seeds]


def winners(
    experiment: Experiment, tuned: Iterable[Point], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Cell]:
    """The best cell of each method whose tuning is over: by the mean over seeds; one that diverged is not chosen.

    `results` are those of finished and diverged runs, by the points' key.
    """
    if experiment.select is None:
        return {}
    metric = experiment.select.metric
    sign = -1 if metric == "loss" else 1
    by_method: dict[str, dict[Cell, list[float | None]]] = {}
    waiting = set()
    for point in tuned:
        if point.stage != "tune":
            continue
        result = results.get(point.key)
        if result is None:
            waiting.add(point.cell.method)
            continue
        by_method.setdefault(point.cell.method, {}).setdefault(point.cell, []).append(result.get(metric))
    chosen = {}
    for method, cells in by_method.items():
        scores = {cell: statistics.fmean(values) for cell, values in cells.items() if None not in values}  # type: ignore[arg-type]
        if method not in waiting and scores:
            chosen[method] = max(scores, key=lambda cell: sign * scores[cell])
    return chosen


def key(settings: Settings) -> str:
    """The settings' identity without what only the machine knows."""
    train = settings.train.model_copy(update=OF_THE_MACHINE)
    data = settings.data.model_copy(update={"stand_in": False})
    return recipe.identity(settings.model_copy(update={"train": train, "data": data}))


def key_of(found: Found) -> str | None:
    """The key of a run folder, or None if its settings are not ours to read."""
    own = {name: value for name, value in found.settings.items() if name not in ("recipe", "identity")}
    try:
        return key(Settings.model_validate_json(recipe.json_text(own)))
    except ValueError:
        return None


def _tuned(experiment: Experiment, method: str) -> bool:
    return sum(cell.method == method for cell in experiment.cells()) > 1

"""The overhead of a sweep besides its runs, a part of `ghostnoise bench lab`.

It has three parts: expanding the grid, scanning the run folders, and handing a run to a worker.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ghostnoise.bench.layers import times
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import LEAST_ROUNDS, Timing, summary
from ghostnoise.lab.config import plan, recipe
from ghostnoise.lab.config.grid import Experiment, GridSettings, ReportSettings
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.runners import Ended, Event, Job, Place
from ghostnoise.lab.runners.local import LocalRunner
from ghostnoise.lab.store import scan
from ghostnoise.lab.sweep import machine

RATES = 100


@dataclass(frozen=True)
class Overhead:
    """A part of the overhead, and its limit in milliseconds.

    `once` measures it in an empty folder, in seconds; its second argument asks for a small sweep.
    """

    name: str
    allowed: float
    once: Callable[[Path, bool], float]


@dataclass(frozen=True)
class Planning:
    """The seconds to expand a grid of `points` runs, and to scan as many run folders."""

    points: int
    expansion: float
    scan: float


def measure(row: Overhead, settings: Settings) -> list[Record]:
    """Time the overhead a few times, each in a new folder."""
    seconds = []
    for _ in range(settings.rounds or LEAST_ROUNDS):
        with TemporaryDirectory() as folder:
            seconds.append(row.once(Path(folder), settings.quick))
    allowed = Timing(row.allowed, row.allowed, row.allowed, row.allowed, len(seconds))
    shared = {"bench": "lab", "row": row.name, "shape": "", "memory_format": "", "steps": 1}
    return [
        shared | {"contender": name, "kind": kind} | times(timing, allowed) | conditions(settings)
        for name, kind, timing in (("allowed", "torch", allowed), ("ghostnoise sweep", "ours", summary(seconds)))
    ]


def planning(points: int, folder: Path, seeds: int = 1) -> Planning:
    """Time the planning of a grid of about `points` runs with `seeds` seeds, all of them finished in `folder`."""
    experiment = grid_of(points // seeds, seeds)
    begun = time.perf_counter()
    expanded = plan.first_points(experiment, machine.resolver(None))
    expansion = time.perf_counter() - begun
    for point in expanded:
        make_finished(point, folder / experiment.recipe.name)
    begun = time.perf_counter()
    found = scan.scan(folder / experiment.recipe.name, lambda text: None)
    assert all(found[point.identity].status == "finished" for point in expanded)
    return Planning(len(expanded), expansion, time.perf_counter() - begun)


def scheduling(jobs: int, folder: Path) -> float:
    """Return the seconds that a worker of the local runner takes for a run that is already finished."""
    experiment = grid_of(jobs + 1, 1)
    points = plan.first_points(experiment, machine.resolver(None))
    name = experiment.recipe.name
    for point in points:
        make_finished(point, folder / name)
    ended: list[float] = []

    def emit(event: Event) -> None:
        if isinstance(event, Ended):
            ended.append(time.perf_counter())

    runner = LocalRunner(Place(folder), workers=1, threads=1)
    try:
        runner.run([Job(name, each.identity, each.name, each.settings) for each in points], emit, lambda: False)
    finally:
        runner.close()
    return (ended[-1] - ended[0]) / (len(ended) - 1)  # the first run waits for the imports of the worker


def grid_of(cells: int, seeds: int) -> Experiment:
    """Return an experiment with at least `cells` cells: learning rates by weight decays."""
    chosen = recipe.load("digits")
    rates = [0.001 * (number + 1) for number in range(min(cells, RATES))]
    decays = [1e-6 * (number + 1) for number in range(-(-cells // RATES))]
    given = {
        "seeds": list(range(seeds)),
        "axes": {"optim.lr": rates, "optim.weight_decay": decays},
        "methods": [{"label": "GNI", "set": {"norm.method": "gni"}}],
    }
    return Experiment(chosen, GridSettings.model_validate(given), None, ReportSettings(), chosen.tree)


RESULT = {
    "status": "finished", "split": "validation", "epochs": 1, "steps": 1, "train_loss": 1.0, "train_accuracy": 50.0,
    "loss": 1.0, "accuracy": 50.0, "best_accuracy": 50.0, "best_epoch": 1, "parameters": 1, "weights_sha256": "0" * 64,
    "images_per_second": 1.0, "seconds": 1.0, "ended": "2026-01-01T00:00:00+00:00",
}  # fmt: skip


def make_finished(point: Point, folder: Path) -> None:
    """Create the folder of a finished run, without running it."""
    path = folder / point.identity
    path.mkdir(parents=True)
    settings = {"recipe": folder.name, "identity": point.identity} | point.settings.model_dump(exclude_none=True)
    (path / "settings.json").write_text(json.dumps(settings, indent=2))
    (path / "result.json").write_text(json.dumps(RESULT, indent=2))


def _planning(folder: Path, quick: bool) -> float:
    """Return the seconds to expand a grid and to find that all of its runs are finished."""
    found = planning(100 if quick else 10_000, folder)
    return found.expansion + found.scan


ROWS = [
    Overhead("sweep of 10,000 points: expansion and scan", 3000.0, _planning),
    Overhead(
        "sweep: a run that is already finished", 50.0, lambda folder, quick: scheduling(3 if quick else 100, folder)
    ),
]

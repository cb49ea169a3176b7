"""The overhead of a sweep besides its runs, a part of `ghostnoise bench lab`.

It has three parts: expanding the grid, scanning the run folders, and handing a run to a worker.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ghostnoise.bench.layers import times
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import LEAST_ROUNDS, Timing, summary
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.grid import Experiment, GridSettings, ReportSettings
from ghostnoise.lab.events import Ended, Event
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import record, scan
from ghostnoise.lab.store.folder import RUN
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.local import LocalRunner
from ghostnoise.lab.sweep.run import resolver

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
    """The seconds to expand a grid of `count` runs, and to scan as many run folders."""

    count: int
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


def planning(count: int, folder: Path, seeds: int = 1) -> Planning:
    """Time the planning of a grid of about `count` runs with `seeds` seeds, all of them finished in `folder`."""
    experiment = grid_of(count // seeds, seeds)
    begun = time.perf_counter()
    runs = experiment.runs(resolver(None))
    expansion = time.perf_counter() - begun
    for run in runs:
        make_finished(run, folder)
    begun = time.perf_counter()
    found = scan.scan(folder / experiment.recipe.name, lambda text: None)
    assert all(found[run.identity].ended for run in runs)
    return Planning(len(runs), expansion, time.perf_counter() - begun)


def scheduling(count: int, folder: Path) -> float:
    """Return the seconds that a worker of the local runner takes for a run that is already finished."""
    runs = grid_of(count + 1, 1).runs(resolver(None))
    for run in runs:
        make_finished(run, folder)
    ended: list[float] = []

    def emit(run: Run, event: Event) -> None:
        if isinstance(event, Ended):
            ended.append(time.perf_counter())

    runner = LocalRunner(Place(folder), workers=1, threads=1)
    try:
        runner.run(runs, emit, lambda: False)
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


def make_finished(run: Run, folder: Path) -> None:
    """Create the folder of a finished run, without training it."""
    path = folder / run.recipe / run.identity
    path.mkdir(parents=True)
    epochs = run.settings.train.epochs
    curve = {"train_loss": [1.0] * epochs, "train_accuracy": [50.0] * epochs, "evaluated": [epochs]}
    ended = replace(
        run, result=RESULT | {"epochs": epochs, "split": run.settings.data.evaluate}, environments=[{}],
        curve=curve | {"loss": [1.0], "accuracy": [50.0]},
    )  # fmt: skip
    (path / RUN).write_text(record.line(ended) + "\n")


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

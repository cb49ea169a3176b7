"""What a sweep costs besides its runs: to expand the grid, to see what is done, to hand a run to a worker."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ghostnoise.lab.config import plan, recipe
from ghostnoise.lab.config.grid import Experiment, GridSettings, ReportSettings
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.engines import Ended, Event, Job, Place
from ghostnoise.lab.engines.local import LocalEngine
from ghostnoise.lab.store import scan
from ghostnoise.lab.sweep import machine

RATES = 100


@dataclass(frozen=True)
class Planning:
    """The seconds to expand a grid of so many points, and to read as many run folders."""

    points: int
    expansion: float
    scan: float


def planning(points: int, folder: Path, seeds: int = 1) -> Planning:
    """Time both for a grid of about `points` runs with `seeds` seeds, all of which are finished in `folder`."""
    experiment = grid_of(points // seeds, seeds)
    resolve = machine.resolver(None)
    expanded, expansion = _expanded(experiment, resolve)
    for point in expanded:
        lay_out(point, folder / experiment.recipe.name)
    begun = time.perf_counter()
    found = scan.scan(folder / experiment.recipe.name, lambda text: None)
    assert all(found[point.identity].status == "finished" for point in expanded)
    return Planning(len(expanded), expansion, time.perf_counter() - begun)


def scheduling(jobs: int, folder: Path) -> float:
    """The seconds that a worker of the local engine takes for a run that is finished already."""
    experiment = grid_of(jobs + 1, 1)
    made = plan.first_points(experiment, machine.resolver(None))
    name = experiment.recipe.name
    for point in made:
        lay_out(point, folder / name)
    ended: list[float] = []

    def tell(event: Event) -> None:
        if isinstance(event, Ended):
            ended.append(time.perf_counter())

    engine = LocalEngine(Place(folder), workers=1, threads=1)
    try:
        engine.run([Job(name, each.identity, each.name, each.settings) for each in made], tell, lambda: False)
    finally:
        engine.close()
    return (ended[-1] - ended[0]) / (len(ended) - 1)  # the first one waits for the worker's imports


def grid_of(cells: int, seeds: int) -> Experiment:
    """An experiment with so many cells: learning rates by weight decays."""
    chosen = recipe.load("digits")
    rates = [0.001 * (number + 1) for number in range(min(cells, RATES))]
    decays = [1e-6 * (number + 1) for number in range(-(-cells // RATES))]
    given = {
        "seeds": list(range(seeds)),
        "axes": {"optim.lr": rates, "optim.weight_decay": decays},
        "methods": [{"label": "GNI", "set": {"norm.method": "gni"}}],
    }
    return Experiment(chosen, GridSettings.model_validate(given), None, ReportSettings(), chosen.tree)


def lay_out(point: Point, folder: Path) -> None:
    """Make the folder of a finished run that never was."""
    path = folder / point.identity
    path.mkdir(parents=True)
    settings = {"recipe": folder.name, "identity": point.identity} | point.settings.model_dump(exclude_none=True)
    result = {"status": "finished", "accuracy": 50.0, "best_accuracy": 50.0, "best_epoch": 1, "split": "validation",
              "images_per_second": 1.0, "seconds": 1.0, "epochs": 1}  # fmt: skip
    (path / "settings.json").write_text(json.dumps(settings, indent=2))
    (path / "result.json").write_text(json.dumps(result, indent=2))


def _expanded(experiment: Experiment, resolve: plan.Resolve) -> tuple[list[Point], float]:
    begun = time.perf_counter()
    points = plan.first_points(experiment, resolve)
    return points, time.perf_counter() - begun

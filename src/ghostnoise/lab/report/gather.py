"""The run folders of an experiment, each beside the run that it should be; nothing in them is changed."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ghostnoise.lab.config import plan, recipe
from ghostnoise.lab.config.grid import Cell, Experiment
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.store.scan import Found, scan

Status = Literal["finished", "diverged", "failed", "unfinished", "missing"]
# Of two folders of the same run, made on two machines, the one that is further.
FURTHER = ("finished", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class Run:
    """A run that the experiment asks for, and its folder if there is one."""

    point: Point
    found: Found | None = None

    @property
    def status(self) -> Status:
        """How far it is."""
        return "missing" if self.found is None else self.found.status  # type: ignore[return-value]

    @property
    def result(self) -> Mapping[str, Any]:
        """What it ended with."""
        return (self.found and self.found.result) or {}

    @property
    def accuracy(self) -> float | None:
        """After the last epoch, if it finished."""
        return number(self.result.get("accuracy")) if self.status == "finished" else None

    @property
    def reason(self) -> str:
        """The first line of why it failed."""
        return self.found.failed_for if self.found else ""


@dataclass(frozen=True)
class Gathered:
    """An experiment's runs."""

    experiment: Experiment
    folder: Path
    runs: tuple[Run, ...]
    winners: Mapping[str, Cell]
    """Of the methods whose tuning is over."""
    damaged: tuple[Path, ...] = ()
    others: int = 0
    """Folders of runs that are not of this experiment."""
    twice: int = 0
    """Folders of runs that another folder has too."""

    def count(self, status: Status) -> int:
        """The runs of this status."""
        return sum(run.status == status for run in self.runs)


def gather(experiment: Experiment, folder: Path, warn: Callable[[str], object]) -> Gathered:
    """Match the run folders in `folder`, `runs/<recipe>`, with the experiment's runs by what they compute."""
    found = scan(folder, warn)
    damaged = [each.path for each in found.values() if each.status == "damaged"]
    by_key: dict[str, list[Found]] = {}
    strange = 0
    for each in found.values():
        if each.status == "damaged":
            continue
        if each.status == "finished" and number((each.result or {}).get("accuracy")) is None:
            warn(f"{each.path / 'result.json'} has no accuracy; the run is left out, and the folder as it is")
            damaged.append(each.path)
        elif (key := plan.key_of(each)) is None:
            strange += 1
        else:
            by_key.setdefault(key, []).append(each)
    best = {key: min(several, key=_order) for key, several in by_key.items()}
    first = plan.first_points(experiment, _as_it_is)
    results = {key: each.result for key, each in best.items() if each.result is not None}
    winners = plan.winners(experiment, first, _by_point(first, results))
    points = [*first, *plan.test_points(experiment, winners, _as_it_is)]
    runs = tuple(Run(point, next((best[key] for key in _keys(point) if key in best), None)) for point in points)
    used = {each for point in points for each in _keys(point)} & set(by_key)
    others = strange + sum(len(several) for key, several in by_key.items() if key not in used)
    twice = sum(len(by_key[key]) - 1 for key in used)
    return Gathered(experiment, folder, runs, winners, tuple(sorted(damaged)), others, twice)


def number(value: object) -> float | None:
    """A finite number, or None: files may hold anything."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None  # type: ignore[arg-type]


def _as_it_is(settings: Settings) -> Settings:
    """Points are matched by keys, which have nothing of the machine."""
    return settings


def _keys(point: Point) -> Iterable[str]:
    """The point's key, and that of a shrunk run on a CPU, which has bf16 in the place of fp16."""
    yield point.key
    if point.settings.train.smoke and point.settings.train.amp == "fp16":
        yield plan.key(recipe.resolve(point.settings, device="cpu", processes=1))


def _by_point(points: Iterable[Point], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {point.key: results[key] for point in points for key in _keys(point) if key in results}


def _order(found: Found) -> tuple[int, str, str]:
    """The first is taken: the furthest, then the one on the device that sorts first, for it not to change."""
    return FURTHER.index(found.status), str(found.settings.get("train")), found.identity

"""Match the run folders of an experiment with the runs that it defines; the folders are only read."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ghostnoise.lab.config import methods, plan, recipe
from ghostnoise.lab.config.grid import Cell, Experiment
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.store.contents import recorded_numerics
from ghostnoise.lab.store.scan import Found, scan

Status = Literal["finished", "diverged", "failed", "unfinished", "missing"]
STATUSES: tuple[Status, ...] = ("finished", "diverged", "failed", "unfinished", "missing")
"""From the furthest advanced to none; of two folders of the same run, the further advanced one is used."""


@dataclass(frozen=True)
class Run:
    """A run that the experiment defines, and its folder if there is one."""

    point: Point
    found: Found | None = None

    @property
    def status(self) -> Status:
        """State of the run; "missing" if it has no folder."""
        return "missing" if self.found is None else self.found.status  # type: ignore[return-value]

    @property
    def result(self) -> Mapping[str, Any]:
        """Contents of `result.json`; empty if the run has no result."""
        return (self.found and self.found.result) or {}

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last epoch; None unless the run finished."""
        return number(self.result.get("accuracy")) if self.status == "finished" else None

    @property
    def reason(self) -> str:
        """First line of the error of a failed run; empty otherwise."""
        return self.found.failed_for if self.found else ""

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Environment metadata recorded with the run; empty if there is none."""
        return self.found.environment() if self.found else {}

    @property
    def numerics(self) -> "Numerics":
        """Numerics number that the run was computed with, and that of its method now."""
        return Numerics(recorded_numerics(self.environment), methods.numerics(self.point.settings.norm.method))


class Numerics(NamedTuple):
    """Numerics number of a run, which is raised when results change by more than rounding, and its method's `current`.

    Runs are comparable if their methods have changed equally often since: if both numbers are current, for example.
    """

    number: int
    current: int

    @property
    def behind(self) -> int:
        """How often the number of the method was raised since the run."""
        return self.current - self.number

    def __str__(self) -> str:
        return f"{self.number} instead of {self.current}" if self.behind else str(self.number)


@dataclass(frozen=True)
class Collected:
    """The runs of an experiment."""

    experiment: Experiment
    folder: Path
    runs: tuple[Run, ...]
    winners: Mapping[str, Cell]
    """The selected cell of each group of cells whose tuning has finished."""
    damaged: tuple[Path, ...] = ()
    reasons: Mapping[Path, str] = field(default_factory=dict)
    """Why each damaged folder is damaged, and the command that removes it."""
    others: int = 0
    """Number of folders of runs that are not part of this experiment."""
    duplicates: int = 0
    """Number of folders of runs that have another folder too."""

    def count(self, status: Status) -> int:
        """Count the runs with this status."""
        return sum(run.status == status for run in self.runs)

    @cached_property
    def numerics(self) -> Mapping[Numerics, int]:
        """Numerics numbers of the runs that have a result, and how many runs have each."""
        return numerics_of(self.runs)

    @property
    def mixed(self) -> bool:
        """Whether the runs that have a result are not all comparable."""
        return len({each.behind for each in self.numerics}) > 1


def collect(
    experiment: Experiment, folder: Path, warn: Callable[[str], object], found: Mapping[str, Found] | None = None
) -> Collected:
    """Match the runs in `folder` (`runs/<recipe>`), or those in `found`, with the experiment's by what they compute."""
    found = scan(folder, warn) if found is None else found
    damaged = {each.path: each.damage for each in found.values() if each.status == "damaged"}
    by_key: dict[str, list[Found]] = {}
    unreadable = 0
    for each in found.values():
        if each.status == "damaged":
            continue
        if each.status == "finished" and number((each.result or {}).get("accuracy")) is None:
            each = replace(each, status="damaged", reason="result.json: accuracy: missing")
            warn(each.damage)
            damaged[each.path] = each.damage
        elif (key := plan.key_of(each)) is None:
            unreadable += 1
        else:
            by_key.setdefault(key, []).append(each)
    best = {key: _preferred(candidates) for key, candidates in by_key.items()}
    first = plan.first_points(experiment, _unresolved)
    results = {key: each.result for key, each in best.items() if each.result is not None}
    winners = plan.winners(experiment, first, _by_point(first, results))
    points = [*first, *plan.test_points(experiment, winners, _unresolved)]
    runs = tuple(Run(point, next((best[key] for key in _keys(point) if key in best), None)) for point in points)
    used = {key for point in points for key in _keys(point)} & set(by_key)
    others = unreadable + sum(len(candidates) for key, candidates in by_key.items() if key not in used)
    duplicates = sum(len(by_key[key]) - 1 for key in used)
    return Collected(experiment, folder, runs, winners, tuple(sorted(damaged)), damaged, others, duplicates)


def numerics_of(runs: Iterable[Run]) -> dict[Numerics, int]:
    """Count the runs that have a result by their numerics number, in ascending order."""
    counts = Counter(run.numerics for run in runs if run.status in ("finished", "diverged"))
    return dict(sorted(counts.items()))


def number(value: object) -> float | None:
    """Return a finite number as float, and None for anything else that a file may contain."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if numeric and math.isfinite(value) else None  # type: ignore[arg-type]
    except OverflowError:  # an integer of more than 308 digits
        return None


def _unresolved(settings: Settings) -> Settings:
    """Return the settings unchanged: runs are matched by keys, which exclude what depends on the machine."""
    return settings


def _keys(point: Point) -> Iterable[str]:
    """Yield the point's key, and for fp16 smoke runs the key of the same run on a CPU, which uses bf16 instead."""
    yield point.key
    if point.settings.train.smoke and point.settings.train.amp == "fp16":
        yield recipe.key(recipe.resolve(point.settings, device="cpu", processes=1))


def _by_point(points: Iterable[Point], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {point.key: results[key] for point in points for key in _keys(point) if key in results}


def _preferred(candidates: Sequence[Found]) -> Found:
    """Choose one of the folders of the same run: the furthest advanced one, then the one with the newest numerics.

    Device and name make the choice deterministic.
    """

    def order(found: Found) -> tuple[int, int, str, str]:
        status = STATUSES.index(found.status)
        return status, -found.numerics, str(found.settings.get("train")), found.identity

    return candidates[0] if len(candidates) == 1 else min(candidates, key=order)

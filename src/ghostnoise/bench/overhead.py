"""What a sweep costs besides its runs: a part of `ghostnoise bench lab`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ghostnoise.bench.layers import times
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import LEAST_ROUNDS, Timing, summary
from ghostnoise.lab.sweep import overhead


@dataclass(frozen=True)
class Overhead:
    """What a sweep costs besides its runs, against what is allowed, in milliseconds."""

    name: str
    allowed: float
    once: Callable[[Path, bool], float]
    """Seconds, in an empty folder; of a small sweep if True."""


def planning(folder: Path, quick: bool) -> float:
    """The seconds to expand a grid and to see which of its runs are finished: all of them."""
    found = overhead.planning(100 if quick else 10_000, folder)
    return found.expansion + found.scan


def scheduling(folder: Path, quick: bool) -> float:
    """The seconds that a run takes which has nothing to do."""
    return overhead.scheduling(3 if quick else 100, folder)


ROWS = [
    Overhead("sweep of 10,000 points: expansion and scan", 3000.0, planning),
    Overhead("sweep: a run that has nothing to do", 50.0, scheduling),
]


def measure(row: Overhead, settings: Settings) -> list[Record]:
    """Time the overhead a few times, each in a folder of its own."""
    seconds = []
    for _ in range(settings.rounds or LEAST_ROUNDS):
        with TemporaryDirectory() as folder:
            seconds.append(row.once(Path(folder), settings.quick))
    allowed = Timing(row.allowed, row.allowed, row.allowed, row.allowed, len(seconds))
    shared = {"bench": "lab", "row": row.name, "shape": "", "memory_format": "", "steps": 1}
    return [
        shared | {"contender": name, "kind": kind, "backend": ""} | times(timing, allowed) | conditions(settings)
        for name, kind, timing in (("allowed", "torch", allowed), ("ghostnoise sweep", "ours", summary(seconds)))
    ]

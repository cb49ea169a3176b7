"""How far a sweep is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ghostnoise.lab.engines import Ended, Event, Job, Progressed, Started


@dataclass
class Running:
    """A run that a worker is at."""

    name: str
    where: str
    done: int = 0
    total: int = 1
    loss: float | None = None
    accuracy: float | None = None
    begun: int | None = None
    """How far it was when it was first heard of: it may go on from a checkpoint."""


@dataclass(frozen=True)
class Failure:
    """A run that failed: its name, the reason in a line, its folder."""

    name: str
    reason: str
    folder: Path


@dataclass
class Tally:
    """Counts of runs. `earlier` were over before the sweep began, and are among the others too."""

    finished: int = 0
    diverged: int = 0
    waiting: int = 0
    earlier: int = 0
    failures: list[Failure] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    worked: float = 0.0
    now: Callable[[], float] = time.monotonic
    since: float | None = None

    @property
    def total(self) -> int:
        """All runs so far; tests of what is tuned first come later."""
        return self.finished + self.diverged + len(self.failures) + self.waiting + len(self.running)

    @property
    def left(self) -> float | None:
        """The seconds that the rest takes if it goes on as before, or None while nothing is known."""
        parts = [(each.done - (each.begun or 0)) / each.total for each in self.running.values()]
        done = self.worked + sum(parts)
        if self.since is None or done <= 0:
            return None
        rest = self.waiting + sum(1 - each.done / each.total for each in self.running.values())
        return (self.now() - self.since) / done * rest

    def take(self, event: Event) -> None:
        """Count an event; how a run that is over ended is counted by `over`."""
        key = event.job.identity
        match event:
            case Started(job, where):
                self.since = self.since or self.now()
                if key not in self.running:
                    self.waiting -= 1
                self.running[key] = Running(job.name, where)
            case Progressed() if key in self.running:
                run = self.running[key]
                run.begun = event.done if run.begun is None else run.begun
                run.done, run.total, run.loss, run.accuracy = event.done, event.total, event.loss, event.accuracy
            case Ended():
                if self.running.pop(key, None) is None:
                    self.waiting -= 1
                elif event.status in ("finished", "diverged", "failed"):
                    self.worked += 1

    def put_back(self, job: Job) -> None:
        """Another sweep has the run: it waits again."""
        if self.running.pop(job.identity, None) is not None:
            self.waiting += 1

    def over(self, status: str) -> None:
        """Count a run that is over."""
        if status == "finished":
            self.finished += 1
        elif status == "diverged":
            self.diverged += 1

    def line(self, stopped: bool = False) -> str:
        """The counts."""
        waiting = self.waiting + len(self.running) if stopped else self.waiting
        counts: dict[str, Any] = {
            "finished": self.finished, "diverged": self.diverged, "failed": len(self.failures),
            "running": 0 if stopped else len(self.running), "waiting": waiting,
        }  # fmt: skip
        said = [f"{count} {name}" for name, count in counts.items() if count or name == "finished"]
        return ", ".join(said) + (f" ({self.earlier} of them before)" if self.earlier else "")

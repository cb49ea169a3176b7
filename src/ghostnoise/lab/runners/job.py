"""A run as a job for a runner, and the events that a runner emits. This module does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from ghostnoise.lab.config.schema import Settings

Status = Literal["finished", "diverged", "failed", "elsewhere", "stopped"]


@dataclass(frozen=True)
class Job:
    """One run of a sweep; it can be pickled. `settings` are resolved for the machine, and `identity` is theirs."""

    recipe: str
    identity: str
    name: str
    settings: Settings


@dataclass(frozen=True)
class Started:
    """A worker has started or resumed a job."""

    job: Job
    where: str


@dataclass(frozen=True)
class Progressed:
    """A job has done `done` of `total` steps."""

    job: Job
    done: int
    total: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Ended:
    """A job has ended.

    `status` is "finished" or "diverged" (the result is in the run folder), "failed" (the reason is in the run folder),
    "stopped" (by a signal), or "elsewhere" (another process owns the run).
    """

    job: Job
    status: Status
    message: str = ""


Event: TypeAlias = Started | Progressed | Ended
Emit: TypeAlias = Callable[[Event], object]


class Runner(Protocol):
    """Runs jobs. Every job ends with exactly one `Ended`, even if its worker dies."""

    def run(self, jobs: Sequence[Job], emit: Emit, stop: Callable[[], bool]) -> None:
        """Run all jobs and emit events from the calling thread; return early once `stop()` is true."""

    def close(self) -> None:
        """Release the workers."""


@dataclass(frozen=True)
class Place:
    """The folders that a runner reads and writes, and how often runs save checkpoints."""

    runs: Path
    data: Path | None = None
    checkpoint_seconds: float = 60.0

    def folder(self, job: Job) -> Path:
        """Return the run folder of a job."""
        return self.runs / job.recipe / job.identity

"""A run as a job for an engine, and what an engine tells about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from ghostnoise.lab.config.schema import Settings

Status = Literal["finished", "diverged", "failed", "elsewhere", "stopped"]


@dataclass(frozen=True)
class Job:
    """One run of a sweep; all of it can be pickled."""

    recipe: str
    identity: str
    name: str
    settings: Settings
    """Resolved: the identity is theirs."""


@dataclass(frozen=True)
class Started:
    """A worker has begun with a job, or goes on with it."""

    job: Job
    where: str


@dataclass(frozen=True)
class Progressed:
    """How far a job is."""

    job: Job
    done: int
    total: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Ended:
    """A job is over: finished or diverged with a result in its folder, failed with a record of why, stopped by a
    signal, or left alone because another sweep has it."""

    job: Job
    status: Status
    message: str = ""


Event: TypeAlias = Started | Progressed | Ended


class Engine(Protocol):
    """Runs jobs; every job ends with one `Ended`, whatever happens to workers."""

    def run(self, jobs: Sequence[Job], tell: Callable[[Event], object], stop: Callable[[], bool]) -> None:
        """Run all jobs and tell what happens, from the calling thread; come back early once `stop()` is true."""

    def close(self) -> None:
        """Let workers go."""


@dataclass(frozen=True)
class Place:
    """Where an engine reads and writes."""

    runs: Path
    data: Path | None = None
    checkpoint_seconds: float = 60.0

    def folder(self, job: Job) -> Path:
        """Where a job's run is kept."""
        return self.runs / job.recipe / job.identity

"""What the runners of a sweep share: their protocol, and the training of a run in the process of a worker.

Importing this module does not import torch.
"""

import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Ended, Event, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import Busy, RunFolder, locked, read

if TYPE_CHECKING:  # they import torch
    from ghostnoise.lab.train.machine import Stop
    from ghostnoise.lab.train.run import Keep

CHECK_EVERY = 0.5  # seconds between two looks at runs that another process owns

Emit: TypeAlias = Callable[[Run, Event], object]


class Runner(Protocol):
    """Trains runs. Every run ends with exactly one `Ended`, even if its worker dies."""

    def run(self, runs: Sequence[Run], emit: Emit, stop: Callable[[], bool]) -> None:
        """Train all runs and emit their events from the calling thread; return early once `stop()` is true.

        A run that another process owns is waited for, and is trained here if that process leaves it.
        """

    def close(self) -> None:
        """Release the workers."""


@dataclass(frozen=True)
class Place:
    """The folders that a runner reads and writes, and what its workers save and report; see `train.Options`."""

    runs: Path
    data: Path | None = None
    checkpoint_seconds: float = 60.0
    keep: "Keep" = "weights"
    log_steps: int = 0

    def folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.runs / run.recipe / run.identity


def execute(
    run: Run, place: Place, threads: int | None = None, workers: int | None = None, *, stop: "Stop | None" = None,
    step_seconds: float = 0.25,
) -> Iterator[Event]:  # fmt: skip
    """Train a run in this process; never raises an `Exception`.

    The last event is `Ended`, whose message has the warnings of `train`, or the error.
    """
    from ghostnoise.lab.train import Options, train
    from ghostnoise.lab.train.machine import Stop

    warnings: list[str] = []
    options = Options(
        runs=place.runs, data=place.data, threads=threads, workers=workers, keep=place.keep, log_steps=place.log_steps,
        checkpoint_seconds=place.checkpoint_seconds, step_seconds=step_seconds, warn=warnings.append,
        stop=stop or Stop(),
    )  # fmt: skip
    try:
        if locked(place.folder(run)):  # checked before the data are read
            yield Ended("elsewhere")
            return
        with closing(train(run, options)) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, Started | Ended) and event.run is not None:
                    _check_identity(run, event.run)
                if isinstance(event, Ended) and event.run is not None:
                    light = replace(event.run, curve=None, noise=())  # they are in its folder
                    event = replace(event, run=light, message="\n".join(f"warning: {line}" for line in warnings))
                yield event
    except Busy:
        yield Ended("elsewhere")
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        yield failed(run, place, message, traceback.format_exc())


def failed(run: Run, place: Place, message: str, trace: str = "") -> Ended:
    """Record in its folder why a run failed, if anything can be written there."""
    path = place.folder(run)
    with suppress(UserError):
        RunFolder(path, lambda text: None).fail(run.tree, message, trace)
    return Ended("failed", replace(run, status="failed", failure={"message": message}, folder=path), message=message)


def result(run: Run, place: Place) -> Ended | None:
    """Return how a run ended according to its folder, or None if it has not ended."""
    found = replace(read(place.folder(run)), curve=None, noise=())
    return Ended(found.status, found) if found.ended else None  # type: ignore[arg-type]


class Deferred:
    """Runs that another process owns; they are checked from time to time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.runs: dict[str, Run] = {}
        self.checked = 0.0

    def add(self, run: Run) -> None:
        """Check this run again later."""
        self.runs[run.identity] = run
        self.checked = time.monotonic()

    def check(self) -> tuple[list[tuple[Run, Ended]], list[Run]]:
        """Return runs that have ended, and runs that no process owns any more; empty if it was just checked."""
        if not self.runs or time.monotonic() - self.checked < CHECK_EVERY:
            return [], []
        self.checked = time.monotonic()
        ended, free = [], []
        for run in list(self.runs.values()):
            over = result(run, self.place)
            if over is not None:
                ended.append((run, over))
            elif not locked(self.place.folder(run)):
                free.append(run)
            else:
                continue
            del self.runs[run.identity]
        return ended, free

    def clear(self) -> list[Run]:
        """Remove and return all runs."""
        runs, self.runs = list(self.runs.values()), {}
        return runs


def _check_identity(run: Run, trained: Run) -> None:
    """Raise if this machine gave the run another identity than it has."""
    if trained.identity != run.identity:
        raise UserError(
            f"{run.name}: has the identity {trained.identity} on {socket.gethostname()} instead of {run.identity}; all "
            "machines must have the same version of ghostnoise and the same data"
        )

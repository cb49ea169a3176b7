"""Execute a job in this process, whichever runner it belongs to, and wait for jobs that another process executes."""

import io
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from ghostnoise.lab.config.recipe import Recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.runners.job import Ended, Job, Place
from ghostnoise.lab.store import RunFolder, scan
from ghostnoise.lab.store.folder import Busy, Deleted
from ghostnoise.lab.train import Options, Outcome, train
from ghostnoise.lab.train.display import REFRESHED_EVERY, Display
from ghostnoise.lab.train.stop import Stop

ATTEMPTS = 3  # at a run whose folder is deleted again and again
CHECK_EVERY = 0.5  # seconds between two looks at runs that another process owns

OnProgress = Callable[[int, int, float, float], object]
"""Takes the steps done, the number of steps, loss and accuracy."""


class ProgressDisplay(Display):
    """Calls `on_progress` every `every` seconds while `ready()`."""

    def __init__(
        self, on_progress: OnProgress, epochs: int, steps: int, every: float, ready: Callable[[], bool]
    ) -> None:
        self.on_progress, self.total, self.steps = on_progress, epochs * steps, steps
        self.every, self.ready, self.last = every, ready, 0.0

    def due(self) -> bool:
        """Return whether a step is to be reported: reading its loss waits for the device."""
        return time.monotonic() - self.last >= self.every and self.ready()

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Report the running means of an epoch."""
        self.on_progress(epoch * self.steps + step, self.total, loss, accuracy)
        self.last = time.monotonic()


def execute(
    job: Job, place: Place, on_progress: OnProgress, threads: int | None = None, workers: int | None = None, *,
    on_start: Callable[[], object] = lambda: None, saved: Callable[[Path], object] = lambda folder: None,
    stop: Stop | None = None, every: float = REFRESHED_EVERY, ready: Callable[[], bool] = lambda: True,
) -> Ended:  # fmt: skip
    """Run a job in this process until it ends; never raises an `Exception`.

    Args:
        on_progress: Called every `every` seconds while `ready()`.
        on_start: Called once this process owns the run.
        saved: Called with the run folder after each checkpoint.

    Returns:
        How the job ended; `Ended.message` has the warnings of `train`, or the error.
    """
    output, warnings = Console(file=io.StringIO()), Console(file=io.StringIO(), width=10_000)

    def display(_: Options, epochs: int, steps: int) -> Display:
        on_start()
        return ProgressDisplay(on_progress, epochs, steps, every, ready)

    options = Options(
        runs=place.runs, data=place.data, threads=threads, workers=workers, quiet=True, console=output, errors=warnings,
        checkpoint_seconds=place.checkpoint_seconds, display=display, saved=saved, stop=stop or Stop(),
    )  # fmt: skip
    chosen = Recipe(name=job.recipe, claim="", command="", time="", score="", settings=job.settings, text="")
    try:
        if _owned(job, place):  # checked before the data are read
            return Ended(job, "elsewhere")
        outcome = _train(chosen, options)
        _check_identity(job, outcome.folder)
    except Busy:
        return Ended(job, "elsewhere")
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return failed(job, place, message, traceback.format_exc())
    text = warnings.file.getvalue().strip()  # type: ignore[attr-defined]
    return Ended(job, "stopped" if outcome.result is None else outcome.result["status"], text)


def _train(chosen: Recipe, options: Options) -> Outcome:
    """Train a run; if its folder is deleted meanwhile, train it again."""
    for _ in range(ATTEMPTS - 1):
        try:
            return train(chosen, options)
        except Deleted:
            options.errors.print("its folder was deleted while it was trained, and it was trained again")
    return train(chosen, options)


def failed(job: Job, place: Place, message: str, trace: str = "") -> Ended:
    """Record in the run folder why a job failed, if anything can be written there."""
    header = {"recipe": job.recipe, "identity": job.identity}
    with suppress(UserError):
        RunFolder(place.folder(job), lambda text: None).fail(
            header | job.settings.model_dump(exclude_none=True), message, trace
        )
    return Ended(job, "failed", message)


def result(job: Job, place: Place) -> Ended | None:
    """Return how the run of a job ended according to its folder, or None if it has not ended."""
    found = scan.look(place.folder(job), lambda text: None, current=True)
    return Ended(job, found.status) if found.status in ("finished", "diverged") else None


class Deferred:
    """Jobs whose runs another process owns; they are checked from time to time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.jobs: dict[str, Job] = {}
        self.checked = 0.0

    def add(self, job: Job) -> None:
        """Check this job again later."""
        self.jobs[job.identity] = job
        self.checked = time.monotonic()

    def check(self) -> tuple[list[Ended], list[Job]]:
        """Return jobs that have ended, and jobs that no process owns any more; empty if it was just checked."""
        if not self.jobs or time.monotonic() - self.checked < CHECK_EVERY:
            return [], []
        self.checked = time.monotonic()
        ended, free = [], []
        for job in list(self.jobs.values()):
            over = result(job, self.place)
            if over is not None:
                ended.append(over)
            elif not _owned(job, self.place):
                free.append(job)
            else:
                continue
            del self.jobs[job.identity]
        return ended, free

    def clear(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs, self.jobs = list(self.jobs.values()), {}
        return jobs


def pause() -> None:
    """Wait until it is worth checking deferred jobs again."""
    time.sleep(CHECK_EVERY / 2)


def _owned(job: Job, place: Place) -> bool:
    return RunFolder(place.folder(job), lambda text: None).owned()


def _check_identity(job: Job, folder: Path) -> None:
    """Raise if this machine gave the run another identity than its job has."""
    if folder.name != job.identity:
        raise UserError(
            f"{job.name}: has the identity {folder.name} on {socket.gethostname()} instead of {job.identity}; all "
            "machines must have the same version of ghostnoise and the same data"
        )

"""What a worker of any engine does with a job."""

import io
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from ghostnoise.lab.config.recipe import Recipe
from ghostnoise.lab.engines.job import Ended, Job, Place
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.folder import Busy
from ghostnoise.lab.train import Options, train
from ghostnoise.lab.train.display import REFRESHED_EVERY, Display
from ghostnoise.lab.train.stop import Stop

Report = Callable[[int, int, float, float], object]
"""Takes steps done, steps in all, loss and accuracy."""


class Reporting(Display):
    """Passes on how far a run is, every so many seconds, while `ready()`."""

    def __init__(self, report: Report, epochs: int, steps: int, every: float, ready: Callable[[], bool]) -> None:
        self.report, self.total, self.steps = report, epochs * steps, steps
        self.every, self.ready, self.told = every, ready, 0.0

    def due(self) -> bool:
        """Whether it is time to show a step; to read its loss otherwise would be for nothing."""
        return time.monotonic() - self.told >= self.every and self.ready()

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Pass on the running means of an epoch."""
        self.report(epoch * self.steps + step, self.total, loss, accuracy)
        self.told = time.monotonic()


def execute(
    job: Job, place: Place, report: Report, threads: int | None = None, workers: int | None = None, *,
    begun: Callable[[], object] = lambda: None, saved: Callable[[Path], object] = lambda folder: None,
    stop: Stop | None = None, every: float = REFRESHED_EVERY, ready: Callable[[], bool] = lambda: True,
) -> Ended:  # fmt: skip
    """Run a job to its end in this process, whatever that is; `Ended.message` has train's warnings, or the error.

    `begun` is called once the run is this process's own; `report` every so many seconds, while `ready()`.
    """
    spoken, warned = Console(file=io.StringIO()), Console(file=io.StringIO(), width=10_000)

    def display(_: Options, epochs: int, steps: int) -> Display:
        begun()
        return Reporting(report, epochs, steps, every, ready)

    options = Options(
        runs=place.runs, data=place.data, threads=threads, workers=workers, quiet=True, console=spoken, errors=warned,
        checkpoint_seconds=place.checkpoint_seconds, display=display, saved=saved, stop=stop or Stop(),
    )  # fmt: skip
    chosen = Recipe(name=job.recipe, claim="", command="", time="", score="", settings=job.settings, text="")
    try:
        folder = RunFolder(place.folder(job), lambda text: None)
        if folder.owned():  # before the data are read
            return Ended(job, "elsewhere")
        outcome = train(chosen, options)
        _check(job, outcome.folder)
    except Busy:
        return Ended(job, "elsewhere")
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return failed(job, place, message, traceback.format_exc())
    warnings = warned.file.getvalue().strip()  # type: ignore[attr-defined]
    return Ended(job, "stopped" if outcome.result is None else outcome.result["status"], warnings)


def _check(job: Job, folder: Path) -> None:
    """Refuse a run that is another one than its job says."""
    if folder.name != job.identity:
        raise UserError(
            f"{job.name}: is {folder.name} on {socket.gethostname()}, not {job.identity}; machines must have the same "
            "version of ghostnoise, and the same data"
        )


def failed(job: Job, place: Place, message: str, trace: str = "") -> Ended:
    """Record in the run folder why a job failed, as far as anything can be written there."""
    told = {"recipe": job.recipe, "identity": job.identity}
    with suppress(UserError):
        RunFolder(place.folder(job), lambda text: None).fail(
            told | job.settings.model_dump(exclude_none=True), message, trace
        )
    return Ended(job, "failed", message)

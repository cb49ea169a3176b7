"""What a worker of any engine does with a job."""

import io
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console

from ghostnoise.lab.engines.job import Ended, Job, Place
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.recipe import Recipe
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.folder import Busy
from ghostnoise.lab.train import Options, train
from ghostnoise.lab.train.display import REFRESHED_EVERY, Display

Report = Callable[[int, int, float, float], object]
"""Takes steps done, steps in all, loss and accuracy."""


class Reporting(Display):
    """Passes on how far a run is, a few times a second."""

    def __init__(self, report: Report, epochs: int, steps: int) -> None:
        self.report, self.total, self.steps = report, epochs * steps, steps
        self.told = 0.0

    def due(self) -> bool:
        """Whether it is time to show a step; to read its loss otherwise would be for nothing."""
        return time.monotonic() - self.told >= REFRESHED_EVERY

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Pass on the running means of an epoch."""
        self.report(epoch * self.steps + step, self.total, loss, accuracy)
        self.told = time.monotonic()

    def epoch(self, line: dict[str, Any], best: bool) -> None:
        """Pass on the accuracy on the images that are held out."""
        if self.due():
            self.report(line["step"], self.total, line["train_loss"], line["accuracy"])
            self.told = time.monotonic()


def execute(
    job: Job, place: Place, report: Report, threads: int | None = None, begun: Callable[[], object] = lambda: None
) -> Ended:
    """Run a job to its end in this process, whatever that is; `Ended.message` has train's warnings, or the error.

    `begun` is called once the run is this process's own.
    """
    spoken, warned = Console(file=io.StringIO()), Console(file=io.StringIO(), width=10_000)

    def display(_: Options, epochs: int, steps: int) -> Display:
        begun()
        return Reporting(report, epochs, steps)

    options = Options(
        runs=place.runs, data=place.data, threads=threads, workers=threads, quiet=True, console=spoken, errors=warned,
        checkpoint_seconds=place.checkpoint_seconds, display=display,
    )  # fmt: skip
    chosen = Recipe(name=job.recipe, claim="", command="", time="", score="", settings=job.settings, text="")
    try:
        folder = RunFolder(place.folder(job), lambda text: None)
        if folder.owned():  # before the data are read
            return Ended(job, "elsewhere")
        outcome = train(chosen, options)
    except Busy:
        return Ended(job, "elsewhere")
    except UserError as error:
        return failed(job, place, str(error), traceback.format_exc())
    except Exception as error:
        return failed(job, place, f"{type(error).__name__}: {error}", traceback.format_exc())
    warnings = warned.file.getvalue().strip()  # type: ignore[attr-defined]
    return Ended(job, "stopped" if outcome.result is None else outcome.result["status"], warnings)


def failed(job: Job, place: Place, message: str, trace: str = "") -> Ended:
    """Record in the run folder why a job failed, as far as anything can be written there."""
    told = {"recipe": job.recipe, "identity": job.identity}
    with suppress(UserError):
        RunFolder(place.folder(job), lambda text: None).fail(
            told | job.settings.model_dump(exclude_none=True), message, trace
        )
    return Ended(job, "failed", message)

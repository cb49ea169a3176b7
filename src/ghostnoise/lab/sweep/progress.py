"""The progress of a sweep: counts of runs, and their display in the terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ghostnoise.lab.runners import Ended, Event, Job, Progressed, Started
from ghostnoise.text import duration

REFRESHED = 4  # times a second
BAR, SHORT_BAR = 24, 10
NARROW = 80  # columns, below which a run in progress is shown with a short bar, without its loss and its worker


@dataclass
class Running:
    """A run in progress. `begun` are the steps that were done when it was first reported, 0 unless it was resumed."""

    name: str
    where: str
    done: int = 0
    total: int = 1
    loss: float | None = None
    accuracy: float | None = None
    begun: int | None = None


@dataclass(frozen=True)
class Failure:
    """A run that failed: its name, the first line of the reason, and its folder."""

    name: str
    reason: str
    folder: Path


@dataclass
class Tally:
    """Counts of runs. `earlier` of the finished and diverged runs had ended before the sweep started."""

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
        """Return the number of known runs; the tests of tuned methods are added later."""
        return self.finished + self.diverged + len(self.failures) + self.waiting + len(self.running)

    @property
    def left(self) -> float | None:
        """Estimate the seconds until the end from the speed so far; None before any progress."""
        parts = [(each.done - (each.begun or 0)) / each.total for each in self.running.values()]
        done = self.worked + sum(parts)
        if self.since is None or done <= 0:
            return None
        rest = self.waiting + sum(1 - each.done / each.total for each in self.running.values())
        return (self.now() - self.since) / done * rest

    def take(self, event: Event) -> None:
        """Count an event; `over` counts how a run ended."""
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
        """Return a run to the waiting ones: another sweep owns it."""
        if self.running.pop(job.identity, None) is not None:
            self.waiting += 1

    def over(self, status: str) -> None:
        """Count a run that has ended."""
        if status == "finished":
            self.finished += 1
        elif status == "diverged":
            self.diverged += 1

    def again(self, status: str, earlier: bool) -> None:
        """Return a run that had ended, before the sweep started if `earlier`, to the waiting ones."""
        self.earlier -= earlier
        self.finished -= status == "finished"
        self.diverged -= status == "diverged"
        self.waiting += 1

    def line(self, stopped: bool = False) -> str:
        """Return the counts as a line."""
        waiting = self.waiting + len(self.running) if stopped else self.waiting
        counts: dict[str, Any] = {
            "finished": self.finished, "diverged": self.diverged, "failed": len(self.failures),
            "running": 0 if stopped else len(self.running), "waiting": waiting,
        }  # fmt: skip
        shown = [f"{count} {name}" for name, count in counts.items() if count or name == "finished"]
        return ", ".join(shown) + (f" ({self.earlier} of them earlier)" if self.earlier else "")


class Board:
    """Displays a tally: a live table in a terminal, else a line for each run that ends; nothing if `quiet`."""

    def __init__(self, tally: Tally, console: Console, quiet: bool) -> None:
        self.tally, self.console, self.quiet = tally, console, quiet
        shown = console.is_terminal and not quiet
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=REFRESHED) if shown else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.transient = True
            self.live.stop()

    def render(self) -> Group:
        """Return the counts, and a progress bar for each run in progress."""
        table = Table.grid(padding=(0, 1))
        for run in list(self.tally.running.values()):
            loss = "" if run.loss is None else f"loss {run.loss:.3f}"
            accuracy = "" if run.accuracy is None else f"accuracy {run.accuracy:.1f} %"
            narrow = self.console.width < NARROW
            bar = ProgressBar(total=run.total, completed=run.done, width=SHORT_BAR if narrow else BAR)
            more = (accuracy,) if narrow else (loss, accuracy, Text(run.where, style="dim"))
            table.add_row(Text(run.name, no_wrap=True), bar, *more)
        left = self.tally.left
        return Group(Text(self.tally.line() + (f"; {duration(left)} left" if left is not None else "")), table)

    def over(self, name: str, status: str, result: dict[str, Any] | None, message: str) -> None:
        """Print that a run has ended; in a terminal, only if it did not finish normally."""
        score = result.get("accuracy") if result else None
        detail = f"{score:.2f} %, {duration(result['seconds'])}" if result and score is not None else ""
        text = f"{status} {name}" + (f": {detail}" if detail else "")
        if message:
            text += f": {message}" if status == "failed" else f" ({'; '.join(message.splitlines())})"
        if self.live is None or status != "finished" or message:
            self.print(text.splitlines()[0])

    def print(self, text: str) -> None:
        """Print a line, above the live table if there is one."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

"""The progress of a sweep: counts of runs, and their display in the terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ghostnoise.lab.events import Ended, Event, Started, Step
from ghostnoise.lab.run import ENDED, Run
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


@dataclass
class Tally:
    """Counts of runs. `earlier` of the finished and diverged runs had ended before the sweep started."""

    finished: int = 0
    diverged: int = 0
    waiting: int = 0
    earlier: int = 0
    failures: list[Run] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    worked: float = 0.0
    now: Callable[[], float] = time.monotonic
    since: float | None = None

    @property
    def left(self) -> float | None:
        """Estimate the seconds until the end from the speed so far; None before any progress."""
        parts = [(each.done - (each.begun or 0)) / each.total for each in self.running.values()]
        done = self.worked + sum(parts)
        if self.since is None or done <= 0:
            return None
        rest = self.waiting + sum(1 - each.done / each.total for each in self.running.values())
        return (self.now() - self.since) / done * rest

    def take(self, run: Run, event: Event) -> None:
        """Count an event."""
        key = run.identity
        match event:
            case Started(where=where):
                self.since = self.since or self.now()
                if key not in self.running:
                    self.waiting -= 1
                self.running[key] = Running(run.name, where)
            case Step(done=done, total=total) if key in self.running:
                at = self.running[key]
                at.begun = done if at.begun is None else at.begun
                at.done, at.total, at.loss, at.accuracy = done, total, event.loss, event.accuracy
            case Ended(status=status):
                if self.running.pop(key, None) is None:
                    self.waiting -= 1
                elif status in ("finished", "diverged", "failed"):
                    self.worked += 1
                if status in ("stopped", "elsewhere"):
                    self.waiting += 1
                elif event.run is not None:
                    self.over(event.run)

    def over(self, run: Run) -> None:
        """Count a run that has ended, or that cannot be trained."""
        self.finished += run.status == "finished"
        self.diverged += run.status == "diverged"
        if run.status not in ENDED:
            self.failures.append(run)

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

    def over(self, run: Run, event: Ended) -> None:
        """Print that a run has ended; in a terminal, only if it did not finish normally."""
        result = (event.run and event.run.result) or {}
        score, message = result.get("accuracy"), event.message
        detail = f"{score:.2f} %, {duration(result['seconds'])}" if score is not None else ""
        text = f"{event.status} {run.name}" + (f": {detail}" if detail else "")
        if message:
            text += f": {message}" if event.status == "failed" else f" ({'; '.join(message.splitlines())})"
        if self.live is None or event.status != "finished" or message:
            self.print(text.splitlines()[0])

    def print(self, text: str) -> None:
        """Print a line, above the live table if there is one."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

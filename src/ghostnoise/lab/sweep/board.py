"""What the terminal shows of a sweep: a live table, or a line for each run that is over."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ghostnoise.lab.sweep.tally import Tally

REFRESHED = 4  # times a second
BAR = 24


class Board:
    """Shows a tally while it changes; `quiet` shows nothing."""

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
        """The counts, and a bar for each run that is running."""
        table = Table.grid(padding=(0, 1))
        for run in list(self.tally.running.values()):
            loss = "" if run.loss is None else f"loss {run.loss:.3f}"
            accuracy = "" if run.accuracy is None else f"accuracy {run.accuracy:.1f} %"
            bar = ProgressBar(total=run.total, completed=run.done, width=BAR)
            table.add_row(Text(run.name, no_wrap=True), bar, loss, accuracy, Text(run.where, style="dim"))
        left = self.tally.left
        return Group(Text(self.tally.line() + (f"; {duration(left)} left" if left is not None else "")), table)

    def over(self, name: str, status: str, result: dict[str, Any] | None, message: str) -> None:
        """Say that a run is over: on a terminal only what is not as hoped for."""
        score = result.get("accuracy") if result else None
        detail = f"{score:.2f} %, {duration(result['seconds'])}" if result and score is not None else ""
        text = f"{status} {name}" + (f": {detail}" if detail else "")
        if message:
            text += f": {message}" if status == "failed" else f" ({'; '.join(message.splitlines())})"
        if self.live is None or status != "finished" or message:
            self.say(text.splitlines()[0])

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"

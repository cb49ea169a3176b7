"""What the terminal shows: a live bar for the epoch, and a line when it is over."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

REFRESHED_EVERY = 0.25  # seconds; to read the loss from a GPU costs a wait


class Display:
    """Is told how a run is going; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing more comes."""

    def due(self) -> bool:
        """Whether it is time to show a step; to read its loss otherwise would be for nothing."""
        return False

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Take the running means of an epoch after `step` of its steps."""

    def epoch(self, line: dict[str, Any], best: bool) -> None:
        """Take the line of an epoch."""

    def say(self, text: str) -> None:
        """Take a sentence."""


class Terminal(Display):
    """Shows a run's progress in the terminal; silent if `quiet`."""

    def __init__(self, console: Console, quiet: bool, epochs: int, steps: int) -> None:
        self.console, self.quiet = console, quiet
        self.epochs, self.steps = epochs, steps
        self.live = console.is_terminal and not quiet
        columns = (
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  {task.fields[speed]} images/s"),
            TimeRemainingColumn(compact=True), TextColumn("left"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.task: TaskID | None = None
        self.shown = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def due(self) -> bool:
        """Whether it is time to show a step; to read its loss otherwise would be for nothing."""
        return self.live and time.monotonic() - self.shown >= REFRESHED_EVERY

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Show the running means of an epoch after `step` of its steps."""
        done = epoch * self.steps + step
        fields = {
            "epoch": f"{epoch + 1}/{self.epochs}", "loss": f"{loss:.3f}", "accuracy": f"{accuracy:.1f} %",
            "speed": f"{speed:,.0f}",
        }  # fmt: skip
        if self.task is None:
            self.task = self.bar.add_task("", total=self.epochs * self.steps, completed=done, **fields)  # type: ignore[arg-type]
        self.bar.update(self.task, completed=done, **fields)  # type: ignore[arg-type]
        self.shown = time.monotonic()

    def epoch(self, line: dict[str, Any], best: bool) -> None:
        """Print the line of an epoch."""
        width = len(str(self.epochs))
        self.say(
            f"epoch {line['epoch']:>{width}}/{self.epochs}  loss {line['train_loss']:.3f}  "
            f"accuracy {line['train_accuracy']:5.1f} %  {line['split']} {line['accuracy']:5.2f} %"
            f"{' *' if best else '  '}  {line['images_per_second']:,.0f} images/s"
        )

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

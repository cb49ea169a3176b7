"""Output of a run besides its folder: progress in the terminal, and metrics for TensorBoard."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ghostnoise.lab.errors import UserError
from ghostnoise.text import install_command

REFRESHED_EVERY = 0.25  # seconds; reading the loss waits for the GPU


class Display:
    """Receives the progress of a run; this base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the display."""

    def due(self) -> bool:
        """Return whether the current step should be shown; its loss is read only then."""
        return False

    def step(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Show the running means of an epoch after `step` of its steps."""

    def epoch(self, line: dict[str, Any], best: bool) -> None:
        """Show the metrics of an epoch."""

    def message(self, text: str) -> None:
        """Show a line of text."""


class Terminal(Display):
    """Shows a progress bar and one line per epoch in the terminal; nothing if `quiet`."""

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
        """Return whether the current step should be shown; its loss is read only then."""
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
        """Print the metrics of an epoch; an asterisk marks the best accuracy."""
        width = len(str(self.epochs))
        self.message(
            f"epoch {line['epoch']:>{width}}/{self.epochs}  loss {line['train_loss']:.3f}  "
            f"accuracy {line['train_accuracy']:5.1f} %  {line['split']} {line['accuracy']:5.2f} %"
            f"{' *' if best else '  '}  {line['images_per_second']:,.0f} images/s"
        )

    def message(self, text: str) -> None:
        """Print a line of text, above the progress bar if there is one."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)


class Sink(Protocol):
    """A destination of metrics besides the run folder."""

    def record(self, line: dict[str, Any]) -> None:
        """Record the metrics of an epoch."""


class TensorBoard:
    """Writes metrics for TensorBoard to `tensorboard/` in the run folder."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"--tensorboard: needs the package tensorboard, which is not installed; run "
                f"{install_command('tensorboard')}, or leave --tensorboard out"
            ) from error
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def record(self, line: dict[str, Any]) -> None:
        """Write every number of a line at its step."""
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

"""Consumers of the events of a run: the terminal, TensorBoard and Weights & Biases."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ghostnoise.lab.config.overrides import flat
from ghostnoise.lab.events import Ended, Epoch, Event, Started, Step
from ghostnoise.lab.run import Run
from ghostnoise.text import counted, duration, install_command

LOGS = ("tensorboard", "wandb")
LOGGED = {
    "loss": "step/loss", "accuracy": "step/accuracy", "images_per_second": "step/images_per_second", "lr": "step/lr",
    "gradient_norm": "step/gradient_norm", "memory": "step/memory",
}  # fmt: skip
NOT_CURVES = ("epoch", "step", "split")  # of a line of metrics


class Terminal:
    """Shows a progress bar and one line per epoch in the terminal; only the last line if `quiet`."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.live = console.is_terminal and not quiet
        columns = (
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  {task.fields[speed]} images/s"),
            TimeRemainingColumn(compact=True), TextColumn("left"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.task: TaskID | None = None
        self.epochs = 0

    def take(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Started(run, heading, done, steps):
                self.epochs = run.settings.train.epochs
                self.bar.start()
                self._print(heading)
                if done:
                    self._print(f"resuming from epoch {done // steps + 1}, step {done % steps} of {steps}")
            case Step():
                self._step(event)
            case Epoch(line, best) if line["accuracy"] is not None:
                width = len(str(self.epochs))
                self._print(
                    f"epoch {line['epoch']:>{width}}/{self.epochs}  loss {line['train_loss']:.3f}  "
                    f"accuracy {line['train_accuracy']:5.1f} %  {line['split']} {line['accuracy']:5.2f} %"
                    f"{' *' if best else '  '}  {line['images_per_second']:,.0f} images/s"
                )
            case Ended(run=run) if run is not None:
                self.bar.stop()
                if event.early:
                    self._print(f"{run.folder} is finished; remove the folder to train it again", always=True)
                self._print(last_line(event, run), always=True)

    def close(self) -> None:
        """Remove the progress bar."""
        self.bar.stop()

    def _step(self, event: Step) -> None:
        fields: dict[str, Any] = {
            "epoch": f"{event.epoch}/{self.epochs}", "loss": f"{event.loss:.3f}", "accuracy": f"{event.accuracy:.1f} %",
            "speed": f"{event.images_per_second:,.0f}",
        }  # fmt: skip
        if self.task is None:
            self.task = self.bar.add_task("", total=event.total, completed=event.done, **fields)
        self.bar.update(self.task, completed=event.done, **fields)

    def _print(self, text: str, always: bool = False) -> None:
        """Print a line of text, above the progress bar if there is one."""
        if always or not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def last_line(event: Ended, run: Run) -> str:
    """Describe in one line how a run has ended."""
    if event.status == "stopped":
        return f"stopped; run the same command to resume ({run.folder})"
    result = run.result or {}
    try:
        if run.status == "diverged":
            best = result["best_accuracy"]
            before = "" if best is None else f", best {result['split']} accuracy before: {best:.2f} %"
            return f"diverged: the loss was not finite after {counted(result['steps'], 'step')}{before}; {run.folder}"
        return (
            f"{result['split']} accuracy {result['accuracy']:.2f} % (best {result['best_accuracy']:.2f} % after epoch "
            f"{result['best_epoch']}), {result['images_per_second']:,.0f} images/s, {duration(result['seconds'])}; "
            f"{run.folder}"
        )
    except (KeyError, TypeError):  # another version has left fields out
        return f"{run.status}; {run.folder}"


class Sink(Protocol):
    """A log of one run besides its folder."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Log the values after a step."""

    def close(self, result: Mapping[str, Any]) -> None:
        """Log the result, and finish the log."""


class TensorBoard:
    """Writes to `tensorboard/` in the run folder."""

    def __init__(self, started: Started, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = started.done + 1 if started.done else None
        self.writer = SummaryWriter(str(_folder(started) / "tensorboard"), purge_step=again)
        self.writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()), 0)

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Log the values after a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, done)

    def close(self, result: Mapping[str, Any]) -> None:
        """Log the result, and finish the log."""
        self.writer.close()


class WandB:
    """Sends a run to Weights & Biases: a run of the project "ghostnoise" with the identity as its id.

    The environment variables of wandb apply: WANDB_PROJECT, WANDB_MODE=offline, …
    """

    def __init__(self, started: Started, settings: Mapping[str, Any]) -> None:
        import wandb

        run = started.run
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ghostnoise"), id=run.identity, name=run.name, group=run.recipe,
            config=dict(settings), dir=str(_folder(started)), resume="allow", reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self.run.define_metric("*", step_metric="step")

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Log the values after a step."""
        self.run.log({"step": done, **values})

    def close(self, result: Mapping[str, Any]) -> None:
        """Log the result, and finish the log."""
        self.run.summary.update(dict(result))
        self.run.finish()


SINKS: dict[str, Callable[[Started, Mapping[str, Any]], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Logs:
    """Passes the events of runs to their sinks. One that is missing or fails is left out with a warning."""

    def __init__(self, names: Iterable[str], every: int, warn: Callable[[str], object]) -> None:
        self.names, self.every, self.warn = list(names), every, warn
        self.open: dict[str, dict[str, Sink]] = {}

    def take(self, run: Run, event: Event) -> None:
        """Pass an event of a run on."""
        match event:
            case Started():
                self._close(run, {})  # of an earlier attempt
                settings = flat(event.run.tree) | {f"environment.{k}": v for k, v in event.run.environment.items()}
                made = {name: self._try(name, SINKS[name], event, settings) for name in self.names}
                self.open[run.identity] = {name: sink for name, sink in made.items() if sink is not None}
            case Step(done=done) if done % self.every == 0:
                values = {shown: getattr(event, name) for name, shown in LOGGED.items()}
                self._log(run, done, values)
            case Epoch(line):
                self._log(run, line["step"], {key: value for key, value in line.items() if key not in NOT_CURVES})
            case Ended():
                self._close(run, (event.run and event.run.result) or {})

    def close(self) -> None:
        """Finish the logs of runs that have not ended."""
        for sinks in self.open.values():
            for name, sink in sinks.items():
                self._try(name, sink.close, {})
        self.open = {}

    def _log(self, run: Run, done: int, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        sinks = self.open.get(run.identity, {})
        for name, sink in sinks.items():
            if name in self.names:
                self._try(name, sink.step, done, known)

    def _close(self, run: Run, result: Mapping[str, Any]) -> None:
        for name, sink in self.open.pop(run.identity, {}).items():
            self._try(name, sink.close, result)  # also one that has failed: it may hold files open

    def _try(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a part of a sink; if it fails, warn once for each sink."""
        try:
            return call(*arguments)
        except ImportError as error:
            reason = f"not installed ({error}); run {install_command(name)}, or leave it out"
        except Exception as error:  # whatever a sink raises, the run continues
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}; the run continues without it"
        if name in self.names:
            self.names.remove(name)
            self.warn(f"--log {name}: {reason}")
        return None


def _folder(started: Started) -> Path:
    assert started.run.folder is not None
    return started.run.folder

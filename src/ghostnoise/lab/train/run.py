"""One run, from a recipe to a folder with a result; the same call again goes on where it was left."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.recipe import Recipe
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.train import generators, machine, metering
from ghostnoise.lab.train.clock import Clock
from ghostnoise.lab.train.display import Display, Terminal
from ghostnoise.lab.train.loop import Ending, Loop, Sink
from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.session import Session
from ghostnoise.lab.train.sinks import TensorBoard
from ghostnoise.lab.train.stop import Stop, listening

Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What does not change what a run computes."""

    runs: Path = Path("runs")
    data: Path | None = None
    threads: int | None = None
    workers: int | None = None
    checkpoint_seconds: float = 60.0
    quiet: bool = False
    """Print the last line only."""
    tensorboard: bool = False
    thresholds: bool = True
    console: Console = field(default_factory=Console)
    errors: Console = field(default_factory=lambda: Console(stderr=True))
    display: Callable[["Options", int, int], Display] = lambda options, epochs, steps: Terminal(
        options.console, options.quiet, epochs, steps
    )
    """Makes what shows the progress of so many epochs of so many steps."""
    saved: Callable[[Path], object] = lambda folder: None
    """Is called with the run's folder after each checkpoint."""
    stop: Stop = field(default_factory=Stop)
    """Who holds it can ask the run to stop, as a signal does."""


@dataclass(frozen=True)
class Outcome:
    """A run's result, or None if `signal` stopped it, and where it is."""

    result: Record | None
    folder: Path
    signal: int = 0


def train(chosen: Recipe, options: Options) -> Outcome:
    """Run a recipe to its end, from its last checkpoint if it has one."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    raised = options.thresholds and machine.raise_thresholds()
    machine.be_deterministic(chosen.settings.train.deterministic)
    with machine.machine(chosen.settings.train.device) as here:
        return _train(chosen, options, here, raised)  # nothing of the run is left when the processes part


def _train(chosen: Recipe, options: Options, here: Machine, raised: bool) -> Outcome:
    with ExitStack() as stack:
        settings = _resolve(chosen.settings, options, here)
        folder = RunFolder(options.runs / chosen.name / recipe.identity(settings), _warning(options, here))
        result = here.tell(folder.result() if here.first else None)
        if result is not None:
            _say(options, here, f"{folder.path} is finished; remove the folder to run it again")
        else:
            stack.enter_context(listening(options.stop))
            stack.enter_context(_memory(settings))
            # Before the folder is made: what is wrong with the data or the network leaves nothing behind.
            source, session = _in_memory(settings, options, here)
            stack.callback(folder.release)
            content = here.tell(folder.own_and_read() if here.first else None)
            loop = _loop(chosen, session, source, folder, options, content, raised)
            with loop.display:
                ending = loop.run()
            if ending.status == "stopped":
                _say(options, here, f"stopped; the same command goes on from here ({folder.path})")
                return Outcome(None, folder.path, ending.signal)
            result = _result(chosen, loop, ending)
            if here.first:
                folder.finish(result)
        _say(options, here, summary(result, folder.path))
        return Outcome(result, folder.path)


def _resolve(settings: Settings, options: Options, here: Machine) -> Settings:
    """Fill in what only the machine knows."""
    absent = not data.present(settings.data, data.data_folder(options.data))  # those of a stand-in never are
    missing = settings.train.smoke and (absent or settings.data.stand_in)
    if settings.train.smoke and absent:
        _warning(options, here)(f"{settings.data.name} is not here: random images of its shape stand in")
    settings = recipe.resolve(settings, device=here.device.type, processes=here.world, stand_in=missing)
    recipe.check(settings, here.world)
    return settings


def _in_memory(settings: Settings, options: Options, here: Machine) -> tuple[data.Source, Session]:
    """The data, and the network at its start."""
    source = data.open_source(
        settings.data, data.data_folder(options.data), batch_size=settings.train.batch_size, seed=settings.seed,
        device=here.device, channels_last=settings.train.channels_last, rank=here.rank, world=here.world,
        workers=options.workers,
    )  # fmt: skip
    generators.seed(settings.seed)
    model = models.build(settings.model, settings.norm, source.facts.shape, source.facts.classes)
    session = Session(model, settings, here)
    if settings.meter is not None:
        metering.measure(session, source, 0, batches=1)  # refuses now what it would after the first epoch
    if here.rank:
        generators.seed((settings.seed + here.rank * 0x9E3779B97F4A7C15) % 2**63)  # noise of its own
    return source, session


def _loop(
    chosen: Recipe, session: Session, source: data.Source, folder: RunFolder, options: Options, content: bytes | None,
    raised: bool,
) -> Loop:  # fmt: skip
    """The loop, from where the checkpoint in `content` was saved, or from the start."""
    settings, here = session.settings, session.here
    if content is not None:
        session.restore(checkpoints.read(content))
    progress, steps = session.progress, source.steps
    display = options.display(options, settings.train.epochs, steps) if here.first else Display()
    sinks: list[Sink] = []
    if here.first:
        told = {"recipe": chosen.name, "identity": folder.path.name}
        folder.begin(told | settings.model_dump(exclude_none=True), machine.environment(here, raised))
        folder.cut_back(progress.history)
        if options.tensorboard:
            sinks.append(TensorBoard(folder.path, progress.epoch * steps + progress.step))
    display.say(_heading(chosen, session, source.facts))
    if content is not None:
        display.say(f"goes on from epoch {progress.epoch + 1}, step {progress.step} of {steps}")
    clock = Clock(here, options.stop, options.checkpoint_seconds)
    return Loop(session, source, folder, clock, display, sinks, options.saved)


def _heading(chosen: Recipe, session: Session, facts: data.Facts) -> str:
    settings, here, norm = session.settings, session.here, session.settings.norm
    method = norm.method.upper() + (f"-{norm.ghost_size}" if norm.ghost_size else "")
    place = here.device.type if here.device.type != "cpu" else f"cpu, threads: {torch.get_num_threads()}"
    together = f" in {here.world} processes" if here.world > 1 else ""
    return (
        f"{chosen.name} {recipe.identity(settings)}: {settings.model.name} ({session.parameters:,} parameters), "
        f"{method}, {facts.train_size:,} images of {settings.data.name} in batches of {settings.train.batch_size}, "
        f"seed {settings.seed}, {place}{together}"
    )


def _result(chosen: Recipe, loop: Loop, ending: Ending) -> Record:
    session, progress = loop.session, loop.session.progress
    last = progress.history[-1]
    best = progress.best or {"accuracy": None, "epoch": None}
    return {
        "status": ending.status,
        "recipe": chosen.name,
        "identity": loop.folder.path.name,
        "split": last["split"],
        "epochs": progress.epoch,
        "steps": last["step"],
        **{name: last[name] for name in ("train_loss", "train_accuracy", "loss", "accuracy")},
        "best_accuracy": best["accuracy"],
        "best_epoch": best["epoch"],
        "parameters": session.parameters,
        "weights_sha256": session.weights_sha256(),
        "images_per_second": round(progress.images / max(progress.training_seconds, 1e-9), 1),
        "seconds": round(progress.seconds, 3),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def summary(result: Record, folder: Path) -> str:
    """A finished run in a line."""
    if result["status"] == "diverged":
        best = result["best_accuracy"]
        before = "" if best is None else f", best {result['split']} accuracy before {best:.2f} %"
        return f"diverged: the loss was not finite after {result['steps']} steps{before}; {folder}"
    return (
        f"{result['split']} accuracy {result['accuracy']:.2f} % (best {result['best_accuracy']:.2f} % after epoch "
        f"{result['best_epoch']}), {result['images_per_second']:,.0f} images/s, {result['seconds']:.1f} s; {folder}"
    )


@contextmanager
def _memory(settings: Settings) -> Iterator[None]:
    """Turn running out of memory into a line that suggests a batch size."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
        if not out:
            raise
        size = settings.train.batch_size
        raise UserError(
            f"out of memory on {settings.train.device} with batches of {size}; try "
            f"train.batch_size={max(1, size // 2)} (the learning rate belongs to the batch size), or train.amp=bf16"
        ) from error


def _warning(options: Options, here: Machine) -> Any:
    def warn(text: str) -> None:
        if here.first:
            options.errors.print(f"warning: {text}", highlight=False, soft_wrap=True, markup=False)

    return warn


def _say(options: Options, here: Machine, text: str) -> None:
    """Also if quiet: it is the last line."""
    if here.first:
        options.console.print(text, highlight=False, soft_wrap=True, markup=False)

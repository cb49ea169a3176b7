"""Train one run, from a recipe to a folder with a result; the same call resumes an interrupted run."""

import warnings
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
from ghostnoise.lab.store.contents import one_line
from ghostnoise.lab.train import machine, metering
from ghostnoise.lab.train.display import Display, Sink, TensorBoard, Terminal
from ghostnoise.lab.train.loop import Ending, Loop
from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.session import Session, seed_generators
from ghostnoise.lab.train.stop import Clock, Stop, handle_signals
from ghostnoise.terminal import LiteralConsole
from ghostnoise.text import counted, duration

Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options that do not affect the results of a run."""

    runs: Path = Path("runs")
    data: Path | None = None
    threads: int | None = None
    workers: int | None = None
    checkpoint_seconds: float = 60.0
    quiet: bool = False
    """Print only the last line."""
    tensorboard: bool = False
    thresholds: bool = True
    """Raise the thresholds of malloc (`machine.raise_malloc_thresholds`)."""
    console: Console = field(default_factory=LiteralConsole)
    errors: Console = field(default_factory=lambda: LiteralConsole(stderr=True))
    display: Callable[["Options", int, int], Display] = lambda options, epochs, steps: Terminal(
        options.console, options.quiet, epochs, steps
    )
    """Creates the display, from the options, the number of epochs and the number of steps per epoch."""
    saved: Callable[[Path], object] = lambda folder: None
    """Called with the run folder after each checkpoint."""
    stop: Stop = field(default_factory=Stop)
    """Lets the caller stop the run, as a signal does."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run, or None if `signal` stopped it, and its folder."""

    result: Record | None
    folder: Path
    signal: int = 0


def train(chosen: Recipe, options: Options) -> Outcome:
    """Train a recipe to its end, resuming from the last checkpoint if there is one."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    raised = options.thresholds and machine.raise_malloc_thresholds()
    machine.set_deterministic(chosen.settings.train.deterministic)
    with machine.machine(chosen.settings.train.device) as here, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*with a single ghost batch it is plain batch norm"
        )  # the recipe warns of it
        # In a function of its own, since nothing may refer to the process group when it ends.
        return _train(chosen, options, here, raised)


def _train(chosen: Recipe, options: Options, here: Machine, raised: bool) -> Outcome:
    with ExitStack() as stack:
        settings = _resolve(chosen.settings, options, here)
        folder = RunFolder(options.runs / chosen.name / recipe.identity(settings), _warning(options, here))
        result = here.broadcast(folder.result() if here.first else None)
        if result is not None:
            _print(options, here, f"{folder.path} is finished; remove the folder to train it again")
        else:
            stack.enter_context(handle_signals(options.stop))
            stack.enter_context(_out_of_memory(settings))
            # Before the folder is created, so that errors in the data or the network leave nothing behind.
            source, session = _open(settings, options, here)
            stack.callback(folder.release)
            resumed = _resume(session, source, folder)
            if resumed is None:  # a checkpoint was restored in part, and there is no other one
                source, session = _open(settings, options, here)
            loop = _loop(chosen, session, source, folder, options, bool(resumed), raised)
            with loop.display:
                ending = loop.run()
            if ending.status == "stopped":
                _print(options, here, f"stopped; run the same command to resume ({folder.path})")
                return Outcome(None, folder.path, ending.signal)
            result = _result(chosen, loop, ending)
            if here.first:
                folder.finish(result)
        _print(options, here, summary(result, folder.path))
        return Outcome(result, folder.path)


def _resolve(settings: Settings, options: Options, here: Machine) -> Settings:
    """Fill in the settings that depend on the machine."""
    folder = data.data_folder(options.data)
    absent = not data.present(settings.data, folder)  # False if `stand_in` is already set
    random = settings.train.smoke and (absent or settings.data.stand_in)
    if settings.train.smoke and absent:
        _warning(options, here)(
            f"{settings.data.name} not found in {folder}: using random images of its shape (results are meaningless)"
        )
    settings = recipe.resolve(settings, device=here.device.type, processes=here.world, stand_in=random)
    recipe.check(settings, here.world)
    return settings


def _open(settings: Settings, options: Options, here: Machine) -> tuple[data.Source, Session]:
    """Open the data, and build the network with its initial weights."""
    source = data.open_source(
        settings.data, data.data_folder(options.data), batch_size=settings.train.batch_size, seed=settings.seed,
        device=here.device, channels_last=settings.train.channels_last, rank=here.rank, world=here.world,
        workers=options.workers,
    )  # fmt: skip
    seed_generators(settings.seed)
    model = models.build(settings.model, settings.norm, source.info.shape, source.info.classes)
    session = Session(model, settings, here)
    if settings.meter is not None:
        metering.measure(session, source, 0, batches=1)  # raises now rather than after the first epoch
    if here.rank:
        seed_generators((settings.seed + here.rank * 0x9E3779B97F4A7C15) % 2**63)  # independent noise per rank
    return source, session


def _resume(session: Session, source: data.Source, folder: RunFolder) -> bool | None:
    """Restore the last checkpoint that all processes can restore; the first process sets others aside.

    Returns whether there was one, or None if there was none and the session must be made again.
    """
    here = session.here
    found, clean = folder.own_and_read() if here.first else None, True
    while (content := here.broadcast(found.content if found else None)) is not None:
        reason = _restore(session, source, found.state if found else checkpoints.read(content))
        if not (reason := here.broadcast(next(filter(None, here.gather(reason)), ""))):
            return True
        clean = False
        if found is not None:
            folder.reject(found, reason)
            found = folder.latest()
    return False if clean else None


def _restore(session: Session, source: data.Source, state: Record) -> str:
    """Restore the state of a checkpoint; return the reason if it is not possible, or else an empty text."""
    try:
        if state["step"] > source.steps:
            raise ValueError(f"step {state['step']}: an epoch has {source.steps}")
        session.restore(state)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a state of another network can raise anything
        return one_line(error)
    return ""


def _loop(
    chosen: Recipe, session: Session, source: data.Source, folder: RunFolder, options: Options, resumed: bool,
    raised: bool,
) -> Loop:  # fmt: skip
    """Create the loop, which continues from the state of the session."""
    settings, here = session.settings, session.here
    progress, steps = session.progress, source.steps
    display = options.display(options, settings.train.epochs, steps) if here.first else Display()
    sinks: list[Sink] = []
    if here.first:
        header = {"recipe": chosen.name, "identity": folder.path.name}
        environment = machine.environment(here, raised, settings.norm.method)
        folder.begin(header | settings.model_dump(exclude_none=True), environment)
        folder.cut_back(progress.history)
        if options.tensorboard:
            sinks.append(TensorBoard(folder.path, progress.epoch * steps + progress.step))
    display.message(_heading(chosen, session, source.info))
    if resumed:
        display.message(f"resuming from epoch {progress.epoch + 1}, step {progress.step} of {steps}")
    clock = Clock(here, options.stop, options.checkpoint_seconds)
    return Loop(session, source, folder, clock, display, sinks, options.saved)


def _heading(chosen: Recipe, session: Session, info: data.DatasetInfo) -> str:
    settings, here, norm = session.settings, session.here, session.settings.norm
    method = norm.method.upper() + (f"-{norm.ghost_size}" if norm.ghost_size else "")
    device = here.device.type if here.device.type != "cpu" else f"cpu ({counted(torch.get_num_threads(), 'thread')})"
    processes = f", {here.world} processes" if here.world > 1 else ""
    return (
        f"{chosen.name} {recipe.identity(settings)}: {settings.model.name} ({session.parameters:,} parameters), "
        f"{method}, {info.train_size:,} images of {settings.data.name} in batches of {settings.train.batch_size}, "
        f"seed {settings.seed}, {device}{processes}"
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
    """Describe a finished run in one line."""
    try:
        return _summary(result, folder)
    except (KeyError, TypeError):  # another version has left fields out
        return f"{result['status']}; {folder}"


def _summary(result: Record, folder: Path) -> str:
    if result["status"] == "diverged":
        best = result["best_accuracy"]
        before = "" if best is None else f", best {result['split']} accuracy before: {best:.2f} %"
        return f"diverged: the loss was not finite after {counted(result['steps'], 'step')}{before}; {folder}"
    return (
        f"{result['split']} accuracy {result['accuracy']:.2f} % (best {result['best_accuracy']:.2f} % after epoch "
        f"{result['best_epoch']}), {result['images_per_second']:,.0f} images/s, {duration(result['seconds'])}; {folder}"
    )


@contextmanager
def _out_of_memory(settings: Settings) -> Iterator[None]:
    """Turn an out-of-memory error into a UserError that suggests a smaller batch size."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
        if not out:
            raise
        size = settings.train.batch_size
        raise UserError(
            f"train.batch_size={size}: out of memory on {settings.train.device}; try "
            f"train.batch_size={max(1, size // 2)} with a lower learning rate, or train.amp=bf16"
        ) from error


def _warning(options: Options, here: Machine) -> Any:
    def warn(text: str) -> None:
        if here.first:
            options.errors.print(f"warning: {text}", highlight=False, soft_wrap=True, markup=False)

    return warn


def _print(options: Options, here: Machine, text: str) -> None:
    """Print a last line, which is not suppressed by `quiet`."""
    if here.first:
        options.console.print(text, highlight=False, soft_wrap=True, markup=False)

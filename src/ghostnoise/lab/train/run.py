"""Train a run as a stream of events, from its settings to a folder with a result; the same call resumes it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Ended, Event, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import checkpoints, record
from ghostnoise.lab.store.folder import RunFolder
from ghostnoise.lab.train import machine, metering
from ghostnoise.lab.train.loop import Loop
from ghostnoise.lab.train.machine import Clock, Machine, Stop, handle_signals
from ghostnoise.lab.train.session import Session, seed_generators
from ghostnoise.text import counted

Keep = Literal["weights", "best", "checkpoints"]
KEEP: tuple[Keep, ...] = ("weights", "best", "checkpoints")


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True)
class Options:
    """Options that do not affect the results of a run."""

    runs: Path = Path("runs")
    data: Path | None = None
    threads: int | None = None
    workers: int | None = None
    checkpoint_seconds: float = 60.0
    keep: Keep = "weights"
    """What is left of the checkpoints at the end: the final weights, also those with the best accuracy, or also the
    last two checkpoints."""
    step_seconds: float = 0.25
    """Seconds between two events of steps; reading the loss waits for the GPU."""
    log_steps: int = 0
    """Steps between two events with the norm of the gradient and the memory; 0 for none."""
    init: Path | None = None
    """File with the initial weights, a state_dict, whose checksum is `model.init`."""
    thresholds: bool = True
    """Raise the thresholds of malloc (`machine.raise_malloc_thresholds`)."""
    warn: Callable[[str], object] = _ignore
    stop: Stop = field(default_factory=Stop)
    """Lets the caller stop the run, as a signal does."""


def train(run: Run, options: Options) -> Iterator[Event]:
    """Train a run to its end, resuming from the last checkpoint if there is one.

    The run is locked, and its settings and environment are written, before the first event; the last one is `Ended`.
    Of several processes that torchrun has started, only the first one yields other events. Closing the iterator
    releases the run.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    raised = options.thresholds and machine.raise_malloc_thresholds()
    machine.set_deterministic(run.settings.train.deterministic)
    with machine.machine(run.settings.train.device) as here, warnings.catch_warnings():
        # The recipe warns of it.
        warnings.filterwarnings("ignore", ".*with a single ghost batch it is plain batch norm")
        # In a function of its own, since nothing may refer to the process group when it ends.
        yield from _train(run, options, here, raised)


def _train(run: Run, options: Options, here: Machine, raised: bool) -> Iterator[Event]:
    warn = options.warn if here.first else _ignore
    settings = _resolve(run.settings, options, here, warn)
    run = replace(run, given=settings, identity=recipe.identity(settings))
    folder = RunFolder(options.runs / run.recipe / run.identity, warn)
    before: Run | None = here.broadcast(folder.ended() if here.first else None)
    if before is not None:
        if here.first and folder.untidy():
            folder.own()
            folder.tidy(options.keep == "checkpoints")
            folder.release()
        yield Ended(before.status, run.filled(before), early=True)  # type: ignore[arg-type]
        return
    with ExitStack() as stack:
        stack.enter_context(handle_signals(options.stop))
        stack.enter_context(_out_of_memory(settings))
        # Before the folder is created, so that errors in the data or the network leave nothing behind.
        source, session = _open(settings, options, here)
        stack.callback(folder.release)
        resumed = _resume(session, source, folder)
        if resumed is None:  # a checkpoint was restored in part, and there is no other one
            source, session = _open(settings, options, here)
        progress = session.progress
        progress.environments.append(machine.environment(here, raised, settings.norm.method))
        loop = Loop(
            session, source, folder, Clock(here, options.stop, options.checkpoint_seconds),
            step_seconds=options.step_seconds, log_steps=options.log_steps, keep_best=options.keep == "best",
        )  # fmt: skip
        run = replace(run, folder=folder.path, status="running", environments=progress.environments)
        if here.first:
            folder.begin(run.tree, progress.environments, progress.history)
            yield Started(run, _heading(run, session, source.info), loop.done, source.steps)
        for event in loop.run():
            if here.first:
                yield event
        if loop.status == "stopped":
            yield Ended("stopped", replace(run, status="interrupted"), loop.signal)
            return
        result, curve = loop.result(), record.curve_of(progress.history)
        run = replace(run, status=result["status"], result=result, curve=curve)
        state = session.state()
        if here.first:
            run = folder.finish(run, state, loop.done, options.keep == "checkpoints")
        yield Ended(run.status, run)  # type: ignore[arg-type]


def _resolve(settings: Settings, options: Options, here: Machine, warn: Callable[[str], object]) -> Settings:
    """Fill in the settings that depend on the machine."""
    folder = data.data_folder(options.data)
    absent = not data.present(settings.data, folder)  # False if `stand_in` is already set
    random = settings.train.smoke and (absent or settings.data.stand_in)
    if settings.train.smoke and absent:
        warn(f"{settings.data.name} not found in {folder}: using random images of its shape (results are meaningless)")
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
    if settings.model.init is not None:
        _initialize(model, settings.model.init, options.init)
    session = Session(model, settings, here)
    if settings.meter is not None:
        metering.measure(session, source, 0, batches=1)  # raises now rather than after the first epoch
    if here.rank:
        seed_generators((settings.seed + here.rank * 0x9E3779B97F4A7C15) % 2**63)  # independent noise per rank
    return source, session


def _initialize(model: nn.Module, expected: str, path: Path | None) -> None:
    """Load the weights whose checksum is a setting of the run."""
    if path is None:
        raise UserError(f"model.init={expected[:12]}…: the run starts from other weights; give them with --init-from")
    weights = checkpoints.read_weights(path)
    if (found := checkpoints.weights_sha256(weights)) != expected:
        raise UserError(f"--init-from {path}: its weights have the checksum {found[:12]}…, not {expected[:12]}…")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"--init-from {path}: {record.one_line(error)} Give weights of the same network") from None


def _resume(session: Session, source: data.Source, folder: RunFolder) -> bool | None:
    """Restore the last checkpoint that all processes can restore; the first process sets others aside.

    Returns whether there was one, or None if there was none and the session must be made again.
    """
    here = session.here
    found, clean = folder.start() if here.first else None, True
    while (content := here.broadcast(found.content if found else None)) is not None:
        reason = _restore(session, source, found.state if found else checkpoints.read(content))
        if not (reason := here.broadcast(next(filter(None, here.gather(reason)), ""))):
            return True
        clean = False
        if found is not None:
            checkpoints.reject(found.path, reason, folder.warn, rename=True)
            found = checkpoints.latest(found.path.parent, folder.warn)
    return False if clean else None


def _restore(session: Session, source: data.Source, state: dict[str, Any]) -> str:
    """Restore the state of a checkpoint; return the reason if it is not possible, or else an empty text."""
    try:
        if state["step"] > source.steps:
            raise ValueError(f"step {state['step']}: an epoch has {source.steps}")
        session.restore(state)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a state of another network can raise anything
        return record.one_line(error)
    return ""


def _heading(run: Run, session: Session, info: data.DatasetInfo) -> str:
    settings, here, norm = session.settings, session.here, session.settings.norm
    method = norm.method.upper() + (f"-{norm.ghost_size}" if norm.ghost_size else "")
    device = here.device.type if here.device.type != "cpu" else f"cpu ({counted(torch.get_num_threads(), 'thread')})"
    processes = f", {here.world} processes" if here.world > 1 else ""
    return (
        f"{run.recipe} {run.identity}: {settings.model.name} ({session.parameters:,} parameters), {method}, "
        f"{info.train_size:,} images of {settings.data.name} in batches of {settings.train.batch_size}, seed "
        f"{settings.seed}, {device}{processes}"
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

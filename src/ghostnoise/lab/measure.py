"""What `ghostnoise meter` and `ghostnoise advise` measure: a network, and batches for it.

They come from a run folder, from a recipe, or from functions of the user that are named as `module:function`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.schema import DataSettings, Settings
from ghostnoise.lab.data import catalog
from ghostnoise.lab.errors import UserError, import_failure
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import RUN, SETTINGS, read
from ghostnoise.lab.store.record import one_line
from ghostnoise.lab.train import machine, metering
from ghostnoise.lab.train.session import seed_generators
from ghostnoise.text import printable

NAMES = list(catalog.CATALOG)
BATCH_SIZE, BATCHES = 256, 8


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves the choice to the target. `warn` is called with each warning."""

    target: str
    overrides: tuple[str, ...] = ()
    data: str | None = None
    runs: Path = Path("runs")
    data_folder: Path | None = None
    device: str = "auto"
    ghost_size: int | None = None
    batches: int | None = None
    batch_size: int | None = None
    smoke: bool = False
    variant: str | None = None
    warn: Callable[[str], object] = lambda text: print(f"warning: {printable(text)}", file=sys.stderr)


@dataclass(frozen=True)
class Target:
    """A network, batches for it, and a description; `folder` is that of the run, if it is a run.

    `when` names the state of the weights: for example "at initialization" or "after epoch 3".
    """

    name: str
    about: str
    when: str
    model: nn.Module
    batches: Iterable[Any]
    ghost_size: int
    folder: Path | None = None

    def feed(self) -> Iterator[None]:
        """Run the network on each batch: a tensor, the first element of a sequence, or keyword arguments."""
        device = next((each.device for each in (*self.model.parameters(), *self.model.buffers())), None)
        for batch in self.batches:
            given = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
            try:
                if isinstance(given, dict):
                    self.model(**{key: _moved(value, device) for key, value in given.items()})
                else:
                    self.model(_moved(given, device))
            except (RuntimeError, TypeError) as error:
                shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
                raise UserError(
                    f"{self.name} cannot process a batch ({shape}): {_first_line(error)}; give data that fit the "
                    "network"
                ) from error
            yield


def find(request: Request) -> Target:
    """Return the target that a name refers to: a run folder, `module:function`, or a recipe."""
    if request.variant and (_is_folder(request.target) or _is_function(request.target)):
        raise UserError(f"--variant {request.variant} for {request.target}: only recipes have variants; leave it out")
    if _is_folder(request.target):
        return from_folder(Path(request.target), request)
    if _is_function(request.target):
        return from_function(request)
    name, resolved, folder = _from_recipe(request)
    if checkpoints.any_saved(folder / "checkpoints"):
        return from_folder(folder, replace(request, overrides=()))
    about = f"{name}, not trained ({folder} has no checkpoint): the network at initialization"
    return _target(name, (about, "at initialization"), *_build(resolved, request), resolved, request)


def run_folder(request: Request) -> Path | None:
    """Return the folder of the run that a name refers to, or None if it is not a run, or has not started."""
    if _is_folder(request.target):
        return Path(request.target)
    folder = None if _is_function(request.target) else _from_recipe(request)[2]
    return folder if folder is not None and folder.is_dir() else None


def from_folder(folder: Path, request: Request, epoch: int | None = None) -> Target:
    """Return a run at its last checkpoint that can be read, or at the checkpoint after `epoch` epochs."""
    if request.overrides:
        raise UserError(
            f"{' '.join(request.overrides)} for the run folder {folder}: its settings cannot change; leave it out"
        )
    settings = settings_of(folder)
    if not checkpoints.any_saved(folder / "checkpoints"):
        raise UserError(f"{folder} has no checkpoint; run `ghostnoise train` first, or give another folder")
    model, source = _build(settings, request)
    known = []
    for found in checkpoints.readable(folder / "checkpoints", request.warn, rename=False, kinds=("final", "step")):
        state = found.state
        if epoch is not None and (state["epoch"], state["step"]) != (epoch, 0):
            known.append(_where(state))
            continue
        try:
            model.load_state_dict(checkpoints.evaluated(state))
        except Exception as error:  # a state of another network can raise anything
            checkpoints.reject(found.path, one_line(error), request.warn, rename=False)
            continue
        where = f"epoch {_where(state, ', step {}')}"
        about = f"{folder}, {where} ({found.path.name})", f"after {where}"
        at = max(state["epoch"] - (not state["step"]), 0)
        return _target(folder.parent.name, about, model, source, settings, request, at, folder)
    if not known:
        raise UserError(
            f"{folder} has no checkpoint that can be read; run `ghostnoise train` again, or give another folder"
        )
    raise UserError(
        f"epoch {epoch} of {folder}: has neither a checkpoint nor recorded noise; checkpoints exist for epochs "
        f"{' and '.join(dict.fromkeys(known))}; train with meter.every to record the noise during training"
    )


def from_function(request: Request) -> Target:
    """Return the network that a function of the user makes, with a data set by name or from another function."""
    if request.overrides:
        raise UserError(
            f"{' '.join(request.overrides)} for {request.target}: only recipes have settings; leave them out"
        )
    if request.data is None:
        raise UserError(
            f"{request.target} without --data: give a name that `ghostnoise data list` shows, or module:function"
        )
    model = call(request.target)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{request.target} returned a {type(model).__name__}: must be a torch.nn.Module; return the network"
        )
    device = machine.select_device(request.device)
    count = request.batches or BATCHES
    if ":" in request.data:
        made = call(request.data)
        if not isinstance(made, Iterable):
            raise UserError(
                f"{request.data} returned a {type(made).__name__}: must be an iterable of batches; return for "
                "example a DataLoader"
            )
        batches: Iterable[Any] = islice(made, count)
    else:
        if request.data not in NAMES:
            raise UserError(f"--data {request.data}: must be one of {', '.join(NAMES)}, or module:function")
        settings = DataSettings.model_validate({"name": request.data})
        batches = islice(_source(settings, request, request.batch_size or BATCH_SIZE, 0, device).batches(0), count)
    about, when = f"{request.target} on {request.data}", f"as {request.target} returns it"
    return Target(request.target, about, when, model.to(device), batches, request.ghost_size or metering.GHOST_SIZE)


def settings_of(folder: Path) -> Settings:
    """Read the settings of a run folder."""
    try:
        return read(folder).settings
    except ValueError:
        raise UserError(
            f"{folder} is not a run folder: its settings are missing or invalid; give one that `ghostnoise runs` lists"
        ) from None


def call(name: str) -> Any:
    """Import `module:function`, also from the current folder, and call the function without arguments."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(module)
    except Exception as error:  # importing runs code of the user, which can raise anything
        why = import_failure(error, "run this from the folder that contains it, or set PYTHONPATH")
        why = why.replace("(", f"({type(error).__name__}: ", 1)
        raise UserError(f"{name}: {module!r} cannot be imported {why}") from error
    for part in function.split("."):
        if not hasattr(made, part):
            raise UserError(f"{name}: {module!r} has no {function!r}; give the name of a function in it")
        made = getattr(made, part)
    if not callable(made):
        raise UserError(f"{name} has type {type(made).__name__}: must be a function; give one that returns it")
    try:
        return made()
    except Exception as error:
        raise UserError(
            f"{name}() raised {type(error).__name__}: {_first_line(error)}; it must run without arguments"
        ) from error


def _is_folder(target: str) -> bool:
    """Return whether `target` is a run folder, or a folder that does not have the name of a recipe."""
    path = Path(target)
    return path.is_dir() and (any((path / name).exists() for name in (RUN, SETTINGS)) or target not in recipe.names())


def _is_function(target: str) -> bool:
    module, colon, _ = target.partition(":")
    return bool(colon) and not module.endswith(recipe.SUFFIX) and "/" not in module


def _from_recipe(request: Request) -> tuple[str, Settings, Path]:
    """Return the name of a recipe, its settings on this machine, and the folder of its run."""
    chosen = recipe.load(request.target, request.overrides, smoke=request.smoke, variant=request.variant)
    device = machine.select_device(request.device if request.device != "auto" else chosen.settings.train.device)
    resolved = recipe.resolve(chosen.settings, device=device.type, processes=1)
    return chosen.name, resolved, request.runs / chosen.name / recipe.identity(resolved)


def _build(settings: Settings, request: Request) -> tuple[nn.Module, data.Source]:
    """Build the network of a run at initialization, and open its data."""
    device = machine.select_device(request.device if request.device != "auto" else settings.train.device)
    size = request.batch_size or settings.train.batch_size // (settings.train.accumulation_steps or 1)
    source = _source(settings.data, request, size, settings.seed, device)
    seed_generators(settings.seed)
    return models.build(settings.model, settings.norm, source.info.shape, source.info.classes).to(device), source


def _target(
    name: str, about: tuple[str, str], model: nn.Module, source: data.Source, settings: Settings, request: Request,
    epoch: int = 0, folder: Path | None = None,
) -> Target:  # fmt: skip
    """Return what to measure; `about` has a description of the network and the state of its weights."""
    count = request.batches or (settings.meter.batches if settings.meter else BATCHES)
    ghost_size = request.ghost_size or metering.ghost_size(settings)
    return Target(name, *about, model, islice(source.batches(epoch), count), ghost_size, folder)


def _source(settings: DataSettings, request: Request, batch_size: int, seed: int, device: torch.device) -> data.Source:
    return data.open_source(
        settings, data.data_folder(request.data_folder), batch_size=batch_size, seed=seed, device=device
    )


def _where(state: Mapping[str, Any], step: str = " and {} steps") -> str:
    """Describe after which epoch and step a checkpoint was saved."""
    return f"{state['epoch']}" + (step.format(state["step"]) if state["step"] else "")


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]

"""What is measured: a network and batches for it, from a run folder, a recipe, or a function of the user's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.schema import DataSettings, Settings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measuring.imported import imported
from ghostnoise.lab.store import checkpoints, scan
from ghostnoise.lab.train import generators, machine, metering

NAMES = [name for name in get_args(DataSettings.model_fields["name"].annotation) if name != "imagefolder"]
BATCH_SIZE, BATCHES = 256, 8


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; None is what the target has itself."""

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


@dataclass(frozen=True)
class Target:
    """A network, batches for it, and what they are called."""

    name: str
    about: str
    model: nn.Module
    batches: Iterable[Any]
    ghost_size: int
    folder: Path | None = None
    """Of the run, if it is one."""

    def feed(self) -> Iterator[None]:
        """Run the network on each batch: on a tensor, on the first of several, or on a mapping's names."""
        device = next((each.device for each in (*self.model.parameters(), *self.model.buffers())), None)
        for batch in self.batches:
            given = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
            try:
                if isinstance(given, dict):
                    self.model(**{key: _on(value, device) for key, value in given.items()})
                else:
                    self.model(_on(given, device))
            except (RuntimeError, TypeError) as error:
                shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
                raise UserError(
                    f"{self.name} refused a batch ({shape}): {str(error).splitlines()[0]}; give data that fit the "
                    "network"
                ) from error
            yield


def find(wanted: Wanted) -> Target:
    """The target that a name means: a folder, `module:function`, or a recipe."""
    if _is_folder(wanted.target):
        return of_folder(Path(wanted.target), wanted)
    if _is_function(wanted.target):
        return of_function(wanted)
    name, resolved, folder = _of_recipe(wanted)
    if checkpoints.saved(folder / "checkpoints"):
        return of_folder(folder, replace(wanted, overrides=()))
    about = f"{name}, not trained ({folder} has no checkpoint): the network at its start"
    return _built(name, about, resolved, wanted, None)


def run_folder(wanted: Wanted) -> Path | None:
    """The folder of the run that is meant, if it is one that has begun."""
    if _is_folder(wanted.target):
        return Path(wanted.target)
    folder = None if _is_function(wanted.target) else _of_recipe(wanted)[2]
    return folder if folder is not None and folder.is_dir() else None


def _is_folder(target: str) -> bool:
    """A run folder, or a folder whose name is no recipe's."""
    path = Path(target)
    return path.is_dir() and ((path / "settings.json").exists() or target not in recipe.names())


def _is_function(target: str) -> bool:
    module, colon, _ = target.partition(":")
    return bool(colon) and not module.endswith(recipe.SUFFIX) and "/" not in module


def _of_recipe(wanted: Wanted) -> tuple[str, Settings, Path]:
    """A recipe's name, its settings here, and where its run is, or would be."""
    chosen = recipe.load(wanted.target, wanted.overrides, smoke=wanted.smoke)
    device = machine.choose(wanted.device if wanted.device != "auto" else chosen.settings.train.device)
    resolved = recipe.resolve(chosen.settings, device=device.type, processes=1)
    return chosen.name, resolved, wanted.runs / chosen.name / recipe.identity(resolved)


def of_folder(folder: Path, wanted: Wanted, epoch: int | None = None) -> Target:
    """A run at its last checkpoint, or at the one after `epoch` epochs."""
    if wanted.overrides:
        raise UserError(
            f"{' '.join(wanted.overrides)} for the run folder {folder}: its settings are fixed; leave it out"
        )
    settings = settings_of(folder)
    state, path = _checkpoint(folder, epoch)
    where = f"epoch {state['epoch']}" + (f", step {state['step']}" if state["step"] else "")
    return _built(folder.parent.name, f"{folder}, {where} ({path.name})", settings, wanted, state, folder)


def of_function(wanted: Wanted) -> Target:
    """The network that a function of the user's makes, with a data set by name or by a function."""
    if wanted.overrides:
        raise UserError(f"{' '.join(wanted.overrides)} for {wanted.target}: settings are for recipes; leave them out")
    if wanted.data is None:
        raise UserError(f"{wanted.target} without --data: give a set of `ghostnoise data list`, or module:function")
    model = imported(wanted.target)
    if not isinstance(model, nn.Module):
        raise UserError(f"{wanted.target} made a {type(model).__name__}: must be a torch.nn.Module; return the network")
    device = machine.choose(wanted.device)
    count = wanted.batches or BATCHES
    if ":" in wanted.data:
        made = imported(wanted.data)
        if not isinstance(made, Iterable):
            raise UserError(f"{wanted.data} made a {type(made).__name__}: must give batches; return a DataLoader, say")
        batches: Iterable[Any] = islice(made, count)
    else:
        if wanted.data not in NAMES:
            raise UserError(f"--data {wanted.data}: must be one of {', '.join(NAMES)}, or module:function")
        settings = DataSettings.model_validate({"name": wanted.data})
        batches = islice(_source(settings, wanted, wanted.batch_size or BATCH_SIZE, 0, device).batches(0), count)
    about = f"{wanted.target} on {wanted.data}"
    return Target(wanted.target, about, model.to(device), batches, wanted.ghost_size or metering.GHOST_SIZE)


def settings_of(folder: Path) -> Settings:
    """The settings of a run folder."""
    try:
        return recipe.stored(scan.look(folder, lambda line: None).settings)
    except ValueError:
        raise UserError(
            f"{folder} is no run folder: its settings.json is missing, or not that of a run; give one of "
            "`ghostnoise runs`"
        ) from None


def _built(
    name: str, about: str, settings: Settings, wanted: Wanted, state: dict[str, Any] | None, folder: Path | None = None
) -> Target:
    device = machine.choose(wanted.device if wanted.device != "auto" else settings.train.device)
    size = wanted.batch_size or settings.train.batch_size
    source = _source(settings.data, wanted, size, settings.seed, device)
    generators.seed(settings.seed)
    model = models.build(settings.model, settings.norm, source.facts.shape, source.facts.classes).to(device)
    if state is not None:
        model.load_state_dict(state["model"])
    epoch = 0 if state is None else max(state["epoch"] - (not state["step"]), 0)
    count = wanted.batches or (settings.meter.batches if settings.meter else BATCHES)
    ghost_size = wanted.ghost_size or metering.ghost_size(settings)
    return Target(name, about, model, islice(source.batches(epoch), count), ghost_size, folder)


def _source(settings: DataSettings, wanted: Wanted, batch_size: int, seed: int, device: torch.device) -> data.Source:
    return data.open_source(
        settings, data.data_folder(wanted.data_folder), batch_size=batch_size, seed=seed, device=device
    )


def _checkpoint(folder: Path, epoch: int | None) -> tuple[dict[str, Any], Path]:
    """The last checkpoint, or that of the end of an epoch."""
    paths = checkpoints.saved(folder / "checkpoints")
    if not paths:
        raise UserError(f"{folder} has no checkpoint; run `ghostnoise train` first, or give another folder")
    known = []
    for path in paths:
        state = checkpoints.read(path.read_bytes())
        if epoch is None or (state["epoch"], state["step"]) == (epoch, 0):
            return state, path
        known.append(f"{state['epoch']}" + (f" and {state['step']} steps" if state["step"] else ""))
    raise UserError(
        f"epoch {epoch} of {folder}: no checkpoint, and no noise that training recorded; checkpoints are kept of "
        f"epochs {' and '.join(known)}; train with meter.every to record on the way"
    )


def _on(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value

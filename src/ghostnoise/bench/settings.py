"""The settings of a benchmark, and the environment metadata of its records."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ghostnoise
from ghostnoise import doctor
from ghostnoise.bench import allocator

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The options of a benchmark; a row is measured for `seconds`, or `rounds` times if that is given."""

    bench: str
    device: torch.device
    formats: tuple[str, ...] = ("contiguous", "channels_last")
    only: tuple[str, ...] = ()
    quick: bool = False
    seconds: float = 15.0
    rounds: int | None = None
    batch: int | None = None
    compiled: bool = False
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    cpu_time: bool = False
    released: Path | None = None
    contenders: tuple[str, ...] = ()

    def selects(self, name: str) -> bool:
        """Return whether the row with this name is selected."""
        return not self.only or any(text in name for text in self.only)


def plain(device: torch.device) -> list[str]:
    """Return a line if the operators run in plain PyTorch on a device, and why."""
    why = doctor.missing(device.type)
    return [f"the operators run in plain PyTorch: {why}"] if why else []


def conditions(settings: Settings) -> Record:
    """Return the environment metadata recorded with every result: machine, operators, versions, allocator and date."""
    return {
        "dtype": "float32",
        "device": str(settings.device),
        "device_name": doctor.device_name(settings.device),
        "threads": torch.get_num_threads(),
        "operators": doctor.operators(settings.device.type),
        "torch": str(torch.__version__),
        "ghostnoise": ghostnoise.__version__,
        "allocator": allocator.active(),
        "quick": settings.quick,
        "date": date.today().isoformat(),
    }

"""`ghostnoise bench net`: a full training step of a network: forward, loss, backward, SGD."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise.bench.contenders import COMPILED
from ghostnoise.bench.layers import synchronizer, times
from ghostnoise.bench.settings import Record, Settings, conditions, plain
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings

CLASSES = 10
BATCH_NORM = NormSettings(method="bn")
METHODS = {
    "GNI-16": NormSettings(method="gni", ghost_size=16),
    "GBN-16": NormSettings(method="gbn", ghost_size=16),
    "XBN-32": NormSettings(method="xbn", ghost_size=32),
}


@dataclass(frozen=True)
class Row:
    """A network and the shape of its batch."""

    network: str
    model: ModelSettings
    shape: tuple[int, int, int, int]
    memory_format: str = "contiguous"

    @property
    def name(self) -> str:
        """Return the name of the row in tables."""
        return f"{self.network} batch {self.shape[0]} {self.memory_format}"

    @property
    def torch_format(self) -> torch.memory_format:
        """Return the memory format of the images and of the network."""
        return torch.channels_last if self.memory_format == "channels_last" else torch.contiguous_format


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    return [row for row in rows(settings) if settings.selects(row.name)], plain(settings.device)


def rows(settings: Settings) -> list[Row]:
    """Return all rows in the memory formats of the settings."""
    side = 8 if settings.quick else 32
    return [
        Row(network, model, (settings.batch or batch, 3, side, side), form)
        for form in ("contiguous", "channels_last")
        for network, model, batch in _networks(settings.quick)
        if form in settings.formats
    ]


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time a training step with each method, and return a record for each."""
    device, batch = settings.device, draw(row, settings.device)
    norms = {"nn.BatchNorm2d": BATCH_NORM} | METHODS
    steps = {name: step(row, norm, batch) for name, norm in norms.items()}
    if settings.compiled:
        torch.compiler.reset()  # earlier rows count towards the limit of recompilations
        steps |= {name + COMPILED: step(row, norm, batch, compiled=True) for name, norm in norms.items()}
    timings = interleave(
        steps,
        Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2),
        synchronize=synchronizer(device),
        on_progress=on_progress,
    )
    size, baseline = "x".join(map(str, row.shape)), timings["nn.BatchNorm2d"]
    shared = {"bench": "net", "row": row.name, "shape": size, "memory_format": row.memory_format}
    return [
        shared
        | {"contender": name, "kind": "ours" if name.removesuffix(COMPILED) in METHODS else "torch"}
        | times(timing, baseline)
        | conditions(settings)
        for name, timing in timings.items()
    ]


def draw(row: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw the images and labels of a batch; always the same numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(row.shape, generator=generator).to(device, memory_format=row.torch_format)
    return images, torch.randint(CLASSES, row.shape[:1], generator=generator).to(device)


def step(row: Row, norm: NormSettings, batch: tuple[Tensor, Tensor], compiled: bool = False) -> Callable[[], None]:
    """Return a training step of the network of a row with these norms."""
    torch.manual_seed(0)
    model = models.build(row.model, norm, row.shape[1:], CLASSES)
    model = model.to(batch[0].device, memory_format=row.torch_format)  # type: ignore[call-overload]
    if compiled:
        model = torch.compile(model, fullgraph=True)  # type: ignore[assignment]
    return training_step(model, *batch)


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a training step: SGD with momentum on the cross entropy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def run() -> None:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _networks(quick: bool) -> list[tuple[str, ModelSettings, int]]:
    """Return the name, the settings and the batch size of each network."""
    # Not narrower: torch 2.13.0 corrupts memory in channels_last convolutions of fewer than 8 channels on one thread.
    width, batches = (8, (32, 32)) if quick else (None, (128, 32))
    return [
        ("resnet-20", ModelSettings(name="resnet20", width=width), batches[0]),
        ("resnet-18", ModelSettings(name="resnet18", width=width), batches[1]),
    ]

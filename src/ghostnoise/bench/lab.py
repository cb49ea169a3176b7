"""`ghostnoise bench lab`: images per second of the trainer, the bare step and a DataLoader loop; sweep overhead."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ghostnoise.bench import overhead
from ghostnoise.bench.layers import synchronizer, times
from ghostnoise.bench.overhead import Overhead
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import DataSettings, ModelSettings, OptimSettings, TrainSettings
from ghostnoise.lab.config.schema import Settings as RunSettings
from ghostnoise.lab.data import Source, catalog
from ghostnoise.lab.data.in_memory import Images, InMemorySource
from ghostnoise.lab.data.source import Shard
from ghostnoise.lab.events import Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import RunFolder
from ghostnoise.lab.train.loop import Loop
from ghostnoise.lab.train.machine import Clock, Machine, Stop
from ghostnoise.lab.train.session import Session, build_optimizer
from ghostnoise.lab.train.sinks import Terminal

WORKERS = 2  # of the DataLoader
PADDING = 2  # of random crops, as in the paper's experiments on CIFAR
CIFAR = catalog.find("cifar10")


@dataclass(frozen=True)
class Row:
    """A network that trains with ghost noise on random images of CIFAR-10's shape, cropped and flipped."""

    title: str
    model: ModelSettings
    batch: int
    steps: int
    memory_format: str = "contiguous"

    @property
    def name(self) -> str:
        """Return the name of the row in tables."""
        return f"{self.title} batch {self.batch} {self.memory_format}"

    def settings(self) -> RunSettings:
        """Return the settings of the run."""
        return RunSettings(
            model=self.model,
            norm=NormSettings(method="gni", ghost_size=16),
            data=DataSettings(name="cifar10"),
            optim=OptimSettings(lr=0.1, weight_decay=5e-4),
            train=TrainSettings(
                epochs=10**6, batch_size=self.batch, channels_last=self.memory_format == "channels_last"
            ),
        )


def plan(settings: Settings) -> tuple[list[Row | Overhead], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    if settings.quick:
        every = [Row("resnet-20", ModelSettings(name="resnet20", width=8), 16, 2)]
        every += [Row("mlp", ModelSettings(name="mlp", widths=[8]), 16, 2)]
    else:
        every = [
            Row("resnet-20", ModelSettings(name="resnet20"), settings.batch or 256, 8),
            Row("mlp 3x1024", ModelSettings(name="mlp"), settings.batch or 1024, 16),
        ]
    every = [Row(row.title, row.model, row.batch, row.steps, form) for row in every for form in settings.formats
             if form == "contiguous" or row.model.name != "mlp"]  # fmt: skip
    left_out = [] if torchvision() else ["torchvision is left out: it cannot be imported"]
    rows: list[Row | Overhead] = [*every, *overhead.ROWS]
    return [row for row in rows if settings.selects(row.name)], left_out


def measure(row: Row | Overhead, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time each contender of a row, and return a record for each."""
    return (
        overhead.measure(row, settings) if isinstance(row, Overhead) else measure_training(row, settings, on_progress)
    )


def measure_training(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time `row.steps` steps of each contender, and return a record for each."""
    generator = torch.Generator().manual_seed(0)
    count = row.batch * row.steps
    pixels = torch.randint(256, (count, *CIFAR.shape), dtype=torch.uint8, generator=generator)
    images = Images(pixels, torch.randint(CIFAR.classes, (count,), generator=generator))
    last = row.memory_format == "channels_last"
    source = InMemorySource(CIFAR, images, images, Shard(row.batch), 0, settings.device, last, PADDING)
    with TemporaryDirectory() as folder:
        contenders = {
            "bare step": bare(row, settings, source),
            "ghostnoise train": trainer(row, settings, source, Path(folder)),
            "PIL loader": plain_loop(row, settings, images, by_hand),
        }
        if transform := torchvision():
            contenders["torchvision loader"] = plain_loop(row, settings, images, transform)
        timings = interleave(
            contenders, Length(settings.seconds, settings.rounds, warmup=1), synchronize=synchronizer(settings.device),
            on_progress=on_progress,
        )  # fmt: skip
    kinds = {"bare step": "torch", "ghostnoise train": "ours"}
    size = "x".join(map(str, (row.batch, *CIFAR.shape)))
    shared = {"bench": "lab", "row": row.name, "shape": size, "memory_format": row.memory_format, "steps": row.steps}
    baseline = timings["bare step"]
    return [
        shared
        | {"contender": name, "kind": kinds.get(name, "peer")}
        | times(timing, baseline)
        | {"images_per_second": 1e3 * count / timing.p50, "speed_ratio": baseline.p50 / timing.p50}
        | conditions(settings)
        for name, timing in timings.items()
    ]


def bare(row: Row, settings: Settings, source: Source) -> Callable[[], None]:
    """Return steps of forward, loss, backward and optimizer on one batch that is already in memory."""
    model, updates = _network(row, settings)
    images, labels = next(source.batches(0))

    def run() -> None:
        for _ in range(row.steps):
            _step(model, updates, images, labels)

    return run


def trainer(row: Row, settings: Settings, source: Source, folder: Path) -> Callable[[], None]:
    """Return an epoch of the trainer: batches, learning rate, metrics, checks, clock and display; no evaluation."""
    here, chosen = Machine(settings.device), row.settings()
    torch.manual_seed(0)
    session = Session(models.build(chosen.model, chosen.norm, CIFAR.shape, CIFAR.classes), chosen, here)
    display = Terminal(Console(file=io.StringIO()), quiet=False)
    loop = Loop(session, source, RunFolder(folder, print), Clock(here, Stop(), math.inf), step_seconds=0.25)
    display.take(Started(Run.planned("bench", chosen), "", 0, source.steps))

    def run() -> None:
        for event in loop.train_epoch():
            display.take(event)
        session.progress.epoch += 1
        session.progress.start_epoch(settings.device)

    return run


def plain_loop(row: Row, settings: Settings, images: Images, transform: Callable[[Any], Tensor]) -> Callable[[], None]:
    """Return an epoch of a common script: a data set of single images, a DataLoader with workers, torch's SGD."""
    model, _ = _network(row, settings)
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(
        OneByOne(images, transform),
        row.batch,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    form = torch.channels_last if row.memory_format == "channels_last" else torch.contiguous_format

    def run() -> None:
        total = 0.0
        for pixels, labels in loader:
            batch = pixels.to(settings.device, memory_format=form)
            total += _step(model, updates, batch, labels.to(settings.device)).item()

    return run


class OneByOne(Dataset[tuple[Tensor, int]]):
    """Single images through PIL and a transform, as in torchvision's data sets."""

    def __init__(self, images: Images, transform: Callable[[Any], Tensor]) -> None:
        self.pixels = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels, self.transform = images.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def torchvision() -> Callable[[Any], Tensor] | None:
    """Return torchvision transforms equal to the trainer's crops, flips and normalization; None without torchvision."""
    try:
        from torchvision import transforms
    except (ImportError, RuntimeError):  # RuntimeError if it was built for another torch
        return None
    steps = [transforms.RandomCrop(CIFAR.shape[1], padding=PADDING), transforms.RandomHorizontalFlip()]
    made: Callable[[Any], Tensor] = transforms.Compose(
        [*steps, transforms.ToTensor(), transforms.Normalize(CIFAR.mean, CIFAR.std)]
    )
    return made


def by_hand(picture: Any) -> Tensor:
    """Crop, flip and normalize an image without torchvision, in fewer steps."""
    from PIL import Image, ImageOps

    top, left = (int(torch.randint(2 * PADDING + 1, ())) for _ in range(2))
    box = (left, top, left + CIFAR.shape[2], top + CIFAR.shape[1])
    picture = ImageOps.expand(picture, PADDING).crop(box)
    if torch.rand(()) < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
    mean, std = (torch.tensor(values)[:, None, None] for values in (CIFAR.mean, CIFAR.std))
    return image.sub_(mean).div_(std)


def _network(row: Row, settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    chosen = row.settings()
    torch.manual_seed(0)
    form = torch.channels_last if chosen.train.channels_last else torch.preserve_format
    model = models.build(chosen.model, chosen.norm, CIFAR.shape, CIFAR.classes)
    model = model.to(device=settings.device, memory_format=form)  # type: ignore[call-overload]
    return model, build_optimizer(model, chosen.optim)


def _step(model: nn.Module, updates: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    updates.step()
    updates.zero_grad()
    return loss.detach()

"""`ghostnoise bench flex`: the normalizations of the gallery by `flex_norm`, and as they are usually written."""

from collections.abc import Callable

import torch
from torch import nn

from ghostnoise.bench.gallery import GALLERY, Layer
from ghostnoise.bench.layers import synchronizer, times
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions, plain
from ghostnoise.bench.timing import Length, interleave

SHAPE = (64, 64, 32, 32)  # of docs/guides/any-normalization.md


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows of images, and a line if the operators run in plain PyTorch."""
    every = [Row(SHAPE, form) for form in settings.formats] if not settings.quick else []
    chosen = [row for row in every if settings.selects(row.name)]
    return [*chosen, *(row for row in rows(settings) if row.images)], plain(settings.device)


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time the methods and their counterparts in interleaved rounds, and return a record for each method."""
    x, dy = row.draw(settings.device)

    def step(layer: nn.Module) -> Callable[[], object]:
        layer.to(settings.device)
        wanted = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), wanted, dy)

    steps = {(name, usual): step(Layer(entry, x, usual)) for name, entry in GALLERY.items() for usual in (False, True)}
    timings = interleave(
        {f"{name}|{usual}": run for (name, usual), run in steps.items()},
        Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2),
        synchronize=synchronizer(settings.device),
        on_progress=on_progress,
    )
    shared: Record = {"bench": "flex", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    shared |= {"kind": "flex"} | conditions(settings)
    records = []
    for name, entry in GALLERY.items():
        own, theirs = (timings[f"{name}|{usual}"] for usual in (False, True))
        about = {"contender": f"{name} / {entry.counterpart}", "counterpart_ms": theirs.p50}
        records.append(shared | about | times(own, theirs))
    return records

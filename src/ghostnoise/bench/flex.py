"""`ghostnoise bench flex`: normalizations written with `flex_norm`, and what PyTorch has for each.

The methods are those of docs/guides/flex-norm.md.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ghostnoise.bench.contenders import General
from ghostnoise.bench.layers import synchronizer, times
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions, plain
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.engine.general import Decide
from ghostnoise.tables import Affine, Moments, ghost_batches, normalize, over_channels, whole_batch

GROUPS, GHOST_SIZE = 8, 32


def instance_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each channel of each sample with its own moments."""
    return normalize(m).then(weight, bias)


def group_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each sample with the moments of groups of channels."""
    return normalize(over_channels(m, groups=GROUPS)).then(weight, bias)


def ghost_batch_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each sample with the moments of its ghost batch."""
    return normalize(ghost_batches(m, GHOST_SIZE)).then(weight, bias)


def batch_renorm(running_mean: Tensor, running_var: Tensor, m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize with the moments of the batch, and correct towards the running statistics."""
    stats, std = whole_batch(m), (running_var + 1e-5).sqrt()
    r = ((stats.var.detach() + 1e-5).sqrt() / std).clamp(1 / 3, 3)
    d = ((stats.mean.detach() - running_mean) / std).clamp(-5, 5)
    return normalize(stats).then(r, d).then(weight, bias)


class GhostBatches(nn.Module):
    """Call `nn.BatchNorm2d` for each ghost batch, as one would without this library."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return torch.cat([self.norm(ghost) for ghost in x.split(GHOST_SIZE)])


class Pair(NamedTuple):
    """A method, what PyTorch has for it, and a layer of each."""

    method: str
    counterpart: str
    layers: tuple[nn.Module, nn.Module]


def pairs(channels: int) -> list[Pair]:
    """Return the methods for images with these channels."""

    def general(decide: Decide) -> nn.Module:
        return General(channels, lambda x: decide)

    renorm = partial(batch_renorm, *torch.stack([torch.ones(channels), torch.full((channels,), 4.0)]).double())
    return [
        Pair("instance norm", "nn.InstanceNorm2d", (general(instance_norm), nn.InstanceNorm2d(channels, affine=True))),
        Pair("group norm", "nn.GroupNorm", (general(group_norm), nn.GroupNorm(GROUPS, channels))),
        Pair("ghost batch norm", "nn.BatchNorm2d per ghost batch", (general(ghost_batch_norm), GhostBatches(channels))),
        Pair("batch renorm", "nn.BatchNorm2d", (general(renorm), nn.BatchNorm2d(channels))),
    ]


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows of images, and a line if the operators run in plain PyTorch."""
    return [row for row in rows(settings) if row.images], plain(settings.device)


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time the methods and their counterparts in interleaved rounds, and return a record for each method."""
    found, (x, dy) = pairs(row.channels), row.draw(settings.device)

    def step(layer: nn.Module) -> Callable[[], object]:
        layer.to(settings.device)
        wanted = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), wanted, dy)

    steps = {(pair.method, at): step(layer) for pair in found for at, layer in enumerate(pair.layers)}
    timings = interleave(
        {f"{method}|{at}": run for (method, at), run in steps.items()},
        Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2),
        synchronize=synchronizer(settings.device),
        on_progress=on_progress,
    )
    shared: Record = {"bench": "flex", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    shared |= {"kind": "flex"} | conditions(settings)
    records = []
    for method, counterpart, _ in found:
        own, theirs = (timings[f"{method}|{at}"] for at in range(2))
        about = {"contender": f"{method} / {counterpart}", "counterpart_ms": theirs.p50}
        records.append(shared | about | times(own, theirs))
    return records

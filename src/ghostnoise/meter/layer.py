"""One layer, measured batch by batch: small tables on the CPU in float64, and for the gap a few passes over x."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghostnoise.conversion.insertion import inserted
from ghostnoise.conversion.table import NOISES
from ghostnoise.engine import op
from ghostnoise.ghosts import draws, everyone, ghost_sizes
from ghostnoise.laws import variance_components
from ghostnoise.meter.gap import METHODS, GapSums, inferred, outputs
from ghostnoise.meter.histogram import Gathering
from ghostnoise.meter.reading import LayerReading, Noise
from ghostnoise.meter.selection import Place, channel_dim, tensor_in
from ghostnoise.moments import Moments

# A variance that rounding of float32 alone could make of a constant channel, against its squared mean.
ROUNDING = 1e-13


class Layer:
    """Gathers what is known of a layer."""

    def __init__(self, place: Place, ghost_size: int, count: int, gap: bool, dim: int | None) -> None:
        self.place, self.ghost_size, self.count, self.gap, self.dim = place, ghost_size, count, gap, dim
        self.batches, self.samples, self.skipped = 0, 0, 0
        self.channels: int | None = None
        self.refused: dict[str, str] = {}

    def see(self, value: Any, generator: torch.Generator) -> None:
        """Measure what the module got or gave, unless it is too small or not finite."""
        x = tensor_in(value, self.place).detach()
        if x.ndim < 2 or not x.is_floating_point():
            raise ValueError(
                f"{self.place.found} has a {self.place.side} of shape {tuple(x.shape)} and dtype {x.dtype}: Meter "
                "needs a floating batch (B, C, ...); leave the module out of modules="
            )
        dim = channel_dim(self.place, x, self.dim)
        if x.shape[0] < 2 or x.numel() == 0:
            self.skipped += 1
            return
        spatial = math.prod(x.shape[1:]) // x.shape[dim]
        x, dim = _five_at_most(x, dim)
        moments = Moments(*(table.cpu().double() for table in op.measure(x, dim)))
        if not all(table.isfinite().all() for table in moments):
            self.skipped += 1
            return
        self._begin(x.shape[dim])
        self.batches, self.samples = self.batches + 1, self.samples + x.shape[0]
        self._add_noise(moments, spatial, generator)
        if self.gap:
            self._add_gap(x, dim, generator)

    def _begin(self, channels: int) -> None:
        if self.channels is None:
            self.channels = channels
            self.sums = torch.zeros(4, channels, dtype=torch.float64)  # mean, variance, and its parts over itself
            self.live = torch.zeros(channels, dtype=torch.float64)  # samples of batches in which a channel varied
            self.positions = 0.0
            self.noise = {
                method: {part: Gathering(at, self.ghost_size, channels) for part, at in (("shift", 0), ("scale", 1))}
                for method in ("gni", "gbn")
            }  # fmt: skip
            self.gaps = {method: GapSums(method, channels) for method in METHODS} if self.gap else {}
        elif self.channels != channels:
            raise ValueError(
                f"{self.place.found} has {channels} channels, and had {self.channels} before: Meter measures one width;"
                " leave the module out of modules=, or give the channel_dim="
            )

    def _add_noise(self, moments: Moments, spatial: int, generator: torch.Generator) -> None:
        whole = everyone(*moments)
        live = (whole.var > ROUNDING * whole.mean.square()).flatten()
        samples = moments.mean.shape[0]
        within, between = variance_components(moments, spatial)
        unit = whole.var.where(live, 1)
        self.sums[:2] += samples * torch.cat(whole)
        self.sums[2:] += samples * torch.where(live, torch.cat([within, between]) / unit, 0)
        self.live += samples * live
        self.positions += samples / spatial
        for method, tables in _drawn(samples, self.ghost_size, self.count, generator).items():
            for indices in tables:
                self._add_draws(method, moments, whole.mean, unit, live, indices)

    def _add_draws(
        self, method: str, moments: Moments, around: Tensor, unit: Tensor, live: Tensor, indices: Tensor
    ) -> None:
        """Take the noise of ghost batches; each counts for as many samples as look at it."""
        ghost = draws(moments, around, indices)
        seen_by = 1 if method == "gni" else indices.shape[1]
        self.noise[method]["shift"].add(ghost.mean * unit.rsqrt(), live, seen_by)
        self.noise[method]["scale"].add(ghost.var / unit, live, seen_by)

    def _add_gap(self, x: Tensor, dim: int, generator: torch.Generator) -> None:
        module: Any = self.place.found.module
        own = self.place.side == "input" and not isinstance(module, NOISES)  # whose eps is that of a ratio
        eps = getattr(module, "eps", 1e-5) if own else 1e-5
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        indices = torch.randint(x.shape[0], (x.shape[0], self.ghost_size), generator=generator).to(x.device)
        mean, var = (getattr(module, name, None) for name in ("running_mean", "running_var"))
        inference = None
        if self.place.side == "input" and isinstance(mean, Tensor) and isinstance(var, Tensor):
            inference = inferred(_folded(wide, dim), mean, var, eps)
        for method, made in outputs(wide, dim, self.ghost_size, eps, indices).items():
            try:
                y = made()
            except ValueError as error:  # of a method that cannot normalize so few values
                self.refused[method] = str(error)
                continue
            self.gaps[method].add(_folded(y, dim), inference, self.ghost_size)

    def result(self) -> LayerReading | None:
        """What was measured so far, or None."""
        if self.channels is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = self.sums[2:].numpy() / self.live.numpy()
        mean, var = self.sums[:2].numpy() / self.samples
        module = self.place.found.module
        return LayerReading(
            name=self.place.name,
            names=tuple(name for name in self.place.found.names if name) or (self.place.name,),
            kind=type(module).__name__,
            side=self.place.side,
            own=own_noise(module),
            ghost_size=self.ghost_size,
            spatial=self.samples / self.positions,
            batches=self.batches,
            samples=self.samples,
            skipped=self.skipped,
            mean=mean,
            var=var,
            within=parts[0],
            between=np.maximum(parts[1], 0),
            noise={
                method: Noise(**{part: gathered.result() for part, gathered in parts.items()})
                for method, parts in self.noise.items()
            },
            gaps={method: sums.result() for method, sums in self.gaps.items() if sums.samples},
            refused=dict(self.refused),
        )


def _drawn(samples: int, size: int, count: int, generator: torch.Generator) -> dict[str, list[Tensor]]:
    """Tables of the samples in about `count` ghost batches (R, n): with replacement, and as parts of shuffled batches.

    The last part of a batch has the left-over samples too, and so may be larger.
    """
    sizes = ghost_sizes(samples, size)
    rows = math.ceil(count / len(sizes))
    shuffled = torch.rand(rows, samples, generator=generator).argsort(1)
    even, last = shuffled.tensor_split([samples - sizes[-1]], dim=1)
    with_replacement = torch.randint(samples, (count, size), generator=generator)
    return {"gni": [with_replacement], "gbn": [even.reshape(-1, size), last] if len(sizes) > 1 else [last]}


def own_noise(module: Any) -> int | None:
    """The ghost size that a layer has itself, or noise that conversion inserted at it; the smaller one of two."""
    sizes = [getattr(each, "ghost_size", None) for each in (module, inserted(module))]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def _folded(x: Tensor, dim: int) -> Tensor:
    """As (B, C, S)."""
    return x.movedim(dim, 1).flatten(2) if x.ndim > 2 else x.unsqueeze(2)


def _five_at_most(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """x and its channel dimension, with all positions as one dimension where there are more than the engine takes."""
    return (x, dim) if x.ndim <= 5 else (x.movedim(dim, 1).flatten(2), 1)

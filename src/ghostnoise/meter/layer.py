"""Measurement of one layer, accumulated over batches.

The noise is computed from per-sample moments, small float64 tables on the CPU. Only the gap between training and
inference takes further passes over the activations. Memory does not grow with the number of batches.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ghostnoise.conversion.insertion import inserted
from ghostnoise.conversion.schedules import has_ghost_size
from ghostnoise.conversion.targets import Found
from ghostnoise.engine import general
from ghostnoise.laws import variance_components
from ghostnoise.meter.code import Placement, with_channel_dim
from ghostnoise.meter.gap import (
    METHODS,
    GapAccumulator,
    GhostBatches,
    fold,
    meter_spec,
    normalize_at_inference,
    normalize_in_training,
)
from ghostnoise.meter.reading import Distribution, LayerReading, NoiseReading
from ghostnoise.meter.theory import Component
from ghostnoise.randomness import draw_rows
from ghostnoise.tables import Moments, drawn_samples, ghost_sizes, mean_count, whole_batch

Side: TypeAlias = Literal["input", "output"]

CONSTANT = 1e-13  # float32 rounding alone can give a constant channel a variance of this fraction of its squared mean
DEFAULT_EPS = 1e-5
CENTERS: dict[Component, int] = {"shift": 0, "scale": 1}  # value of each component without noise

# Histogram bins, in units of 1/sqrt(ghost_size), the standard deviation of the shift in a fully connected layer: their
# width grows linearly beyond about BIN_SCALE from the center, up to BIN_LIMIT.
BINS = 256
BIN_SCALE, BIN_LIMIT = 0.02, 32.0
POWERS = 4


class MeteredModule(NamedTuple):
    """A module of the model, whether its input or its output is measured, and how it can get noise."""

    found: Found
    side: Side
    placement: Placement

    @property
    def name(self) -> str:
        """First name of the module; for the model itself, the name of its type."""
        return self.found.names[0] or type(self.found.module).__name__


class HistogramAccumulator:
    """Accumulate the `Distribution` of values around `center`, 0 or 1, in ghost batches of `ghost_size` samples."""

    def __init__(self, center: float, ghost_size: int, channels: int) -> None:
        steps = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64) * math.asinh(BIN_LIMIT / BIN_SCALE)
        edges = center + ghost_size**-0.5 * BIN_SCALE * steps.sinh()
        # Around 1 the values are variances, and not negative.
        self.edges = edges if center == 0 else torch.cat([edges.new_zeros(1), edges[edges > 0]])
        self.center = center
        self.counts = torch.zeros(channels, len(self.edges) + 1, dtype=torch.int64)
        self.powers = torch.zeros(POWERS, channels, dtype=torch.float64)  # sums of (value - center)^k

    def add(self, values: Tensor, varying: Tensor, weight: int) -> None:
        """Add values (R, C) with an integer weight, in the channels where the mask `varying` (C,) is True."""
        bins = torch.bucketize(values, self.edges, right=True)
        bins += torch.arange(len(varying)) * self.counts.shape[1]
        counts = torch.bincount(bins.flatten(), minlength=self.counts.numel()).view_as(self.counts)
        self.counts += counts * (weight * varying[:, None])
        centered = values - self.center
        power = centered * (weight * varying)
        self.powers[0] += power.sum(0)
        for order in range(1, POWERS):
            self.powers[order] += power.mul_(centered).sum(0)

    def result(self) -> Distribution:
        """The distribution of all values so far."""
        with np.errstate(invalid="ignore"):
            powers = self.powers.numpy() / self.counts.sum(1).double().numpy()
        return Distribution.from_powers(self.center, self.edges.numpy(), self.counts.numpy().copy(), powers)


class LayerMeter:
    """Accumulate the measurements of one layer."""

    def __init__(self, metered: MeteredModule, ghost_size: int, draws: int, gap: bool) -> None:
        self.metered, self.ghost_size, self.draws, self.gap = metered, ghost_size, draws, gap
        self.batches, self.samples, self.skipped = 0, 0, 0
        self.channels: int | None = None
        self.refused: dict[str, str] = {}
        self.never_updated, self.padded = False, 0

    def add(
        self,
        x: Tensor,
        channel_dim: int,
        generator: torch.Generator,
        single: bool = True,
        mask: Tensor | None = None,
    ) -> None:
        """Measure a batch; skip it if it has fewer than two samples or values that are not finite.

        `single` is False if x is only one of several values that the module takes or returns. With a mask
        (B, *positions), the batch is that of the valid positions, and of the samples that have any.
        """
        if mask is not None and not bool((present := mask.unsqueeze(1).flatten(1).any(1)).all()):
            x, mask = x[present], mask[present]
        if x.shape[0] < 2 or x.numel() == 0:
            self.skipped += 1
            return
        if self.channels is None:
            placed = with_channel_dim(self.metered.placement, channel_dim, x.ndim, single)
            self.metered = self.metered._replace(placement=placed)
            self.never_updated = self.metered.side == "input" and _has_initial_statistics(self.metered.found.module)
        if x.ndim > 5:  # more dimensions than the engine accepts
            x, channel_dim, mask = fold(x, channel_dim), 1, None if mask is None else mask.flatten(1)
        measured = general.measure(x, channel_dim, mask)
        mean, var, n = measured
        n = n.cpu().double() if isinstance(n, Tensor) else n
        moments = Moments(mean.cpu().double(), var.cpu().double(), n)
        if not all(table.isfinite().all() for table in moments[:2]):
            self.skipped += 1
            return
        self._allocate(x.shape[channel_dim])
        self.padded += 0 if mask is not None else _padded(x, channel_dim)
        self.batches, self.samples = self.batches + 1, self.samples + x.shape[0]
        self._add_noise(moments, generator)
        if self.gap:
            counts = measured.n if isinstance(measured.n, Tensor) else None
            self._add_gap(x, channel_dim, generator, mask, counts)

    def result(self) -> LayerReading | None:
        """The measurements so far; None if no batch was measured."""
        if self.channels is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            within, between = self.fractions.numpy() / self.varying_samples.numpy()
        mean, var = self.moments.numpy() / self.samples
        found = self.metered.found
        return LayerReading(
            name=self.metered.name,
            names=tuple(name for name in found.names if name) or (self.metered.name,),
            kind=type(found.module).__name__,
            side=self.metered.side,
            own_ghost_size=_own_ghost_size(found.module),
            ghost_size=self.ghost_size,
            spatial=self.samples / self.inverse_spatial,
            batches=self.batches,
            samples=self.samples,
            skipped=self.skipped,
            mean=mean,
            var=var,
            within=within,
            between=np.maximum(between, 0),
            noise={
                method: NoiseReading(**{component: values.result() for component, values in components.items()})
                for method, components in self.noise.items()
            },
            gaps={method: gap.result() for method, gap in self.gaps.items() if gap.samples},
            refused=dict(self.refused),
            never_updated=self.never_updated,
            padded=self.padded / self.samples,
            placement=self.metered.placement,
        )

    def _allocate(self, channels: int) -> None:
        """Allocate the accumulators for the first batch; check the number of channels of later ones."""
        if self.channels is None:
            self.channels = channels
            # Sums over batches, weighted by samples: mean and variance, and the within and between fractions of it.
            self.moments, self.fractions = (torch.zeros(2, channels, dtype=torch.float64) for _ in range(2))
            self.varying_samples = torch.zeros(channels, dtype=torch.float64)  # in batches where a channel varied
            self.inverse_spatial = 0.0
            self.noise = {
                name: {
                    component: HistogramAccumulator(center, self.ghost_size, channels)
                    for component, center in CENTERS.items()
                }
                for name, method in METHODS.items()
                if meter_spec(method).sampling
            }
            self.gaps = {name: GapAccumulator(each, channels) for name, each in METHODS.items()} if self.gap else {}
        elif self.channels != channels:
            raise ValueError(
                f"{self.metered.found} has {channels} channels, and had {self.channels} before: Meter needs the same "
                "number of channels in every batch; leave the module out of modules=, or give its channel_dim="
            )

    def _add_noise(self, moments: Moments, generator: torch.Generator) -> None:
        batch, samples, spatial = whole_batch(moments), moments.mean.shape[0], mean_count(moments)
        varying = (batch.var > CONSTANT * batch.mean.square()).flatten()
        var = batch.var.where(varying, 1)
        self.moments += samples * torch.cat(batch[:2])
        fractions = torch.cat(variance_components(moments)) / var
        self.fractions += samples * torch.where(varying, fractions, 0)
        self.varying_samples += samples * varying
        self.inverse_spatial += samples / float(spatial)
        sampled = sample_ghost_batches(samples, self.ghost_size, self.draws, generator)
        for name, noise in self.noise.items():
            sampling = meter_spec(METHODS[name]).sampling
            for indices in sampled[sampling]:
                ghost = drawn_samples(moments, indices)
                # A ghost batch of a partition normalizes all of its samples; a drawn one normalizes one sample.
                weight = indices.shape[1] if sampling == "partition" else 1
                noise["shift"].add((ghost.mean - batch.mean) * var.rsqrt(), varying, weight)
                noise["scale"].add(ghost.var / var, varying, weight)

    def _add_gap(
        self, x: Tensor, channel_dim: int, generator: torch.Generator, mask: Tensor | None, counts: Tensor | None
    ) -> None:
        module: Any = self.metered.found.module
        at_input = self.metered.side == "input"
        eps = getattr(module, "eps", DEFAULT_EPS) if at_input else DEFAULT_EPS
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        ghosts = GhostBatches.draw(x, self.ghost_size, generator, shuffle=False)
        # From a generator of their own: further draws from `generator` would change what is measured in later batches.
        other = torch.Generator("cpu").manual_seed((generator.initial_seed() + self.batches) % 2**63)
        others = GhostBatches.draw(x, self.ghost_size, other, shuffle=True)
        mean, var = (getattr(module, name, None) for name in ("running_mean", "running_var"))
        inference = None
        if at_input and isinstance(mean, Tensor) and isinstance(var, Tensor):
            inference = normalize_at_inference(x, channel_dim, mean, var, eps, mask)
        for name, method in METHODS.items():
            normalize = partial(normalize_in_training, method, x, channel_dim, self.ghost_size, eps, mask=mask)
            random = method.partitions or bool(meter_spec(method).sampling)
            try:
                y = normalize(ghosts)
                again = normalize(others) if random and inference is not None else y
            except ValueError as error:  # the batch has too few values for this method
                self.refused[name] = str(error)
            else:
                self.gaps[name].add(y, again, inference, self.ghost_size, counts)


def sample_ghost_batches(
    batch_size: int, ghost_size: int, count: int, generator: torch.Generator
) -> dict[str, list[Tensor]]:
    """Draw the sample indices of about `count` ghost batches, by way of sampling; each table is (R, n).

    "replacement" draws every sample independently. "partition" splits shuffled batches as ghost batch norm does, so the
    last part, in a table of its own, also has the left-over samples.
    """
    sizes = ghost_sizes(batch_size, ghost_size)
    shuffles = math.ceil(count / len(sizes))
    shuffled = torch.rand(shuffles, batch_size, generator=generator).argsort(1)
    even, last = shuffled.tensor_split([batch_size - sizes[-1]], dim=1)
    drawn = draw_rows(batch_size, count, ghost_size, torch.device("cpu"), generator)
    return {
        "replacement": [drawn],
        "partition": [even.reshape(-1, ghost_size), last] if len(sizes) > 1 else [last],
    }


def _own_ghost_size(module: Any) -> int | None:
    """Ghost size of a layer itself or of noise that conversion inserted at it; the smaller one if there are two."""
    sizes = [each.ghost_size for each in (module, inserted(module)) if has_ghost_size(each)]
    return min((size for size in sizes if size is not None), default=None)


def _padded(x: Tensor, channel_dim: int) -> int:
    """Return how many sequences end in two positions that are equal in all channels."""
    if x.ndim != 3 or x.shape[-1 if channel_dim % 3 == 1 else 1] < 2:
        return 0
    last, before = x.movedim(channel_dim, 1)[:, :, -2:].unbind(-1)
    return int((last == before).all(1).sum())


def _has_initial_statistics(module: Any) -> bool:
    """Return whether the running mean is 0 and the running variance 1 in all channels, as at initialization."""
    mean, var = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return False
    return not bool(mean.any()) and bool((var == 1).all())

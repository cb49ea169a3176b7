"""Advice on a ghost size: a first size to try, code for it, and layers in which the noise would be strong or weak."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ghostnoise.meter.code import BATCH_NORM, Placement, convert_calls
from ghostnoise.meter.reading import LayerReading, Reading

# Thresholds of noise strength, as effective ghost sizes: the N at which a fully connected layer has noise as strong.
STRONG_BELOW = 16.0  # the strongest noise that the paper's networks benefited from: its MLP with GNI-16
TYPICAL = 256.0  # noise in the layers of the paper's ResNet-18 with GNI-32 (figure 4)
WEAK_ABOVE = 1024.0  # the standard deviation of the shift is 3 % of the channel's
DEFAULT_SIZE = 32
LARGEST_SIZE = 4096
PADDED = 0.1  # of the samples: with continuous values, positions do not repeat by chance
LISTED = 6  # layers that a sentence names


@dataclass(frozen=True)
class Strength:
    """Noise of a layer at a ghost size."""

    layer: str
    ghost_size: float
    shift: float
    """Standard deviation of the shift, relative to the channel's standard deviation."""
    scale: float
    """Standard deviation of the squared scale: the variance of a ghost batch, relative to the channel's variance."""
    effective_size: float
    """Effective ghost size of the stronger of the two components."""

    def __str__(self) -> str:
        return f"{self.layer!r} (shift {_percent(self.shift)}, squared scale {_percent(self.scale)})"


@dataclass(frozen=True, repr=False)
class Advice:
    """Result of `advise`; `str` gives it as sentences."""

    ghost_size: int
    """The first ghost size to try."""
    measured_size: int
    """The ghost size that was measured."""
    current: tuple[Strength, ...]
    """Noise that layers have already: from their own ghost size, or for batch norms from the batch size."""
    strong: tuple[Strength, ...]
    """The layers of `current` whose noise is strong."""
    weak: tuple[Strength, ...]
    """Layers that would have hardly any noise at `measured_size`."""
    expected: tuple[Strength, ...]
    """Noise of every layer at `ghost_size`."""
    summary: str
    """Number of layers, channels, batches and samples that were measured."""
    source: str
    """Where the noise of `current` comes from: the batch size of batch norms, and ghost sizes of layers."""
    code: tuple[str, ...]
    """Lines of Python that give the measured layers of `model` ghost noise; empty if none of them can have it."""
    never_updated: tuple[str, ...]
    """Layers whose running statistics still had their initial values before the measurement."""
    padded: tuple[str, ...]
    """Layers without a mask in which many sequences end in repeated positions, as padded ones do."""
    impossible: tuple[str, ...]
    """Measured modules that `code` does not cover: containers, and modules with several inputs or outputs."""

    def __repr__(self) -> str:
        return (
            f"Advice(ghost_size={self.ghost_size}, measured_size={self.measured_size}, {len(self.expected)} layers: "
            f"{len(self.strong)} with strong noise already, {len(self.weak)} with weak noise at {self.measured_size})"
        )

    def __str__(self) -> str:
        lines = [self.summary, self._about_current(), self._about_measured(), *self._about_statistics()]
        return "\n".join([*lines, *self._about_proposed()])

    def _about_current(self) -> str:
        if not self.current:
            return "Now: these layers have no ghost noise, because none of them is a batch norm or has a ghost size."
        least, most = _least_and_most_shift(self.current)
        shift = f"the shift is {_percent(least.shift)} to {_percent(most.shift)} of a standard deviation"
        if not self.strong:
            return f"Now ({self.source}): no layer has strong noise; {shift} (largest in {most.layer!r})."
        return (
            f"Now ({self.source}): the noise is already strong in {_listing(self.strong)}, as in a fully connected "
            f"layer with a ghost size below {STRONG_BELOW:g}; in all layers, {shift}."
        )

    def _about_measured(self) -> str:
        if not self.weak:
            return f"Ghost size {self.measured_size}: every layer would have noticeable noise."
        return (
            f"Ghost size {self.measured_size}: {len(self.weak)} of {len(self.expected)} layers would have hardly any "
            f"noise, a shift of 3 % of a standard deviation or less: {_listing(self.weak)}."
        )

    def _about_statistics(self) -> list[str]:
        lines = []
        if self.padded:
            lines = [
                f"Padding: many sequences end in repeated positions ({_names(self.padded)}). If this is padding, it "
                "contributes to the statistics and the noise: give the valid positions, as in with "
                "ghostnoise.masked(mask), and measure again; see docs/guides/padding.md."
            ]
        if not self.never_updated:
            return lines
        return [
            *lines,
            f"Running statistics: in {len(self.never_updated)} of {_count(len(self.expected), 'layer')} they had never "
            f"been updated before the measurement ({_names(self.never_updated)}). The weights are probably untrained, "
            "and the noise changes during training; repeat the measurement after a few epochs.",
        ]

    def _about_proposed(self) -> list[str]:
        least, most = _least_and_most_shift(self.expected)
        strongest = min(self.expected, key=lambda each: each.effective_size)
        first = (
            f"First ghost size to try: {self.ghost_size}. The shift would be {_percent(least.shift)} ({least.layer!r}) "
            f"to {_percent(most.shift)} ({most.layer!r}) of a standard deviation. The layer with the strongest noise "
            f"({strongest.layer!r}) would have as much as a fully connected layer with N = "
            f"{strongest.effective_size:.0f}."
        )
        then = (
            f"Then try {max(self.ghost_size // 2, 1)} and {self.ghost_size * 2}, and choose by the results on "
            "validation data. This advice is based on the strength of the noise; its effect on accuracy was not "
            "measured."
        )
        lines = [f"{first} To convert your model:", *self.code] if self.code else [first]
        if self.impossible:
            lines.append(
                f"ghostnoise.convert cannot insert noise at {_names(self.impossible)}: noise needs a layer that is not "
                "a container and has one tensor as its input or output; measure layers inside."
            )
        return [*lines, then]


def advise(reading: Reading) -> Advice:
    """Judge the noise that the layers of a model have, and propose a first ghost size to try.

    The proposed size is 32, adjusted to the nearest power of two that meets two conditions. It is small enough that the
    median layer has noise at least as strong as in the paper's ResNet-18 (figure 4), and large enough that no layer has
    stronger noise than the paper's MLP. If both cannot be met, the second one takes precedence.
    """
    layers = [layer for layer in reading.layers if layer.constant < layer.channels]
    if not layers:
        raise ValueError(
            "every channel that was measured is constant: advise needs channels that vary; measure other data"
        )
    measured_size = layers[0].ghost_size
    measured = tuple(_strength(layer, measured_size) for layer in layers)
    ratios = [each.effective_size / measured_size for each in measured]  # the effective size is proportional to N
    largest, smallest = TYPICAL / float(np.median(ratios)), STRONG_BELOW / min(ratios)
    size = max(min(DEFAULT_SIZE, _power_of_two(largest, math.floor)), _power_of_two(smallest, math.ceil))
    size = min(size, LARGEST_SIZE)
    current = tuple(_strength(layer, own) for layer in layers if (own := _current_size(layer)) is not None)
    return Advice(
        ghost_size=size,
        measured_size=measured_size,
        current=current,
        strong=tuple(each for each in current if each.effective_size < STRONG_BELOW),
        weak=tuple(each for each in measured if each.effective_size > WEAK_ABOVE),
        expected=tuple(_strength(layer, size) for layer in layers),
        summary=_summary(layers),
        source=_source(layers),
        code=tuple(convert_calls([each for each in map(_placement, layers) if each is not None], size)),
        never_updated=tuple(layer.name for layer in layers if layer.never_updated),
        padded=tuple(layer.name for layer in layers if layer.padded >= PADDED),
        impossible=tuple(layer.name for layer in layers if getattr(_placement(layer), "how", "") == "impossible"),
    )


def _summary(layers: Sequence[LayerReading]) -> str:
    first = layers[0]
    channels = sum(layer.channels for layer in layers)
    return (
        f"{_count(len(layers), 'layer')}, {_count(channels, 'channel')}, measured on "
        f"{_count(first.batches, 'batch', 'es')} of {first.samples / first.batches:.4g} samples."
    )


def _current_size(layer: LayerReading) -> float | None:
    """Ghost size that a layer has now: its own, or for a batch norm the average batch size."""
    if layer.own_ghost_size is not None:
        return layer.own_ghost_size
    return layer.samples / layer.batches if "BatchNorm" in layer.kind and layer.side == "input" else None


def _source(layers: Sequence[LayerReading]) -> str:
    """Describe where the noise that layers have now comes from."""
    own = sorted({layer.own_ghost_size for layer in layers if layer.own_ghost_size is not None})
    batch = [_current_size(layer) for layer in layers if layer.own_ghost_size is None]
    sizes = [size for size in batch if size is not None]
    parts = [f"batch norm over batches of {_range(sizes)} samples"] if sizes else []
    return "; ".join([*parts, f"layers with a ghost size of {_range(own)}"] if own else parts)


def _range(sizes: Sequence[float]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _placement(layer: LayerReading) -> Placement | None:
    """Return how a layer can get noise; in files without it, batch norms are recognized by the name of their type."""
    if layer.placement is None and "BatchNorm" in layer.kind:
        return Placement("convert", layer.name, None, True, ((BATCH_NORM, 0),))
    return layer.placement


def _strength(layer: LayerReading, ghost_size: float) -> Strength:
    """Extrapolate the noise of a layer to another ghost size: both variances are proportional to 1/N."""
    factor = layer.ghost_size / ghost_size
    noise = layer.noise["gni"]
    shift, scale = float(np.nanmean(noise.shift.var)) * factor, float(np.nanmean(noise.scale.var)) * factor
    effective_size = 1 / max(shift, scale / 2, 1e-12)
    return Strength(layer.name, ghost_size, math.sqrt(shift), math.sqrt(scale), effective_size)


def _least_and_most_shift(strengths: Sequence[Strength]) -> tuple[Strength, Strength]:
    ordered = sorted(strengths, key=lambda each: each.shift)
    return ordered[0], ordered[-1]


def _power_of_two(size: float, rounding: Callable[[float], int]) -> int:
    """Round to a power of two that is at least 2."""
    return int(2 ** rounding(math.log2(max(size, 2))))


def _listing(strengths: Sequence[Strength]) -> str:
    listed = ", ".join(map(str, strengths[:LISTED]))
    return listed + (f" and {len(strengths) - LISTED} more" if len(strengths) > LISTED else "")


def _names(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:LISTED]))
    return listed + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _percent(std: float) -> str:
    return f"{100 * std:.2g} %"

"""A first ghost size to try, and where its noise would be strong or faint, with the figures behind it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ghostnoise.meter.reading import LayerReading, Reading

# Strengths as effective sizes: the N at which a fully connected layer has noise as strong.
STRONG = 16.0  # the strongest with which the paper's networks did best: its MLP with GNI-16
TYPICAL = 256.0  # that of the layers of the paper's ResNet-18 with GNI-32 (figure 4)
FAINT = 1024.0  # a shift of 3 % of a standard deviation
FIRST = 32
LARGEST = 4096
SHOWN = 6


@dataclass(frozen=True)
class Strength:
    """A layer's noise at a ghost size: standard deviations of the shift and of the squared scale."""

    layer: str
    ghost_size: float
    shift: float
    scale: float
    size: float
    """The effective size of the stronger of the two."""

    def __str__(self) -> str:
        return f"{self.layer!r} (shift {_percent(self.shift)}, squared scale {_percent(self.scale)})"


@dataclass(frozen=True)
class Advice:
    """What `advise` says; prints as sentences."""

    ghost_size: int
    """The first one to try."""
    asked: int
    """The one that was measured."""
    already: tuple[Strength, ...]
    """What each layer has now: by its own ghost size, or as a batch norm by its batch."""
    strong: tuple[Strength, ...]
    """Those of `already` that are strong."""
    faint: tuple[Strength, ...]
    """Layers that would see hardly any noise at the size that was asked about."""
    expected: tuple[Strength, ...]
    """Each layer at the first size to try."""
    about: str

    def __str__(self) -> str:
        return "\n".join([self.about, *self._now(), *self._asked(), *self._first()])

    def _now(self) -> list[str]:
        if not self.already:
            return ["Now: none of these layers has ghost noise, since none is a batch norm or has a ghost size."]
        least, most = _ends(self.already)
        span = f"the shift is {_percent(least.shift)} to {_percent(most.shift)} of a standard deviation"
        if not self.strong:
            return [f"Now: the noise is nowhere strong; {span} (most in {most.layer!r})."]
        return [
            f"Now: the noise is strong already in {_listed(self.strong)}, as in a fully connected layer with ghost "
            f"batches of fewer than {STRONG:g}; overall, {span}."
        ]

    def _asked(self) -> list[str]:
        if not self.faint:
            return [f"Ghost batches of {self.asked}: every layer would see their noise."]
        return [
            f"Ghost batches of {self.asked}: {len(self.faint)} of {len(self.expected)} layers would see hardly any "
            f"noise, 3 % of a standard deviation or less: {_listed(self.faint)}."
        ]

    def _first(self) -> list[str]:
        least, most = _ends(self.expected)
        strongest = min(self.expected, key=lambda each: each.size)
        return [
            f'First size to try: ghostnoise.convert(model, "gni", ghost_size={self.ghost_size}). Its shift would be '
            f"{_percent(least.shift)} ({least.layer!r}) to {_percent(most.shift)} ({most.layer!r}) of a standard "
            f"deviation; the strongest noise ({strongest.layer!r}) is that of a fully connected layer with "
            f"N = {strongest.size:.0f}.",
            f"Then try {max(self.ghost_size // 2, 1)} and {self.ghost_size * 2}, and keep what is best on validation "
            "data. This says how strong the noise is, not what it does to accuracy: that was not measured here.",
        ]


def advise(reading: Reading) -> Advice:
    """Judge the noise that a model has, and the noise that it would have.

    The first ghost size to try is 32, or the power of two nearest to it between two ends: small enough that the
    median layer has noise as strong as that of the paper's ResNet-18 (figure 4), and large enough that no layer has
    noise stronger than that of the paper's MLP. Where these disagree, the second counts.
    """
    layers = [layer for layer in reading.layers if layer.constant < layer.channels]
    if not layers:
        raise ValueError("every channel that was measured is constant: there is no noise to advise on; use other data")
    asked = layers[0].ghost_size
    per_sample = [_at(layer, asked).size / asked for layer in layers]  # the effective size is a multiple of N
    most, least = TYPICAL / float(np.median(per_sample)), STRONG / min(per_sample)
    size = min(max(min(FIRST, _power_of_two(most, math.floor)), _power_of_two(least, math.ceil)), LARGEST)
    now = [(layer, _present(layer)) for layer in layers]
    already = tuple(_at(layer, present) for layer, present in now if present is not None)
    measured = tuple(_at(layer, asked) for layer in layers)
    return Advice(
        ghost_size=size, asked=asked, already=already,
        strong=tuple(each for each in already if each.size < STRONG),
        faint=tuple(each for each in measured if each.size > FAINT),
        expected=tuple(_at(layer, size) for layer in layers),
        about=_about(layers),
    )  # fmt: skip


def _about(layers: list[LayerReading]) -> str:
    first = layers[0]
    each = f"{first.samples / first.batches:.4g} samples"
    channels = sum(layer.channels for layer in layers)
    return (
        f"{_counted(len(layers), 'layer')}, {_counted(channels, 'channel')}, measured on "
        f"{_counted(first.batches, 'batch', 'es')} of {each}."
    )


def _counted(number: int, what: str, several: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else several}"


def _present(layer: LayerReading) -> float | None:
    """The ghost size that a layer has now: its own, or for a batch norm the whole batch."""
    if layer.own is not None:
        return layer.own
    return layer.samples / layer.batches if "BatchNorm" in layer.kind and layer.side == "input" else None


def _at(layer: LayerReading, ghost_size: float) -> Strength:
    """A layer's noise at another ghost size: both variances go with 1/N."""
    factor = layer.ghost_size / ghost_size
    noise = layer.noise["gni"]
    shift, scale = float(np.nanmean(noise.shift.var)) * factor, float(np.nanmean(noise.scale.var)) * factor
    size = 1 / max(shift, scale / 2, 1e-12)
    return Strength(layer.name, ghost_size, math.sqrt(shift), math.sqrt(scale), size)


def _ends(strengths: tuple[Strength, ...]) -> tuple[Strength, Strength]:
    """Those with the least and the most shift."""
    ordered = sorted(strengths, key=lambda each: each.shift)
    return ordered[0], ordered[-1]


def _power_of_two(size: float, rounded: Callable[[float], int]) -> int:
    """Of 2 or more."""
    return int(2 ** rounded(math.log2(max(size, 2))))


def _listed(strengths: tuple[Strength, ...]) -> str:
    shown = ", ".join(map(str, strengths[:SHOWN]))
    return shown + (f" and {len(strengths) - SHOWN} more" if len(strengths) > SHOWN else "")


def _percent(std: float) -> str:
    return f"{100 * std:.2g} %"

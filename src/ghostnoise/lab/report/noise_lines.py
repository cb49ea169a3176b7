"""What the figures of noise show, for paper and page alike: a smooth density of each layer, and those of the laws."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ghostnoise.meter.reading import Distribution, Reading
from ghostnoise.meter.theory import COMPONENTS as PARTS
from ghostnoise.meter.theory import Array, law_cdf
from ghostnoise.meter.theory import Component as Part

SHOWN = 0.005  # the share of a layer's noise that may lie outside of a figure, on each side
FINE = 500  # cells over which a histogram is spread before it is smoothed

SMOOTHEST = 0.1  # of a layer's spread: draws from the same batch are alike, and count for fewer than they are


@dataclass(frozen=True)
class Layer:
    """A layer's line of figures, and the distribution over all of its channels of each part of its noise."""

    name: str
    row: Mapping[str, Any]
    parts: Mapping[Part, Distribution]


@dataclass(frozen=True)
class Digest:
    """A reading without its channels."""

    ghost_size: int
    layers: tuple[Layer, ...]

    @property
    def connected(self) -> bool:
        """Whether all of its layers are fully connected: their samples have one position."""
        return all(layer.row["positions"] == 1 for layer in self.layers)


def digest(reading: Reading) -> Digest:
    """What the report keeps of a reading."""
    layers = [
        Layer(layer.name, layer.row(), {part: getattr(layer.noise["gni"], part).pooled() for part in PARTS})
        for layer in reading.layers
    ]
    return Digest(reading.layers[0].ghost_size, tuple(layers))


@dataclass(frozen=True)
class LawLine:
    """A law of ghost batches of so many samples, and what it is called."""

    law: str
    size: int
    label: str


def law_lines(shown: Digest, part: Part, size: int) -> list[LawLine]:
    """The laws to draw beside a reading: of fully connected layers with ghost batches of `size`.

    Where the network is fully connected itself, that of the scale is there twice, as in the paper and exactly.
    """
    if part == "shift":
        return [LawLine("fc", size, f"shift: N(0, 1/{size})" if shown.connected else f"fully connected, N = {size}")]
    if not shown.connected:
        return [LawLine("fc", size, f"fully connected, N = {size}")]
    lines = [LawLine("fc", size, f"scale: χ²({size})/{size}, the paper’s")]
    return lines + ([LawLine("fc-exact", size, f"scale: χ²({size - 1})/{size}, exact")] if size > 1 else [])


def law_size(shown: Iterable[Digest], given: int | None) -> int:
    """The ghost size of the laws: the one given, that of a fully connected network, or what is as strong as the noise.

    The last is the power of two nearest to the median effective size of the layers.
    """
    digests = list(shown)
    if given is not None:
        return given
    if all(each.connected for each in digests):
        return digests[0].ghost_size
    sizes = [layer.row[f"effective_size_{part}"] for each in digests for layer in each.layers for part in PARTS]
    known = [size for size in sizes if math.isfinite(size)]
    return 2 ** round(math.log2(max(float(np.median(known)), 1))) if known else digests[0].ghost_size


def extent(shown: Iterable[Digest], part: Part, size: int) -> tuple[float, float]:
    """What a figure shows of a part of the noise: nearly all of every layer and of the law; a shift to both sides."""
    ends = [quantiles(each) for digest in shown for layer in digest.layers if (each := layer.parts[part]).n[0]]
    wide = 2.8 * (1 if part == "shift" else math.sqrt(2)) / math.sqrt(size)  # standard deviations of the law
    center = 0 if part == "shift" else 1
    low, high = min([center - wide, *(each[0] for each in ends)]), max([center + wide, *(each[1] for each in ends)])
    if part == "shift":
        return -max(-low, high), max(-low, high)
    return max(low, 0.0), high


def quantiles(found: Distribution, beyond: float = SHOWN) -> tuple[float, float]:
    """Where all but `beyond` of a pooled distribution lies on each side."""
    low, high = _places(found, np.array([beyond, 1 - beyond]))
    return float(low), float(high)


def layer_line(layer: Layer, part: Part, within: tuple[float, float], points: int) -> tuple[Array, Array] | None:
    """Places and a layer's density there, or None if nothing in it varied.

    It is a kernel density with Silverman's bandwidth. Half of the places are evenly spaced and half lie where most of
    the noise is: noise that is narrow in one layer may be wide in another.
    """
    found = layer.parts[part]
    if not found.n[0]:
        return None
    low, high = quantiles(found, SHOWN / 50)
    margin = 0.05 * (high - low)
    most = _places(found, (np.arange(points // 2) + 0.5) / (points // 2))
    wide = np.linspace(low - margin, high + margin, points - points // 2)
    places = np.unique(np.clip(np.concatenate([most, wide]), *within))
    return places, _smoothed(found, places)


def law_line(line: LawLine, part: Part, within: tuple[float, float], points: int) -> tuple[Array, Array]:
    """Places, evenly spaced, and the law's density there."""
    edges = np.linspace(*within, points + 1)
    below = law_cdf(line.law, part, edges, line.size)[0]
    return (edges[1:] + edges[:-1]) / 2, np.diff(below) / np.diff(edges)


def shortened(name: str, width: int) -> str:
    """The end of a long name, which tells layers apart."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _places(found: Distribution, shares: Array) -> Array:
    """Below which these shares of a pooled distribution lie."""
    cdf = found.cdf()[0]
    rising = np.append(np.diff(cdf) > 0, False)  # where nothing was drawn, no share tells places apart
    rising[cdf.argmax()] = True
    places: Array = np.interp(shares, cdf[rising], found.edges[rising])
    return places


def _smoothed(found: Distribution, places: Array) -> Array:
    from scipy.interpolate import PchipInterpolator

    low, high = quantiles(found, SHOWN / 500)
    cells = np.linspace(low, high, FINE + 1)
    mass = np.diff(PchipInterpolator(found.edges, found.cdf()[0])(cells))  # without the steps of wide bins
    centers = (cells[1:] + cells[:-1]) / 2
    width = max(_bandwidth(found), (high - low) / FINE)
    density = _kernels(places, centers, width) @ mass
    if found.center:  # a variance: what the kernels put below 0 belongs above it
        density += _kernels(places, -centers, width) @ mass
    smooth: Array = density
    return smooth


def _bandwidth(found: Distribution) -> float:
    quarter, three = quantiles(found, 0.25)
    spread = min(float(found.std[0]), (three - quarter) / 1.34)
    return float(max(0.9 * found.n[0] ** -0.2, SMOOTHEST) * spread)


def _kernels(places: Array, centers: Array, width: float) -> Array:
    kernels: Array = np.exp(-0.5 * ((places[:, None] - centers) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return kernels

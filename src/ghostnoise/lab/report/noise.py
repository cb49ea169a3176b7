"""Noise recorded by runs: its readings, the density of each layer's noise, and the theoretical laws beside it."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.report.collect import Collected
from ghostnoise.lab.run import Run
from ghostnoise.meter.reading import Distribution, Reading
from ghostnoise.meter.theory import COMPONENTS, Array, Component, law_cdf

FOLDER = "noise"  # in a run folder
FIGURE_COLUMNS = 4
MOST_BYTES = 2**31  # of a reading, which has a distribution for each channel
OUTSIDE = 0.005  # share of a layer's noise that may lie outside of a figure, on each side
FINE_CELLS = 500  # cells into which a histogram is divided before it is smoothed
LEAST_SMOOTHING = (
    0.1  # of a layer's spread: draws from one batch are correlated, so that Silverman's rule is too narrow
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class LayerNoise:
    """A layer's row of figures, and the distribution of each component of its noise over all of its channels."""

    name: str
    row: Mapping[str, Any]
    components: Mapping[Component, Distribution]


@dataclass(frozen=True)
class Digest:
    """A reading without its channels, which is all that a report needs."""

    ghost_size: int
    layers: tuple[LayerNoise, ...]

    @property
    def connected(self) -> bool:
        """Whether all of its layers are fully connected, that is, have one position per sample."""
        return all(layer.row["positions"] == 1 for layer in self.layers)


@dataclass(frozen=True)
class NoiseRun:
    """A run and its readings by epoch, at least one."""

    run: Run
    readings: Mapping[int, Digest]


def digest(reading: Reading) -> Digest:
    """Pool the channels of a reading."""
    layers = [
        LayerNoise(
            layer.name,
            layer.row(),
            {component: getattr(layer.noise["gni"], component).pooled() for component in COMPONENTS},
        )
        for layer in reading.layers
    ]
    return Digest(reading.layers[0].ghost_size, tuple(layers))


# Files


def recorded(folder: Path, warn: Callable[[str], object]) -> dict[int, Reading]:
    """Read the readings in a run folder, by epoch; damaged files are reported and ignored."""
    return _read_each(folder, warn, _load)


def digests(folder: Path, warn: Callable[[str], object]) -> dict[int, Digest]:
    """Read the readings in a run folder without their channels; an unchanged file is read only once."""
    return _read_each(folder, warn, lambda path: _cached(path, path.stat().st_mtime_ns, path.stat().st_size))


def noise_runs(collected: Collected, warn: Callable[[str], object]) -> list[NoiseRun]:
    """List the runs that have recorded noise, in the experiment's order."""
    found = [NoiseRun(run, digests(run.folder, warn)) for run in collected.runs if run.folder]
    return [each for each in found if each.readings]


def first_of_each_method(runs: Iterable[NoiseRun]) -> list[NoiseRun]:
    """Select one run of each method, which the page shows."""
    first: dict[str, NoiseRun] = {}
    for each in runs:
        first.setdefault(each.run.label, each)
    return list(first.values())


def spread(readings: Mapping[int, Value], most: int = FIGURE_COLUMNS) -> dict[int, Value]:
    """Select at most `most` epochs: the first, the last, and others as evenly spaced as possible."""
    epochs = sorted(readings)
    last = len(epochs) - 1
    places = {round(last * k / (most - 1)) for k in range(most)} if last >= most else set(range(last + 1))
    return {epochs[place]: readings[epochs[place]] for place in sorted(places)}


def _read_each(folder: Path, warn: Callable[[str], object], read: Callable[[Path], Value]) -> dict[int, Value]:
    found: dict[int, Value] = {}
    for path in sorted((folder / FOLDER).glob("epoch-*.npz")):
        if not (named := re.fullmatch(r"epoch-(\d+)\.npz", path.name)):
            continue
        try:
            found[int(named[1])] = read(path)
        except Exception as error:  # a damaged file can raise anything
            reason = str(error) or type(error).__name__
            warn(f"{path} is damaged ({reason}); the reading is ignored and the file is left unchanged")
    return dict(sorted(found.items()))


def _load(path: Path) -> Reading:
    return Reading.load(io.BytesIO(read_bytes(path, MOST_BYTES)))  # numpy does not close a damaged file


@lru_cache(maxsize=512)
def _cached(path: Path, _time: int, _size: int) -> Digest:
    return digest(_load(path))


# Curves


@dataclass(frozen=True)
class LawLine:
    """A law of ghost batches of `size` samples, and its label."""

    law: str
    size: int
    label: str


def law_lines(shown: Digest, component: Component, size: int) -> list[LawLine]:
    """List the laws to draw beside a reading: those of fully connected layers with ghost batches of `size`.

    If the network is fully connected, the law of the scale is drawn twice: as in the paper, and exactly.
    """
    if component == "shift":
        return [LawLine("fc", size, f"shift: N(0, 1/{size})" if shown.connected else f"fully connected, N = {size}")]
    if not shown.connected:
        return [LawLine("fc", size, f"fully connected, N = {size}")]
    lines = [LawLine("fc", size, f"scale: χ²({size})/{size}, the paper’s")]
    return lines + ([LawLine("fc-exact", size, f"scale: χ²({size - 1})/{size}, exact")] if size > 1 else [])


def law_size(shown: Iterable[Digest], given: int | None) -> int:
    """Choose the ghost size of the laws: `given`, or that of a fully connected network, or an effective size.

    The effective size is the power of two nearest to the median over layers, so that the law is about as strong as
    the noise.
    """
    digests = list(shown)
    if given is not None:
        return given
    if all(each.connected for each in digests):
        return digests[0].ghost_size
    sizes = [
        layer.row[f"effective_size_{component}"]
        for each in digests
        for layer in each.layers
        for component in COMPONENTS
    ]
    known = [size for size in sizes if math.isfinite(size)]
    return 2 ** round(math.log2(max(float(np.median(known)), 1))) if known else digests[0].ghost_size


def extent(shown: Iterable[Digest], component: Component, size: int) -> tuple[float, float]:
    """Return the range of a figure, which contains nearly all noise of every layer and of the law.

    The range of the shift is symmetric around 0; that of the scale does not extend below 0.
    """
    ends = [
        quantiles(each) for digest in shown for layer in digest.layers if (each := layer.components[component]).n[0]
    ]
    wide = 2.8 * (1 if component == "shift" else math.sqrt(2)) / math.sqrt(size)  # standard deviations of the law
    center = 0 if component == "shift" else 1
    low, high = min([center - wide, *(each[0] for each in ends)]), max([center + wide, *(each[1] for each in ends)])
    if component == "shift":
        return -max(-low, high), max(-low, high)
    return max(low, 0.0), high


def quantiles(found: Distribution, beyond: float = OUTSIDE) -> tuple[float, float]:
    """Return the `beyond` and 1 - `beyond` quantiles of a pooled distribution."""
    low, high = _quantiles(found, np.array([beyond, 1 - beyond]))
    return float(low), float(high)


def layer_line(
    layer: LayerNoise, component: Component, within: tuple[float, float], points: int
) -> tuple[Array, Array] | None:
    """Return the kernel density (Silverman's bandwidth) of a layer's noise and where it is evaluated.

    Half of the points are evenly spaced and half lie at quantiles, because the noise of one layer may be much narrower
    than that of another. None if nothing in the layer varied.
    """
    found = layer.components[component]
    if not found.n[0]:
        return None
    low, high = quantiles(found, OUTSIDE / 50)
    margin = 0.05 * (high - low)
    dense = _quantiles(found, (np.arange(points // 2) + 0.5) / (points // 2))
    even = np.linspace(low - margin, high + margin, points - points // 2)
    x = np.unique(np.clip(np.concatenate([dense, even]), *within))
    return x, _smoothed(found, x)


def law_line(line: LawLine, component: Component, within: tuple[float, float], points: int) -> tuple[Array, Array]:
    """Return evenly spaced points and the law's density there."""
    edges = np.linspace(*within, points + 1)
    below = law_cdf(line.law, component, edges, line.size)[0]
    return (edges[1:] + edges[:-1]) / 2, np.diff(below) / np.diff(edges)


def shortened(name: str, width: int) -> str:
    """Keep the end of a long name, which distinguishes layers."""
    return name if len(name) <= width else "…" + name[1 - width :]


def distinct(names: Sequence[str], width: int) -> list[str]:
    """Shorten long names so that they stay different: to their ends, or with abbreviated parts, or with numbers.

    >>> distinct(["encoder.layer.3.output.norm", "encoder.layer.4.output.norm"], 12)
    ['e.l.3.o.norm', 'e.l.4.o.norm']
    """
    ends = [shortened(name, width) for name in names]
    abbreviated = [_abbreviated(name, width) for name in names]
    for short in (ends, abbreviated):
        if len(set(short)) == len(set(names)) and max(map(len, short), default=0) <= width:
            return short
    numbers = [f"{number}:" for number in range(1, len(names) + 1)]
    return [number + shortened(name, max(width - len(number), 2)) for number, name in zip(numbers, names, strict=True)]


def _abbreviated(name: str, width: int) -> str:
    """Abbreviate the parts of a dotted name to their first letter and final digits, from the left, until it fits."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if sum(map(len, parts)) + len(parts) - 1 <= width:
            break
        digits = len(part) - len(part.rstrip("0123456789"))
        parts[at] = part if digits == len(part) else part[0] + part[len(part) - digits :]
    return ".".join(parts)


def _quantiles(found: Distribution, shares: Array) -> Array:
    cdf = found.cdf()[0]
    rising = np.append(np.diff(cdf) > 0, False)  # empty bins would make the inverse ambiguous
    rising[cdf.argmax()] = True
    values: Array = np.interp(shares, cdf[rising], found.edges[rising])
    return values


def _smoothed(found: Distribution, x: Array) -> Array:
    from scipy.interpolate import PchipInterpolator

    low, high = quantiles(found, OUTSIDE / 500)
    cells = np.linspace(low, high, FINE_CELLS + 1)
    mass = np.diff(PchipInterpolator(found.edges, found.cdf()[0])(cells))  # smooths the steps of wide bins
    centers = (cells[1:] + cells[:-1]) / 2
    width = max(_bandwidth(found), (high - low) / FINE_CELLS)
    density = _kernels(x, centers, width) @ mass
    if found.center:  # variances are not negative: reflect what the kernels put below 0
        density += _kernels(x, -centers, width) @ mass
    smooth: Array = density
    return smooth


def _bandwidth(found: Distribution) -> float:
    lower, upper = quantiles(found, 0.25)
    spread = min(float(found.std[0]), (upper - lower) / 1.34)
    return float(max(0.9 * found.n[0] ** -0.2, LEAST_SMOOTHING) * spread)


def _kernels(x: Array, centers: Array, width: float) -> Array:
    kernels: Array = np.exp(-0.5 * ((x[:, None] - centers) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return kernels

"""Results of a meter: per-channel arrays, per-layer summaries, and their file format."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ghostnoise.laws import Dof
from ghostnoise.meter.code import Placement
from ghostnoise.meter.gap import Gap, channel_mean, root_mean
from ghostnoise.meter.theory import COMPONENTS, Array, Component, effective_size, kolmogorov_smirnov, law_cdf, laws_of

FORMAT = 1
STORED_NAMES = {"own_ghost_size": "own"}  # fields of `LayerReading` that have another name in files
PARTS_OF_GAP = ("systematic", "random")  # fields of `Gap` that older files do not have


@dataclass(frozen=True, eq=False, repr=False)
class Distribution:
    """Histogram and moments of the values of each channel; the moments are NaN for a channel without values.

    Bins are narrow around `center`, where the noise of layers with many positions is, and wider further out.
    `counts` (C, K + 2) has one column for each of the K bins between the `edges` (K + 1,), and the values below and
    above all edges in its first and last column.
    """

    center: float
    edges: Array
    counts: Array
    mean: Array
    var: Array
    skewness: Array
    kurtosis: Array
    """Excess kurtosis: 0 for a normal distribution."""

    @classmethod
    def from_powers(cls, center: float, edges: Array, counts: Array, powers: Array) -> "Distribution":
        """Compute the moments from the means of (value - center)^k for k = 1 to 4 (4, C)."""
        first, second, third, fourth = powers
        var = np.maximum(second - first**2, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            skewness = (third - 3 * first * second + 2 * first**3) / var**1.5
            kurtosis = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4) / var**2 - 3
        return cls(center, edges, counts, center + first, var, skewness, kurtosis)

    @property
    def n(self) -> Array:
        """Number of values in each channel (C,)."""
        total: Array = self.counts.sum(1)
        return total

    @property
    def std(self) -> Array:
        """Standard deviation (C,)."""
        root: Array = np.sqrt(self.var)
        return root

    def cdf(self) -> Array:
        """Empirical cumulative distribution function at the edges (C, K + 1): the fraction of values below each."""
        with np.errstate(invalid="ignore"):
            below: Array = self.counts.cumsum(1)[:, :-1] / self.n[:, None]
        return below

    def density(self) -> Array:
        """Probability density in each bin (C, K)."""
        density: Array = np.diff(self.cdf(), axis=1) / np.diff(self.edges)
        return density

    def pooled(self) -> "Distribution":
        """Distribution of the values of all channels together, as a single channel."""
        used = self.n > 0
        if not used.any():
            first = (self.counts[:1], self.mean[:1], self.var[:1], self.skewness[:1], self.kurtosis[:1])
            return Distribution(self.center, self.edges, *first)
        powers = np.average(self._powers(used), axis=1, weights=self.n[used], keepdims=True)
        counts = self.counts[used].sum(0, keepdims=True, dtype=np.int64)
        return Distribution.from_powers(self.center, self.edges, counts, powers)

    def _powers(self, channels: Array) -> Array:
        """Inverse of `from_powers`, for some of the channels."""
        first, var = self.mean[channels] - self.center, self.var[channels]
        third = np.nan_to_num(self.skewness[channels]) * var**1.5  # a channel without variance has no skewness
        fourth = (np.nan_to_num(self.kurtosis[channels]) + 3) * var**2
        return np.stack(
            [
                first,
                var + first**2,
                third + 3 * first * var + first**3,
                fourth + 4 * first * third + 6 * first**2 * var + first**4,
            ]
        )

    def __repr__(self) -> str:
        return (
            f"Distribution({len(self.counts)} channels, {self.n.max(initial=0)} values per channel, "
            f"mean={channel_mean(self.mean):.3g}, std={channel_mean(self.std):.3g})"
        )


@dataclass(frozen=True, eq=False)
class NoiseReading:
    """Distributions of the two components of ghost noise, relative to the mean μ and the variance σ² of the batch."""

    shift: Distribution
    """(m - μ)/σ for the mean m of a ghost batch; 0 without noise."""
    scale: Distribution
    """s²/σ² for the variance s² of a ghost batch; 1 without noise."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerReading:
    """Measurements of a layer. Arrays have one entry per channel (C,), NaN for channels that were constant."""

    name: str
    names: tuple[str, ...]
    """All names of the module in the model."""
    kind: str
    """Name of the module's type."""
    side: str
    """Whether the "input" or the "output" of the module was measured."""
    own_ghost_size: int | None
    """Ghost size of the layer itself, or of noise that `convert` inserted at it."""
    ghost_size: int
    """Ghost size N that was measured."""
    spatial: float
    """Positions in a sample, S; the harmonic mean over batches if they vary. With masks, that of a batch is the mean
    number of valid positions of its samples."""
    batches: int
    samples: int
    skipped: int
    """Batches that were not measured: fewer than two samples, not counting those without valid positions, or values
    that are not finite."""
    mean: Array
    """Average over batches of the batch mean."""
    var: Array
    """Average over batches of the biased batch variance, which normalization uses."""
    within: Array
    """Intra-sample variance σ_I², as a fraction of the channel's variance."""
    between: Array
    """Inter-sample variance σ_B², as a fraction of the channel's variance: 1 - `within`, but not below 0."""
    noise: Mapping[str, NoiseReading]
    """Ghost noise by method: "gni" draws ghost batches with replacement, "gbn" partitions a shuffled batch."""
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    """Difference between training and inference by method: "bn", "gbn", "xbn" and "gni"."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Error messages of methods that could not normalize every batch, and whose gap is therefore incomplete."""
    never_updated: bool = False
    """Whether the running statistics of the layer still had their initial values before the first measured batch."""
    padded: float = 0.0
    """Fraction of the samples that end in repeated positions, as padded sequences do; 0 with masks and for images."""
    placement: Placement | None = None
    """How the layer can get ghost noise; None in files that were written before this was recorded."""

    @property
    def channels(self) -> int:
        """Number of channels, C."""
        return len(self.mean)

    @property
    def constant(self) -> int:
        """Number of channels that were constant in every batch."""
        return int(np.isnan(self.within).sum())

    def effective_size(self, component: Component, method: str = "gni", dof: Dof = "exact") -> Array:
        """Effective ghost size of each channel: the N at which a fully connected layer has noise of its variance."""
        return effective_size(component, self._noise(component, method).var, dof)

    def layer_effective_size(self, component: Component, method: str = "gni", dof: Dof = "exact") -> float:
        """Effective ghost size of the layer, from the average of its channels' noise variances."""
        var = channel_mean(self._noise(component, method).var)
        return float(effective_size(component, np.array(var), dof))

    def law(self, law: str, component: Component, at: Array) -> Array:
        """Evaluate the CDF of a law of `theory.LAWS` with the measured variances at points `at` (K,): (C, K).

        The fully connected laws do not depend on the channel and give (1, K).
        """
        return law_cdf(law, component, at, self.ghost_size, self.spatial, self.within, self.between)

    def distances(self, component: Component, method: str = "gni") -> dict[str, Array]:
        """Kolmogorov-Smirnov distance of each channel's noise from each law."""
        noise = self._noise(component, method)
        return {
            law: kolmogorov_smirnov(noise.cdf(), self.law(law, component, noise.edges)) for law in laws_of(component)
        }

    @cached_property
    def layer_distances(self) -> dict[tuple[Component, str], float]:
        """Kolmogorov-Smirnov distance of the layer's GNI noise from each law, by component and law.

        It compares the noise of all channels together with the mixture of the channels' laws.
        """
        distances: dict[tuple[Component, str], float] = {}
        for component in COMPONENTS:
            noise = self._noise(component, "gni")
            pooled = noise.pooled().cdf()[0]
            weights = noise.n / max(noise.n.sum(), 1)
            for law in laws_of(component):
                cdf = self.law(law, component, noise.edges)
                mixture = cdf[0] if len(cdf) == 1 else weights @ np.nan_to_num(cdf)
                distances[component, law] = float(kolmogorov_smirnov(pooled, mixture))
        return distances

    def row(self) -> dict[str, Any]:
        """Summary of the layer as one table row of numbers and strings; channels are averaged."""
        row: dict[str, Any] = {
            "layer": self.name, "kind": self.kind, "side": self.side, "channels": self.channels,
            "constant": self.constant, "positions": self.spatial, "batches": self.batches, "samples": self.samples,
            "skipped": self.skipped, "ghost_size": self.ghost_size, "own_ghost_size": self.own_ghost_size,
            "between": channel_mean(self.between), "within": channel_mean(self.within),
        }  # fmt: skip
        for method in self.noise:
            for component in COMPONENTS:
                row[f"{method}_{component}_std"] = channel_mean(self._noise(component, method).var) ** 0.5
        for component in COMPONENTS:
            row[f"effective_size_{component}"] = self.layer_effective_size(component)
        row["effective_size_scale_paper"] = self.layer_effective_size("scale", dof="paper")
        row |= {f"ks_{component}_{law}": distance for (component, law), distance in self.layer_distances.items()}
        for method, gap in self.gaps.items():
            row |= {
                f"{method}_difference": channel_mean(gap.difference),
                f"{method}_relative": channel_mean(gap.relative),
                f"{method}_largest": float(gap.largest.max()),
                f"{method}_range_ratio": channel_mean(gap.range_ratio),
                f"{method}_systematic": root_mean(gap.systematic),
                f"{method}_random": root_mean(gap.random),
                f"{method}_bound": gap.bound,
                f"{method}_self_share": gap.self_share,
            }
        return row

    def _noise(self, component: Component, method: str) -> Distribution:
        noise: Distribution = getattr(self.noise[method], component)
        return noise

    def __repr__(self) -> str:
        constant = f" ({self.constant} constant)" if self.constant else ""
        skipped = f" ({self.skipped} skipped)" if self.skipped else ""
        sizes = {component: self.layer_effective_size(component) for component in COMPONENTS}
        return (
            f"LayerReading({self.name!r}: {self.side} of {self.kind}, channels={self.channels}{constant}, "
            f"positions={self.spatial:.4g}, ghost_size={self.ghost_size}, batches={self.batches}{skipped}, "
            f"samples={self.samples}, effective size: shift {sizes['shift']:.4g}, scale {sizes['scale']:.4g})"
        )


class Reading(Mapping[str, LayerReading]):
    """Layers by name, in the order of their first call. A shared module is found under each of its names."""

    def __init__(self, layers: list[LayerReading]) -> None:
        self.layers = tuple(layers)
        self._by_name = {name: layer for layer in layers for name in layer.names}

    def __getitem__(self, name: str) -> LayerReading:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and _equal(self.layers, other.layers)

    def __repr__(self) -> str:
        channels = sum(layer.channels for layer in self.layers)
        about = [f"{len(self)} layer{'' if len(self) == 1 else 's'}", f"{channels} channels"]
        for name in ("ghost_size", "batches", "samples"):
            values = {getattr(layer, name) for layer in self.layers} or {0}
            about.append(f"{name}={min(values)}" + (f"..{max(values)}" if len(values) > 1 else ""))
        return f"Reading({', '.join(about)})"

    def rows(self) -> list[dict[str, Any]]:
        """Summary of each layer as a table row; see `LayerReading.row`."""
        return [layer.row() for layer in self.layers]

    def save(self, path: str | Path) -> None:
        """Write the reading to a file in numpy's .npz format."""
        with open(path, "wb") as file:
            self.write(file)

    def write(self, file: Any) -> None:
        """Write the reading to an open binary file."""
        arrays: dict[str, Array] = {}
        metadata = []
        for number, layer in enumerate(self.layers):
            tree, gaps = asdict(layer), {}
            noise = tree.pop("noise")
            for method, gap in tree.pop("gaps").items():
                gaps[method] = _without_arrays(gap)
                arrays |= _arrays(f"{number}/gaps/{method}", gap)
            arrays |= _arrays(str(number), tree)
            for method, components in noise.items():
                for component, distribution in components.items():
                    arrays |= _arrays(f"{number}/noise/{method}/{component}", distribution)
            plain = {STORED_NAMES.get(name, name): value for name, value in _without_arrays(tree).items()}
            metadata.append(plain | {"gaps": gaps, "noise": list(noise)})
        text = json.dumps({"format": FORMAT, "layers": metadata})
        np.savez_compressed(file, allow_pickle=False, about=np.array(text), **arrays)

    @classmethod
    def load(cls, path: Any) -> "Reading":
        """Read a file that `save` or `write` wrote, given its path or as an open binary file."""
        if isinstance(path, str | Path):
            with open(path, "rb") as file:  # numpy does not close a file that it cannot read
                return cls.load(file)
        file, path = path, getattr(path, "name", path)
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (ValueError, TypeError, EOFError, BadZipFile, zlib.error):  # numpy's message is about pickles or zip
            arrays = {}
        if "about" not in arrays:
            raise ValueError(
                f"{path} does not contain a reading: must be a file that Reading.save wrote; give the path of one"
            )
        about = json.loads(str(arrays.pop("about")))
        if about["format"] != FORMAT:
            raise ValueError(f"{path} has format {about['format']}: must be {FORMAT}; measure again")
        return cls([_load_layer(str(number), metadata, arrays) for number, metadata in enumerate(about["layers"])])


def _equal(one: Any, other: Any) -> bool:
    """Compare nested dataclasses, mappings, tuples and arrays; NaN equals NaN."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _without_arrays(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if not isinstance(value, np.ndarray)}


def _arrays(prefix: str, tree: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays of a dataclass that was converted to a dict, by their name in the file."""
    arrays = {f"{prefix}/{name}": value for name, value in tree.items() if isinstance(value, np.ndarray)}
    if "center" in tree:
        arrays[f"{prefix}/center"] = np.array(tree["center"])
    if "counts" in tree:  # 32 bits are enough for nearly all files, and halve their size
        arrays[f"{prefix}/counts"] = tree["counts"].astype(np.uint32 if tree["counts"].max() < 2**32 else np.uint64)
    return arrays


def _load_layer(prefix: str, metadata: dict[str, Any], arrays: dict[str, Array]) -> LayerReading:
    def distribution(path: str) -> Distribution:
        stored: dict[str, Any] = {each.name: arrays[f"{path}/{each.name}"] for each in fields(Distribution)}
        return Distribution(**stored | {"center": float(stored["center"]), "counts": stored["counts"].astype(np.int64)})

    values = dict(metadata)
    noise = {
        method: NoiseReading(**{name: distribution(f"{prefix}/noise/{method}/{name}") for name in COMPONENTS})
        for method in values.pop("noise")
    }
    gaps: dict[str, Gap] = {}
    for method, plain in values.pop("gaps").items():
        names = [each.name for each in fields(Gap) if each.name not in plain]
        path = f"{prefix}/gaps/{method}"
        found = dict.fromkeys(PARTS_OF_GAP, np.full_like(arrays[f"{path}/largest"], np.nan))
        found |= {name: arrays[f"{path}/{name}"] for name in names if name not in found or f"{path}/{name}" in arrays}
        gaps[method] = Gap(**plain | found)
    for name, stored in STORED_NAMES.items():
        values[name] = values.pop(stored)
    values["names"] = tuple(values["names"])
    if placement := values.get("placement"):
        values["placement"] = Placement(**placement | {"types": tuple(map(tuple, placement["types"]))})
    values |= {name: arrays[f"{prefix}/{name}"] for name in ("mean", "var", "within", "between")}
    return LayerReading(**values, noise=noise, gaps=gaps)

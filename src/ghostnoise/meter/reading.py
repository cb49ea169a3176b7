"""What a meter has read: numpy arrays by channel, figures by layer, and files."""

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
from ghostnoise.meter.curves import LAWS, Part, distance, effective_size, law_cdf
from ghostnoise.meter.gap import Gap
from ghostnoise.meter.histogram import Array, Distribution

PARTS: tuple[Part, Part] = ("shift", "scale")
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of ghost batches, in units of the batch's own moments: 0 and 1 would be none.

    `shift` is (m - μ)/σ and `scale` is s²/σ², with the mean m and the variance s² of a ghost batch.
    """

    shift: Distribution
    scale: Distribution


@dataclass(frozen=True, eq=False)
class LayerReading:
    """A layer: arrays have an entry for each channel (C,), NaN for one that was constant."""

    name: str
    names: tuple[str, ...]
    """All that the module has in the model."""
    kind: str
    side: str
    """Whether the module's input or its output was measured."""
    own: int | None
    """The ghost size that the layer has itself, or noise that conversion inserted at it."""
    ghost_size: int
    spatial: float
    """Positions in a sample, S; their harmonic mean if they differ."""
    batches: int
    samples: int
    skipped: int
    """Batches of fewer than two samples, or with values that are not finite."""
    mean: Array
    """Of the batches' means."""
    var: Array
    """Of the batches' variances; biased, as they normalize."""
    within: Array
    """Intra-sample variance σ_I², as a share of the channel's."""
    between: Array
    """Inter-sample variance σ_B², as a share of the channel's, not below 0; with σ_I² it is 1, unless held at 0."""
    noise: Mapping[str, Noise]
    """By method: "gni", drawn with replacement, and "gbn", the parts of a shuffled batch."""
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    """By method: "bn", "gbn", "xbn" and "gni"."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why a method has no gap, or not that of every batch."""

    @property
    def channels(self) -> int:
        """How many there are."""
        return len(self.mean)

    @property
    def constant(self) -> int:
        """How many never varied."""
        return int(np.isnan(self.within).sum())

    def effective_size(self, part: Part, method: str = "gni", dof: Dof = "exact") -> Array:
        """The N at which the law of fully connected layers is as strong, for each channel."""
        return effective_size(part, getattr(self.noise[method], part).var, dof)

    def typical_size(self, part: Part, method: str = "gni", dof: Dof = "exact") -> float:
        """The same for the layer: for the average of its channels' variances."""
        return float(effective_size(part, np.array(_average(getattr(self.noise[method], part).var)), dof))

    def law(self, law: str, part: Part, at: Array) -> Array:
        """A law of `curves.LAWS` at places `at` (K,), with the variances measured: (C, K), or (1, K) without them."""
        return law_cdf(law, part, at, self.ghost_size, self.spatial, self.within, self.between)

    def distances(self, part: Part, method: str = "gni") -> dict[str, Array]:
        """The Kolmogorov-Smirnov distance to each law, for each channel."""
        found: Distribution = getattr(self.noise[method], part)
        return {law: distance(found.cdf(), self.law(law, part, found.edges)) for law in laws_of(part)}

    @cached_property
    def layer_distances(self) -> dict[tuple[Part, str], float]:
        """By part and law: the same for the layer, for all that was drawn in its channels (GNI)."""
        made: dict[tuple[Part, str], float] = {}
        for part in PARTS:
            found: Distribution = getattr(self.noise["gni"], part)
            pooled = found.pooled().cdf()[0]
            shares = found.n / max(found.n.sum(), 1)
            for law in laws_of(part):
                curve = self.law(law, part, found.edges)
                expected = curve[0] if len(curve) == 1 else shares @ np.nan_to_num(curve)
                made[part, law] = float(distance(pooled, expected))
        return made

    def row(self) -> dict[str, Any]:
        """The layer in a line of figures."""
        row: dict[str, Any] = {
            "layer": self.name, "kind": self.kind, "side": self.side, "channels": self.channels,
            "constant": self.constant, "positions": self.spatial, "batches": self.batches, "samples": self.samples,
            "skipped": self.skipped, "ghost_size": self.ghost_size, "own_ghost_size": self.own,
            "between": _average(self.between), "within": _average(self.within),
        }  # fmt: skip
        for method, noise in self.noise.items():
            for part in PARTS:
                row[f"{method}_{part}_std"] = _average(getattr(noise, part).var) ** 0.5
        for part in PARTS:
            row[f"effective_size_{part}"] = self.typical_size(part)
        row["effective_size_scale_paper"] = self.typical_size("scale", dof="paper")
        row |= {f"ks_{part}_{law}": found for (part, law), found in self.layer_distances.items()}
        for method, gap in self.gaps.items():
            row |= {
                f"{method}_difference": _average(gap.difference), f"{method}_relative": _average(gap.relative),
                f"{method}_largest": float(gap.largest.max()),
                f"{method}_range_ratio": _average(gap.range_ratio),
                f"{method}_bound": gap.bound, f"{method}_self_share": gap.self_share,
            }  # fmt: skip
        return row


class Reading(Mapping[str, LayerReading]):
    """The layers by name, in the order in which they were first called; any name of a shared module finds it."""

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
        return isinstance(other, Reading) and _same(self.layers, other.layers)

    def rows(self) -> list[dict[str, Any]]:
        """Each layer in a line of figures."""
        return [layer.row() for layer in self.layers]

    def save(self, path: str | Path) -> None:
        """Write all that was read to a file of numpy's .npz format."""
        with open(path, "wb") as file:
            self.write(file)

    def write(self, file: Any) -> None:
        """Write all that was read to an open file."""
        arrays: dict[str, Array] = {}
        told = []
        for number, layer in enumerate(self.layers):
            tree, gaps = asdict(layer), {}
            noise = tree.pop("noise")
            for method, gap in tree.pop("gaps").items():
                gaps[method] = {name: value for name, value in gap.items() if not isinstance(value, np.ndarray)}
                arrays |= _flat(f"{number}/gaps/{method}", gap)
            arrays |= _flat(str(number), tree)
            for method, parts in noise.items():
                for part, found in parts.items():
                    arrays |= _flat(f"{number}/noise/{method}/{part}", found)
            plain = {name: value for name, value in tree.items() if not isinstance(value, np.ndarray)}
            told.append(plain | {"gaps": gaps, "noise": list(noise)})
        text = json.dumps({"format": FORMAT, "layers": told})
        np.savez_compressed(file, allow_pickle=False, about=np.array(text), **arrays)

    @classmethod
    def load(cls, path: Any) -> "Reading":
        """Read such a file, by its path or open."""
        if isinstance(path, str | Path):
            with open(path, "rb") as file:  # numpy would leave a damaged one open
                return cls.load(file)
        file, path = path, getattr(path, "name", path)
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (ValueError, TypeError, EOFError, BadZipFile, zlib.error):  # numpy's words are of pickles and archives
            arrays = {}
        if "about" not in arrays:
            raise ValueError(f"{path} holds no reading: must be a file that Reading.save wrote; give the path of one")
        about = json.loads(str(arrays.pop("about")))
        if about["format"] != FORMAT:
            raise ValueError(f"{path} has format {about['format']}: must be {FORMAT}; measure again")
        return cls([_layer(str(number), told, arrays) for number, told in enumerate(about["layers"])])


def laws_of(part: Part) -> tuple[str, ...]:
    """The laws that a part of the noise has: the shift has no other one around the ghost batch's own mean."""
    return tuple(law for law, (_, dof) in LAWS.items() if part == "scale" or dof == "paper")


def _same(one: Any, other: Any) -> bool:
    """They hold the same figures; NaN is the same as NaN."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _average(values: Array) -> float:
    """Over the channels that have a value."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _flat(prefix: str, tree: Mapping[str, Any]) -> dict[str, Array]:
    made = {f"{prefix}/{name}": value for name, value in tree.items() if isinstance(value, np.ndarray)}
    if "center" in tree:
        made[f"{prefix}/center"] = np.array(tree["center"])
    if "counts" in tree:
        made[f"{prefix}/counts"] = tree["counts"].astype(np.uint32 if tree["counts"].max() < 2**32 else np.uint64)
    return made


def _layer(prefix: str, told: dict[str, Any], arrays: dict[str, Array]) -> LayerReading:
    def distribution(path: str) -> Distribution:
        kept: dict[str, Any] = {each.name: arrays[f"{path}/{each.name}"] for each in fields(Distribution)}
        return Distribution(**kept | {"center": float(kept["center"]), "counts": kept["counts"].astype(np.int64)})

    noise = {
        method: Noise(**{part: distribution(f"{prefix}/noise/{method}/{part}") for part in PARTS})
        for method in told.pop("noise")
    }
    gaps: dict[str, Any] = told.pop("gaps")
    for method, plain in gaps.items():
        lacking = [each.name for each in fields(Gap) if each.name not in plain]
        gaps[method] = Gap(**plain | {key: arrays[f"{prefix}/gaps/{method}/{key}"] for key in lacking})
    own: dict[str, Any] = {key: arrays[f"{prefix}/{key}"] for key in ("mean", "var", "within", "between")}
    own["names"] = tuple(told.pop("names"))
    return LayerReading(**told, **own, noise=noise, gaps=gaps)

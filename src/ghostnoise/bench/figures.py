"""Draw records: a panel per row, a line per contender, ratios on a shared logarithmic axis."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ghostnoise.bench import allocator
from ghostnoise.bench.settings import Record
from ghostnoise.bench.tables import name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"torch": "black", "peer": "tab:orange", "limit": "gray", "ours": "tab:green", "flex": "tab:blue"}
HEADINGS = {
    "layers": "time of forward + backward",
    "net": "time of a training step",
    "recipe": "time of a training step",
    "lab": "time of a few training steps",
    "memory": "bytes of forward + backward",
}
# The same axis in all panels, so that they can be compared; values outside of it are written at its end.
LOW, HIGH = 0.1, 12.0


class Series(NamedTuple):
    """One kind of mark: the field `value` of the records of an allocator mode, or of all modes."""

    label: str
    value: str
    mode: str | None = None

    def shows(self, record: Record) -> bool:
        """Return whether the record has a mark in this series."""
        return self.mode in (None, record["allocator"])


def draw(records: list[Record], path: Path) -> Path:
    """Save a figure of ratios to the layer of `torch.nn`; times have a line from p20 to p80."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = list(dict.fromkeys(record["row"] for record in records))
    wide = min(len(rows), 2)
    high = math.ceil(len(rows) / wide)
    most = max(len({name(record) for record in records if record["row"] == row}) for row in rows)
    size = (6.5 * wide, high * (0.75 + 0.23 * most) + 0.8)
    figure, grid = plt.subplots(high, wide, figsize=size, layout="constrained", squeeze=False)
    series = _series(records)
    for axes, row in zip(grid.flat, rows, strict=False):
        _panel(axes, row, [record for record in records if record["row"] == row], series)
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    figure.suptitle(_title(records, series), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _series(records: list[Record]) -> list[Series]:
    if records[0]["bench"] == "memory":
        return [Series("kept for the backward", "ratio_kept"), Series("peak", "ratio_peak")]
    modes = list(dict.fromkeys(record["allocator"] for record in records))
    return [Series(allocator.WORDS[mode], "ratio_p50", mode) for mode in modes]


def _panel(axes: "Axes", row: str, records: list[Record], series: list[Series]) -> None:
    names = list(dict.fromkeys(name(record) for record in records))
    for number, one in enumerate(series):
        for record in filter(one.shows, records):
            _mark(axes, record, record[one.value], names.index(name(record)), number, len(series))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(row, fontsize=9, loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _ratio_axis(axes)


def _mark(axes: "Axes", record: Record, ratio: float, line: int, number: int, count: int) -> None:
    """Draw a dot, hollow and slightly lower for the second series; outside of the axis, a number at its end."""
    color = COLORS[record["kind"]]
    if LOW <= ratio <= HIGH:
        at = line + 0.15 * (2 * number - (count - 1))
        if "p50_ms" in record:
            ends = [ratio * record[end] / record["p50_ms"] for end in ("p20_ms", "p80_ms")]
            axes.hlines(at, *ends, color=color, linewidth=2, alpha=0.4)
        axes.plot(ratio, at, "o", color=color, markersize=5, markerfacecolor="white" if number else color)
        return
    above = ratio > HIGH
    text, edge = (f"{ratio:.3g} ▸", HIGH) if above else (f"◂ {ratio:.2g}", LOW)
    inwards = 34 * (number - count + 1 if above else number)
    axes.annotate(
        text, (edge, line), (inwards, 0), textcoords="offset points", color=color, fontsize=7,
        ha="right" if above else "left", va="center",
    )  # fmt: skip


def _ratio_axis(axes: "Axes") -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(LOW, HIGH)
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axes.tick_params(axis="x", labelsize=8)


def _title(records: list[Record], series: list[Series]) -> str:
    first = records[0]
    baselines = dict.fromkeys(record["contender"] for record in records if record["kind"] == "torch")
    measure = f"{HEADINGS[first['bench']]}, ratio to {' / '.join(baselines)}"
    labels = f"filled: {series[0].label}; hollow: {series[1].label}" if len(series) > 1 else series[0].label
    conditions = (
        f"{first['device_name']}, {first['threads']} threads, float32, torch {first['torch']}, "
        f"ghostnoise {first['ghostnoise']}, {first['date']}"
    )
    warning = ["a quick run on tiny shapes: the numbers are meaningless"] if first["quick"] else []
    return "\n".join([measure, labels, conditions, *warning])

"""Measured noise for a terminal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.noise_lines import shortened
from ghostnoise.lab.report.words import NOTHING, several
from ghostnoise.meter.gap import METHODS
from ghostnoise.meter.reading import LayerReading, Reading
from ghostnoise.meter.theory import COMPONENTS as PARTS
from ghostnoise.meter.theory import LAWS
from ghostnoise.meter.theory import Component as Part

WIDTH = 100
SHORTEST = 8
BARS = (4, 13)  # signs that a bar may have
LEGEND = (
    "All but N and KS in %. between samples: share of the variance. std: of the shift (m − μ)/σ and the scale s²/σ². "
    "N: the ghost size at which a fully connected layer has noise as strong. KS: distance to a law, 0 to 1. gap: of "
    "outputs in training from those at inference, by method."
)
EIGHTHS = " ▏▎▍▌▋▊▉"


def terminal(readings: Mapping[str, Reading], console: Console) -> None:
    """Print a line for each layer of the last reading."""
    if not readings:
        raise UserError("no noise to show: there is no reading; measure some first")
    title, reading = list(readings.items())[-1]
    width = min(console.width, WIDTH)
    heading = f"Noise of ghost batches of {several(reading.layers[0].ghost_size, 'sample')}"
    console.print(Text.assemble((heading, "bold"), "  ", (title, "dim")), width=width)
    console.print()
    for table in _tables(reading, width):
        console.print(table, width=width)
        console.print()
    console.print(Text(LEGEND, style="dim"), width=width)


def nearest(layer: LayerReading) -> tuple[str, float]:
    """The law whose farther distance, of shift and scale, is the smallest, and that distance."""
    found = layer.layer_distances
    kinds = ("fc", "conv") if layer.spatial > 1 else ("fc",)  # with one position, they are the same
    worst = {law: max(found["shift", kind], found["scale", law]) for law, (kind, _) in LAWS.items() if kind in kinds}
    known = {law: value for law, value in worst.items() if math.isfinite(value)}
    return min(known.items(), key=lambda each: each[1]) if known else (NOTHING, math.nan)


def bar(share: float, width: int) -> str:
    """A bar of `width` signs at a share of 1, in eighths of a sign."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


@dataclass
class _Column:
    heading: str
    cells: list[str]
    bars: list[float] | None = None
    style: str = ""
    justify: Literal["left", "right"] = "right"

    def width(self, bars: int) -> int:
        """How many signs it takes with bars of so many."""
        return max([*map(len, self.heading.split("\n")), self.numbers + (bars + 1 if self.bars else 0)])

    @property
    def numbers(self) -> int:
        return max(map(len, self.cells))


def _tables(reading: Reading, width: int) -> list[Table]:
    """One table, or as many as it takes in a narrow terminal."""
    names = [" ".join(layer.name.split()) for layer in reading.layers]
    parts: list[list[_Column]] = [[]]
    for column in _columns(reading):
        if parts[-1] and SHORTEST + sum(1 + each.width(BARS[0]) for each in (*parts[-1], column)) > width:
            parts.append([])
        parts[-1].append(column)
    return [_table(names, columns, width) for columns in parts]


def _table(names: list[str], columns: list[_Column], width: int) -> Table:

    def left(bars: int) -> int:
        return width - sum(1 + column.width(bars) for column in columns)

    longest = min(max(map(len, ["layer", *names])), max(left(BARS[0]), SHORTEST))
    wide = max((bars for bars in range(*BARS) if left(bars) >= longest), default=BARS[0])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("layer", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.bars else column.justify, no_wrap=True)
    for at, name in enumerate(names):
        cells = [
            Text.assemble((bar(column.bars[at], wide), column.style), " ", column.cells[at].rjust(column.numbers))
            if column.bars
            else Text(column.cells[at])
            for column in columns
        ]
        table.add_row(Text(shortened(name, longest)), *cells)
    return table


def _columns(reading: Reading) -> list[_Column]:
    rows = [layer.row() for layer in reading.layers]
    laws = [nearest(layer) for layer in reading.layers]

    def barred(heading: str, values: list[float], most: float, style: str) -> _Column:
        return _Column(heading, [_percent(v) for v in values], [v / most if most else 0.0 for v in values], style)

    def deviation(part: Part, style: str) -> _Column:
        values = [row[f"gni_{part}_std"] for row in rows]
        return barred(f"{part}\nstd", values, max(filter(math.isfinite, values), default=1.0), style)

    made = [
        _Column("posi-\ntions", [f"{row['positions']:.5g}" for row in rows]),
        _Column("chan-\nnels", [str(row["channels"]) for row in rows]),
        barred("between\nsamples", [row["between"] for row in rows], 1.0, "cyan"),
        deviation("shift", "green"),
        deviation("scale", "magenta"),
        *(_Column(f"N\n{part}", [_size(row[f"effective_size_{part}"]) for row in rows]) for part in PARTS),
        _Column("nearest\nlaw", [law for law, _ in laws], justify="left"),
        _Column("\nKS", [f"{found:.2f}".lstrip("0") if math.isfinite(found) else NOTHING for _, found in laws]),
    ]
    for method in METHODS:
        gaps = [float(row.get(f"{method}_relative", math.nan)) for row in rows]
        if any(map(math.isfinite, gaps)):
            heading = "gap\nBN" if method == "bn" else f"{method.upper()}-\n{reading.layers[0].ghost_size}"
            made.append(_Column(heading, [_percent(gap) for gap in gaps]))
    return made


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    return f"{100 * value:.{1 if value < 0.9995 else 0}f}"


def _size(value: float) -> str:
    """In about four signs."""
    if not math.isfinite(value):
        return NOTHING
    for unit, sign in ((1e6, "M"), (1e3, "k")):
        if value >= 9.9995 * unit:
            return f"{value / unit:.3g}{sign}" if value < 999.5 * unit else f"{value / unit:.0f}{sign}"
    return f"{value:.0f}"

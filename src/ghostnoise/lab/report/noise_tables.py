"""Tables of measured noise: for a terminal, as CSV, and as a section of the page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import markup
from ghostnoise.lab.report.markup import TableCell
from ghostnoise.lab.report.noise import Digest, LayerNoise, NoiseRun, distinct, first_of_each_method, spread
from ghostnoise.lab.report.noise_figures import PAGE_EPOCHS
from ghostnoise.lab.report.tables import NOTHING, counted, write_csv
from ghostnoise.meter.gap import METHODS
from ghostnoise.meter.reading import LayerReading, Reading
from ghostnoise.meter.theory import COMPONENTS, LAWS, Component, laws_of

WIDTH = 100
SHORTEST_NAME = 8
NAME_SHARE = 4  # names of layers get at least this part of the width, if they are that long
BARS = (4, 13)  # smallest width of a bar, and the first width that is too large
LEGEND = (
    "All values except N and KS in %. between samples: share of the variance. std: standard deviation of the shift "
    "(m − μ)/σ and of the scale s²/σ². N: ghost size at which a fully connected layer has equally strong noise. KS: "
    "Kolmogorov-Smirnov distance to a law, 0 to 1. gap: relative difference between the outputs in training and at "
    "inference, by method."
)
EIGHTHS = " ▏▎▍▌▋▊▉"
LAW_NAMES = {"fc": "fully connected", "fc-exact": "f. c., exact", "conv": "convolutional", "conv-exact": "conv., exact"}


def comma_separated(runs: Sequence[NoiseRun]) -> str:
    """Format the noise as CSV, with a line for each layer of each reading of each run."""
    axes = list(dict.fromkeys(key for each in runs for key, _ in each.run.at))
    lines: list[dict[str, Any]] = []
    for each in runs:
        identity, numerics = each.run.identity, each.run.numerics.number
        run = {"run": identity, "method": each.run.label, "seed": each.run.seed, "numerics": numerics}
        for epoch, reading in each.readings.items():
            lines += [run | dict(each.run.at) | {"epoch": epoch} | dict(layer.row) for layer in reading.layers]
    names = list(
        dict.fromkeys(["run", "method", *axes, "seed", "numerics", "epoch", *(name for line in lines for name in line)])
    )
    return write_csv(names, [[line.get(name) for name in names] for line in lines])


# Section of the page


def section(runs: Sequence[NoiseRun]) -> str:
    """Return the section of the page; empty if no noise was recorded."""
    shown = first_of_each_method(runs)
    if not shown:
        return ""
    size = next(iter(shown[0].readings.values())).ghost_size
    names = [f"<option>{markup.text(each.run.name)}</option>" for each in shown]
    tables = [
        f'<div class="noise-at" id="noise-{at}-{epoch}"{"" if not at and not position else " hidden"}>'
        f"{_page_table(f'noise-table-{at}-{epoch}', each, epoch, reading)}</div>"
        for at, each in enumerate(shown)
        for position, (epoch, reading) in enumerate(spread(each.readings, PAGE_EPOCHS).items())
    ]
    few = "" if len(shown) == len(runs) else " This page shows the first run of each method."
    return markup.section(
        "noise", "Noise",
        f"<p>Noise of ghost batches of {counted(size, 'sample')} in the activations of each layer: the mean m and the "
        "variance s² of a ghost batch, relative to those of the batch, μ and σ². Lines are averages over the channels "
        "of a layer.</p>",
        '<div class="controls"><label for="noise-run">Run</label> '
        f'<select id="noise-run">{"".join(names)}</select> <label for="noise-epoch">Epoch</label> '
        '<select id="noise-epoch"></select> <button type="button" id="noise-all">All</button> '
        '<button type="button" id="noise-none">None</button></div>',
        '<fieldset class="series"><legend>Layers, from dark (first) to light (last)</legend>'
        '<div class="lines" id="noise-layers"></div></fieldset>',
        '<div class="pair"><div class="plot" id="plot-shift"></div><div class="plot" id="plot-scale"></div></div>',
        *tables,
        '<p class="files">Between samples: share of the variance that lies between samples. Effective N: ghost size '
        "at which a fully connected layer has equally strong noise. KS: Kolmogorov-Smirnov distance to a law, 0 to 1. "
        "Gap: mean difference between a method’s outputs in training and at inference, relative to the latter.</p>",
        f'<p class="files">All layers of all readings as <a href="noise.csv">CSV</a>.{few}</p>',
    )  # fmt: skip


def _page_table(name: str, each: NoiseRun, epoch: int, reading: Digest) -> str:
    headings = [
        "layer", "positions", "channels", "between samples, %", "shift std, %", "scale std, %", "effective N, shift",
        "effective N, scale",
        *(f"KS {component}, {LAW_NAMES[law]}" for component in COMPONENTS for law in laws_of(component)),
        *(f"gap {_method_label(method, reading.ghost_size)}, %" for method in METHODS),
    ]  # fmt: skip
    caption = f"{each.run.name} after epoch {epoch}"
    return markup.table(name, caption, headings, [_page_row(layer) for layer in reading.layers])


def _method_label(method: str, size: int) -> str:
    return "BN" if method == "bn" else f"{method.upper()}-{size}"


def _page_row(layer: LayerNoise) -> list[TableCell | str]:
    row = layer.row
    percent = [row["between"], row["gni_shift_std"], row["gni_scale_std"]]
    distances = [row[f"ks_{component}_{law}"] for component in COMPONENTS for law in laws_of(component)]
    gaps = [row.get(f"{method}_relative", math.nan) for method in METHODS]
    return [
        layer.name, _number(row["positions"], "{:,.4g}"), _number(row["channels"], "{:,}"),
        *(_number(100 * value, "{:.1f}") for value in percent),
        *(_number(row[f"effective_size_{component}"], "{:,.0f}") for component in COMPONENTS),
        *(_number(value, "{:.3f}") for value in distances), *(_number(100 * value, "{:.1f}") for value in gaps),
    ]  # fmt: skip


def _number(value: float, form: str) -> TableCell | str:
    return TableCell(form.format(value), float(value)) if math.isfinite(value) else NOTHING


# Terminal


def print_table(readings: Mapping[str, Reading], console: Console) -> None:
    """Print a line for each layer of the last reading."""
    if not readings:
        raise UserError("no noise to show: there is no reading; measure noise first")
    title, reading = list(readings.items())[-1]
    width = min(console.width, WIDTH)
    heading = f"Noise of ghost batches of {counted(reading.layers[0].ghost_size, 'sample')}"
    console.print(Text.assemble((heading, "bold"), "  ", (title, "dim")), width=width)
    console.print()
    for table in _tables(reading, width):
        console.print(table, width=width)
        console.print()
    console.print(Text(LEGEND, style="dim"), width=width)
    if note := never_updated(reading):
        console.print(Text(note), width=width)


def never_updated(reading: Reading) -> str:
    """Return a note about running statistics that had never been updated; empty if there are none."""
    names = [layer.name for layer in reading.layers if layer.never_updated]
    if not names:
        return ""
    which = "all layers" if len(names) == len(reading.layers) else f"{len(names)} of {len(reading.layers)} layers"
    return (
        f"Note: in {which}, the running statistics had never been updated before the first measured batch (mean 0, "
        f"variance 1; first: {names[0]}). Their gap does not describe a trained network."
    )


def nearest(layer: LayerReading) -> tuple[str, float]:
    """Return the law that fits best, and its distance: the larger of those of shift and scale."""
    found = layer.layer_distances
    kinds = ("fc", "conv") if layer.spatial > 1 else ("fc",)  # with one position, they are the same
    worst = {law: max(found["shift", kind], found["scale", law]) for law, (kind, _) in LAWS.items() if kind in kinds}
    known = {law: value for law, value in worst.items() if math.isfinite(value)}
    return min(known.items(), key=lambda each: each[1]) if known else (NOTHING, math.nan)


def bar(share: float, width: int) -> str:
    """Draw a bar with a resolution of an eighth of a character; a share of 1 has `width` characters."""
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
        """Return the width of the column if its bars have `bars` characters."""
        return max([*map(len, self.heading.split("\n")), self.numbers + (bars + 1 if self.bars else 0)])

    @property
    def numbers(self) -> int:
        return max(map(len, self.cells))


def _tables(reading: Reading, width: int) -> list[Table]:
    """Return one table, or several if the terminal is too narrow for one."""
    names = [" ".join(layer.name.split()) for layer in reading.layers]
    least = max(SHORTEST_NAME, min(max(map(len, names)), width // NAME_SHARE))
    groups: list[list[_Column]] = [[]]
    for column in _columns(reading):
        if groups[-1] and least + sum(1 + each.width(BARS[0]) for each in (*groups[-1], column)) > width:
            groups.append([])
        groups[-1].append(column)
    return [_table(names, columns, width) for columns in groups]


def _table(names: list[str], columns: list[_Column], width: int) -> Table:

    def left(bars: int) -> int:
        return width - sum(1 + column.width(bars) for column in columns)

    longest = min(max(map(len, ["layer", *names])), max(left(BARS[0]), SHORTEST_NAME))
    shown = distinct(names, longest)
    wide = max((bars for bars in range(*BARS) if left(bars) >= longest), default=BARS[0])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("layer", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.bars else column.justify, no_wrap=True)
    for at, name in enumerate(shown):
        cells = [
            Text.assemble((bar(column.bars[at], wide), column.style), " ", column.cells[at].rjust(column.numbers))
            if column.bars
            else Text(column.cells[at])
            for column in columns
        ]
        table.add_row(Text(name), *cells)
    return table


def _columns(reading: Reading) -> list[_Column]:
    rows = [layer.row() for layer in reading.layers]
    laws = [nearest(layer) for layer in reading.layers]

    def barred(heading: str, values: list[float], most: float, style: str) -> _Column:
        return _Column(heading, [_percent(v) for v in values], [v / most if most else 0.0 for v in values], style)

    def deviation(component: Component, style: str) -> _Column:
        values = [row[f"gni_{component}_std"] for row in rows]
        return barred(f"{component}\nstd", values, max(filter(math.isfinite, values), default=1.0), style)

    columns = [
        _Column("posi-\ntions", [f"{row['positions']:.5g}" for row in rows]),
        _Column("chan-\nnels", [str(row["channels"]) for row in rows]),
        barred("between\nsamples", [row["between"] for row in rows], 1.0, "cyan"),
        deviation("shift", "green"),
        deviation("scale", "magenta"),
        *(
            _Column(f"N\n{component}", [_size(row[f"effective_size_{component}"]) for row in rows])
            for component in COMPONENTS
        ),
        _Column("nearest\nlaw", [law for law, _ in laws], justify="left"),
        _Column("\nKS", [f"{found:.2f}".lstrip("0") if math.isfinite(found) else NOTHING for _, found in laws]),
    ]
    for method in METHODS:
        gaps = [float(row.get(f"{method}_relative", math.nan)) for row in rows]
        if any(map(math.isfinite, gaps)):
            heading = "gap\nBN" if method == "bn" else f"{method.upper()}-\n{reading.layers[0].ghost_size}"
            columns.append(_Column(heading, [_percent(gap) for gap in gaps]))
    return columns


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    return f"{100 * value:.{1 if value < 0.9995 else 0}f}"


def _size(value: float) -> str:
    """Format a ghost size in about four characters."""
    if not math.isfinite(value):
        return NOTHING
    for unit, sign in ((1e6, "M"), (1e3, "k")):
        if value >= 9.9995 * unit:
            return f"{value / unit:.3g}{sign}" if value < 999.5 * unit else f"{value / unit:.0f}{sign}"
    return f"{value:.0f}"

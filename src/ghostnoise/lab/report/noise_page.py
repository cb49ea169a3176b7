"""The page's section of measured noise: curves of each layer, and a table."""

import math
from collections.abc import Sequence
from typing import Any

from ghostnoise.lab.report.markup import Cell, section, table, text
from ghostnoise.lab.report.noise import WORDS, spread
from ghostnoise.lab.report.noise_lines import Digest, Layer, extent, law_line, law_lines, law_size, layer_line
from ghostnoise.lab.report.noise_runs import Measured
from ghostnoise.lab.report.words import NOTHING, several
from ghostnoise.meter.gap import METHODS
from ghostnoise.meter.theory import COMPONENTS as PARTS
from ghostnoise.meter.theory import Array, laws_of

EPOCHS = 6  # of a run on the page; the CSV has them all
POINTS = 90
LAW_NAMES = {"fc": "fully connected", "fc-exact": "f. c., exact", "conv": "convolutional", "conv-exact": "conv., exact"}


def first_of_each(noise: Sequence[Measured]) -> list[Measured]:
    """One run of each method, which is enough to look at."""
    made: dict[str, Measured] = {}
    for each in noise:
        made.setdefault(each.run.point.cell.method, each)
    return list(made.values())


def plots(noise: Sequence[Measured], size: int | None) -> list[dict[str, Any]]:
    """What the interactive figures of noise show."""
    return [_run(each, size) for each in first_of_each(noise)]


def content(noise: Sequence[Measured]) -> str:
    """The section, or nothing where no noise was recorded."""
    runs = first_of_each(noise)
    if not runs:
        return ""
    size = next(iter(runs[0].readings.values())).ghost_size
    names = [f"<option>{text(each.run.point.name)}</option>" for each in runs]
    tables = [
        f'<div class="noise-at" id="noise-{number}-{epoch}"{"" if not number and not at else " hidden"}>'
        f"{_table(f'noise-table-{number}-{epoch}', each, epoch, reading)}</div>"
        for number, each in enumerate(runs)
        for at, (epoch, reading) in enumerate(spread(each.readings, EPOCHS).items())
    ]
    few = "" if len(runs) == len(noise) else " The page has the first run of each method."
    return section(
        "noise", "Noise",
        f"<p>What ghost batches of {several(size, 'sample')} make of each layer’s activations: the mean m and the "
        "variance s² of a ghost batch, against those of the batch, μ and σ². Lines are averages over a layer’s "
        "channels.</p>",
        '<div class="controls"><label for="noise-run">Run</label> '
        f'<select id="noise-run">{"".join(names)}</select> <label for="noise-epoch">Epoch</label> '
        '<select id="noise-epoch"></select> <button type="button" id="noise-all">All</button> '
        '<button type="button" id="noise-none">None</button></div>',
        '<fieldset class="series"><legend>Layers, from violet (first) to red (last)</legend>'
        '<div class="lines" id="noise-layers"></div></fieldset>',
        '<div class="pair"><div class="plot" id="plot-shift"></div><div class="plot" id="plot-scale"></div></div>',
        *tables,
        '<p class="files">Between samples: the share of the variance that is not inside of samples. Effective N: '
        "the ghost size at which a fully connected layer has noise as strong. KS: the Kolmogorov-Smirnov distance to "
        "a law, 0 to 1. Gap: the mean difference of a method’s outputs in training and at inference, relative to the "
        "latter.</p>",
        f'<p class="files">All layers of all readings as <a href="noise.csv">CSV</a>.{few}</p>',
    )  # fmt: skip


def _run(each: Measured, given: int | None) -> dict[str, Any]:
    shown = spread(each.readings, EPOCHS)
    size = law_size(shown.values(), given)
    within = {part: extent(shown.values(), part, size) for part in PARTS}
    readings = [
        {
            "epoch": epoch,
            "layers": [
                {"name": layer.name} | {part: _line(layer_line(layer, part, within[part], POINTS)) for part in PARTS}
                for layer in reading.layers
            ],
            "laws": {
                part: [
                    {"label": law.label, "line": _line(law_line(law, part, within[part], POINTS))}
                    for law in law_lines(reading, part, size)
                ]
                for part in PARTS
            },
        }
        for epoch, reading in shown.items()
    ]
    return {"label": each.run.point.name, "words": WORDS, "within": within, "readings": readings}


def _line(line: tuple[Array, Array] | None) -> dict[str, Any] | None:
    """A line as the page draws it, in few digits; places near 1 need more of them."""
    if line is None:
        return None
    places, density = line
    return {"x": [float(f"{x:.6g}") for x in places], "y": [float(f"{y:.4g}") for y in density]}


def _table(name: str, each: Measured, epoch: int, reading: Digest) -> str:
    headings = [
        "layer", "positions", "channels", "between samples, %", "shift std, %", "scale std, %", "effective N, shift",
        "effective N, scale", *(f"KS {part}, {LAW_NAMES[law]}" for part in PARTS for law in laws_of(part)),
        *(f"gap {_label(method, reading.ghost_size)}, %" for method in METHODS),
    ]  # fmt: skip
    return table(
        name, f"{each.run.point.name} after epoch {epoch}", headings, [_cells(layer) for layer in reading.layers]
    )


def _label(method: str, size: int) -> str:
    return "BN" if method == "bn" else f"{method.upper()}-{size}"


def _cells(layer: Layer) -> list[Cell | str]:
    row = layer.row
    percent = [row["between"], row["gni_shift_std"], row["gni_scale_std"]]
    distances = [row[f"ks_{part}_{law}"] for part in PARTS for law in laws_of(part)]
    gaps = [row.get(f"{method}_relative", math.nan) for method in METHODS]
    return [
        layer.name, _number(row["positions"], "{:,.4g}"), _number(row["channels"], "{:,}"),
        *(_number(100 * value, "{:.1f}") for value in percent),
        *(_number(row[f"effective_size_{part}"], "{:,.0f}") for part in PARTS),
        *(_number(value, "{:.3f}") for value in distances), *(_number(100 * value, "{:.1f}") for value in gaps),
    ]  # fmt: skip


def _number(value: float, form: str) -> Cell | str:
    return Cell(form.format(value), float(value)) if math.isfinite(value) else NOTHING

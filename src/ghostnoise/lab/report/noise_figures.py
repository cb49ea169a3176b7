"""Figures of recorded noise in the form of the paper's figures 4 and 6, and as data for the page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import colors
from ghostnoise.lab.report.figures import render
from ghostnoise.lab.report.noise import (
    Digest,
    NoiseRun,
    digest,
    distinct,
    extent,
    first_of_each_method,
    law_line,
    law_lines,
    law_size,
    layer_line,
    shortened,
    spread,
)
from ghostnoise.meter.reading import Reading
from ghostnoise.meter.theory import COMPONENTS, Array, Component

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_LABELS: dict[Component, str] = {"shift": "shift noise, (m − μ)/σ", "scale": "scale noise, s²/σ²"}
POINTS = 400
PAGE_POINTS = 90
PAGE_EPOCHS = 6  # of a run on the page; the CSV file has all of them
NAMED_LAYERS = 10  # the most layers that a legend names
NAME_WIDTH = 24  # characters
STYLES: tuple[dict[str, Any], ...] = ({"color": "black", "linestyle": ":"}, {"color": "dimgray", "linestyle": "-."})


def write(readings: Mapping[str, Reading], size: int | None, stem: Path) -> list[Path]:
    """Draw readings, one column for each with its key as the title, into `stem`.png and `stem`.pdf.

    The theoretical curves are those of fully connected layers with ghost batches of `size`. If it is None, the measured
    ghost size is used for a fully connected network, and a size of about the strength of the noise for others.
    """
    shown = {title: digest(reading) for title, reading in readings.items()}
    paths = []
    for kind in ("png", "pdf"):
        path = Path(f"{stem}.{kind}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw(shown, size, kind))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; give another folder") from None
        paths.append(path)
    return paths


def draw(shown: Mapping[str, Digest], size: int | None, kind: str) -> bytes:
    """Draw readings as "png" or "pdf"."""
    if not shown:
        raise UserError("no noise to draw: there is no reading; measure noise first")
    return render(figure(shown, law_size(shown.values(), size)), kind)


def draw_run(run: NoiseRun, size: int | None, kind: str) -> bytes:
    """Draw the noise of a run at some of its epochs, as "png" or "pdf"."""
    return draw({f"epoch {epoch}": each for epoch, each in spread(run.readings).items()}, size, kind)


def figure(shown: Mapping[str, Digest], size: int) -> "Figure":
    """Make two rows of panels, shift and scale, with a column for each reading; the laws have ghost size `size`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(layer.name for each in shown.values() for layer in each.layers))
    shades = [color.light for color in colors.ramp(len(names))]
    figure = Figure(figsize=(1.9 + 3.1 * len(shown), 5.4), layout="constrained")
    grid = figure.subplots(len(COMPONENTS), len(shown), sharex="row", sharey="row", squeeze=False)
    for row, component in zip(grid, COMPONENTS, strict=True):
        within = extent(shown.values(), component, size)
        for axes, each in zip(row, shown.values(), strict=True):
            for layer in each.layers:
                if line := layer_line(layer, component, within, POINTS):
                    axes.plot(*line, color=shades[names.index(layer.name)], linewidth=1.2)
            _draw_laws(axes, each, component, within, size)
            axes.set_xlabel(AXIS_LABELS[component])
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set(xlim=within, ylabel="density")
        row[0].set_ylim(bottom=0)
        row[0].xaxis.set_major_locator(MaxNLocator(5, prune="both"))
    for axes, title in zip(grid[0], shown, strict=True):
        axes.set_title(shortened(title, 2 * NAME_WIDTH), fontsize=11, parse_math=False)
    _name_laws(figure, grid)
    _name_layers(figure, grid, names, shades)
    return figure


def page_plots(runs: Sequence[NoiseRun], size: int | None) -> list[dict[str, Any]]:
    """Return the data of the page's interactive figures of noise, for the first run of each method."""
    return [_run_data(each, size) for each in first_of_each_method(runs)]


def _draw_laws(axes: "Axes", shown: Digest, component: Component, within: tuple[float, float], size: int) -> None:
    for line, style in zip(law_lines(shown, component, size), STYLES, strict=False):
        axes.plot(*law_line(line, component, within, POINTS), **style, linewidth=1.6, label=line.label)


def _name_laws(figure: "Figure", grid: Any) -> None:
    """Put the legend of the laws below the panels, where it hides no line."""
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_legend_handles_labels()[0]}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", frameon=False, fontsize=9,
                  ncols=3 if grid.shape[1] > 1 else 1)  # fmt: skip


def _name_layers(figure: "Figure", grid: Any, names: Sequence[str], shades: Sequence[str]) -> None:
    """Add a legend if it has room for all layers, and otherwise a colour bar with the first and the last layer."""
    from matplotlib.lines import Line2D

    if len(names) <= NAMED_LAYERS:
        handles = [Line2D([], [], color=color, linewidth=2) for color in shades]
        legend = figure.legend(
            handles, ["layer"] * len(names), loc="outside right center", title="layer", frameon=False, fontsize=9
        )
        for text, name in zip(legend.get_texts(), distinct(names, NAME_WIDTH), strict=True):
            text.set_parse_math(False)  # set afterwards: legend() would parse "$" and omit names such as "_norm"
            text.set_text(name)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    bar = figure.colorbar(ScalarMappable(cmap=ListedColormap(shades)), ax=grid, aspect=40, fraction=0.03, pad=0.02)
    bar.outline.set_visible(False)
    half = 0.5 / len(names)
    bar.set_ticks([half, 1 - half], labels=distinct([names[0], names[-1]], NAME_WIDTH))
    for text in bar.ax.get_yticklabels():
        text.set_parse_math(False)
    bar.ax.tick_params(length=0, labelsize=9)
    bar.ax.invert_yaxis()
    bar.set_label(f"{len(names)} layers, first to last")


def _run_data(each: NoiseRun, given: int | None) -> dict[str, Any]:
    shown = spread(each.readings, PAGE_EPOCHS)
    size = law_size(shown.values(), given)
    within = {component: extent(shown.values(), component, size) for component in COMPONENTS}
    readings = [
        {
            "epoch": epoch,
            "layers": [
                {"name": layer.name}
                | {
                    component: _line_data(layer_line(layer, component, within[component], PAGE_POINTS))
                    for component in COMPONENTS
                }
                for layer in reading.layers
            ],
            "laws": {
                component: [
                    {"label": law.label, "line": _line_data(law_line(law, component, within[component], PAGE_POINTS))}
                    for law in law_lines(reading, component, size)
                ]
                for component in COMPONENTS
            },
        }
        for epoch, reading in shown.items()
    ]
    names = dict.fromkeys(layer.name for reading in shown.values() for layer in reading.layers)
    return {
        "label": each.run.name, "words": AXIS_LABELS, "within": within, "readings": readings,
        "colors": colors.ramp(len(names)),
    }  # fmt: skip


def _line_data(line: tuple[Array, Array] | None) -> dict[str, Any] | None:
    """Round a line to the digits that are visible; x values near 1 need more of them."""
    if line is None:
        return None
    x, density = line
    return {"x": [float(f"{value:.6g}") for value in x], "y": [float(f"{value:.4g}") for value in density]}

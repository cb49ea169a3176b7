"""Noise that runs have recorded, and its figure in the paper's form (figures 4 and 6)."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.noise_lines import (
    Digest,
    digest,
    extent,
    law_line,
    law_lines,
    law_size,
    layer_line,
    shortened,
)
from ghostnoise.meter.reading import Reading
from ghostnoise.meter.theory import COMPONENTS as PARTS
from ghostnoise.meter.theory import Component as Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "noise"
WORDS: dict[Part, str] = {"shift": "shift noise, (m − μ)/σ", "scale": "scale noise, s²/σ²"}
POINTS = 400
NAMED = 10  # layers that a legend can name
WIDTH = 24  # signs of a name
COLUMNS = 4
STYLES: tuple[dict[str, Any], ...] = ({"color": "black", "linestyle": ":"}, {"color": "dimgray", "linestyle": "-."})

Kept = TypeVar("Kept")


def recorded(folder: Path, warn: Callable[[str], object]) -> dict[int, Reading]:
    """The readings that a run has left in its folder, by epoch; damaged ones are said and left out."""
    return _each(folder, warn, _load)


def digests(folder: Path, warn: Callable[[str], object]) -> dict[int, Digest]:
    """The same without channels, which is all that a report needs; read once for each state of a file."""
    return _each(folder, warn, lambda path: _kept(path, path.stat().st_mtime_ns, path.stat().st_size))


def spread(readings: Mapping[int, Kept], most: int = COLUMNS) -> dict[int, Kept]:
    """The first, the last, and some between them, as evenly as they come; `most` at most."""
    epochs = sorted(readings)
    last = len(epochs) - 1
    places = {round(last * k / (most - 1)) for k in range(most)} if last >= most else set(range(last + 1))
    return {epochs[place]: readings[epochs[place]] for place in sorted(places)}


def draw(readings: Mapping[str, Reading], law_size: int | None, stem: Path) -> list[Path]:
    """Write the figure of readings, a column for each with its key as title, to `stem`.png and .pdf.

    The analytical curves are those of fully connected layers with ghost batches of `law_size`; if None, of what was
    measured in a fully connected network, and in others of about the strength of the noise.
    """
    shown = {title: digest(reading) for title, reading in readings.items()}
    made = []
    for kind in ("png", "pdf"):
        path = Path(f"{stem}.{kind}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rendered(shown, law_size, kind))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; give another folder") from None
        made.append(path)
    return made


def rendered(shown: Mapping[str, Digest], size: int | None, kind: str) -> bytes:
    """The figure as a "png" or "pdf"."""
    if not shown:
        raise UserError("no noise to draw: there is no reading; measure some first")
    file = io.BytesIO()
    # Without the date: the same readings give the same bytes.
    dates: dict[str, Any] = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
    figure(shown, law_size(shown.values(), size)).savefig(file, format=kind, dpi=160, **dates)
    return file.getvalue()


def _each(folder: Path, warn: Callable[[str], object], read: Callable[[Path], Kept]) -> dict[int, Kept]:
    found: dict[int, Kept] = {}
    for path in sorted((folder / FOLDER).glob("epoch-*.npz")):
        if not (named := re.fullmatch(r"epoch-(\d+)\.npz", path.name)):
            continue
        try:
            found[int(named[1])] = read(path)
        except Exception as error:  # a file can be damaged in any way
            reason = str(error) or type(error).__name__
            warn(f"{path} is damaged ({reason}); the reading is left out, and the file as it is")
    return dict(sorted(found.items()))


def _load(path: Path) -> Reading:
    with path.open("rb") as file:  # numpy leaves a damaged file open
        return Reading.load(file)


@lru_cache(maxsize=512)
def _kept(path: Path, _time: int, _size: int) -> Digest:
    return digest(_load(path))


def figure(shown: Mapping[str, Digest], size: int) -> "Figure":
    """Two rows of panels, shift and scale, a column for each reading; laws are those of ghost batches of `size`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(layer.name for each in shown.values() for layer in each.layers))
    colors = _rainbow(len(names))
    made = Figure(figsize=(1.9 + 3.1 * len(shown), 5.4), layout="constrained")
    grid = made.subplots(len(PARTS), len(shown), sharex="row", sharey="row", squeeze=False)
    for row, part in zip(grid, PARTS, strict=True):
        within = extent(shown.values(), part, size)
        for axes, each in zip(row, shown.values(), strict=True):
            for layer in each.layers:
                if line := layer_line(layer, part, within, POINTS):
                    axes.plot(*line, color=colors[names.index(layer.name)], linewidth=1.2)
            _laws(axes, each, part, within, size)
            axes.set_xlabel(WORDS[part])
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set(xlim=within, ylabel="density")
        row[0].set_ylim(bottom=0)
        row[0].xaxis.set_major_locator(MaxNLocator(5, prune="both"))
    for axes, title in zip(grid[0], shown, strict=True):
        axes.set_title(shortened(title, 2 * WIDTH), fontsize=11, parse_math=False)
    _name_laws(made, grid)
    _name_layers(made, grid, names, colors)
    return made


def _laws(axes: "Axes", shown: Digest, part: Part, within: tuple[float, float], size: int) -> None:
    for line, style in zip(law_lines(shown, part, size), STYLES, strict=False):
        axes.plot(*law_line(line, part, within, POINTS), **style, linewidth=1.6, label=line.label)


def _name_laws(figure: "Figure", grid: Any) -> None:
    """Below the panels, where no line is."""
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_legend_handles_labels()[0]}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", frameon=False, fontsize=9,
                  ncols=3 if grid.shape[1] > 1 else 1)  # fmt: skip


def _name_layers(figure: "Figure", grid: Any, names: Sequence[str], colors: Sequence[Any]) -> None:
    """A legend where there is room for one, and otherwise a bar with the first and the last layer."""
    from matplotlib.lines import Line2D

    if len(names) <= NAMED:
        handles = [Line2D([], [], color=color, linewidth=2) for color in colors]
        legend = figure.legend(
            handles, ["layer"] * len(names), loc="outside right center", title="layer", frameon=False, fontsize=9
        )
        for text, name in zip(legend.get_texts(), names, strict=True):
            text.set_parse_math(False)  # names are not formulas, and a legend would leave out one such as "_norm"
            text.set_text(shortened(name, WIDTH))
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    bar = figure.colorbar(ScalarMappable(cmap=ListedColormap(colors)), ax=grid, aspect=40, fraction=0.03, pad=0.02)
    bar.outline.set_visible(False)
    half = 0.5 / len(names)
    bar.set_ticks([half, 1 - half], labels=[shortened(name, WIDTH) for name in (names[0], names[-1])])
    for text in bar.ax.get_yticklabels():
        text.set_parse_math(False)
    bar.ax.tick_params(length=0, labelsize=9)
    bar.ax.invert_yaxis()
    bar.set_label(f"{len(names)} layers, in their order")


def _rainbow(count: int) -> list[Any]:
    """From violet to red, as in the paper."""
    from matplotlib import colormaps

    return [colormaps["rainbow"](k / max(count - 1, 1)) for k in range(count)]

"""Figures and tables as the paper draws them, from several experiments: one panel for each kind of method.

Curves are means with bands of one standard deviation over seeds; dotted lines are batch norm and the best ghost batch
norm. The paper draws its figures 3, 5 and 7 so; the report's own figures have confidence intervals instead.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import charts, tables
from ghostnoise.lab.report.figures import LINES, MARKERS, render
from ghostnoise.lab.report.statistics import Findings, Score
from ghostnoise.lab.report.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = ("GBN", "XBN and EN", "AGNI", "GNI", "components of GNI", "dropout", "element-wise noise", "other methods")
"""The panels of figure 3 in the paper's order, and what its other figures show."""
OF_METHOD = {"gbn": 0, "xbn": 1, "en": 1, "agni": 2, "gni": 3, "dropout": 5, "eagn": 6}
COMPONENTS = PANELS.index("components of GNI")
COLUMNS = 3
BELOW = 1.5
"""How far the panels reach below batch norm, in multiples of the best gain."""
BASELINES = {
    "none": ("without noise", (0, (1, 3))), "bn": ("BN", (0, (1, 1.4))), "gbn": ("best GBN", (0, (4, 1.5, 1, 1.5))),
}  # fmt: skip
"""Methods that are dotted lines, by their names in the registry; "none" is a network without batch norm."""


def draw(found: Sequence[Findings], kind: str) -> bytes:
    """Draw the curves of experiments with the same measure, as "png", "pdf" or "svg"."""
    from matplotlib.figure import Figure

    panels = _panels(found)
    if not panels:
        raise UserError("--layout paper: needs finished runs over a ghost size or another axis; run some")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 2.9 * columns, 0.5 + 2.35 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    lines = _baselines(found)
    limits = _limits(panels, lines)
    for at, axes in enumerate(grid.flat):
        if at >= len(panels):
            axes.set_visible(False)
            continue
        title, series = panels[at]
        for one in series:
            _draw(axes, one)
        for name, (mean, style) in lines.items():
            color = "firebrick" if name == BASELINES["none"][0] else "black"
            axes.axhline(mean, color=color, linestyle=style, linewidth=1, label=name)
        _finish(axes, title, series)
        axes.set_ylim(*limits)
    for row in grid:
        row[0].set_ylabel(f"{charts.split([score for each in found for score in _scores(each)])} accuracy, %")
    if lines:
        handles = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
        figure.legend([handles[name] for name in lines], list(lines), loc="outside lower center", frameon=False,
                      fontsize=8, ncols=len(lines))  # fmt: skip
    return render(figure, kind)


def _panels(found: Sequence[Findings]) -> list[tuple[str, list[charts.Series]]]:
    """Return the title and the curves of each panel; curves that two experiments share occur once.

    Curves of another network than that of the recipe, such as GBN beside a network with layer norm, are lines only.
    """
    panels: dict[int, dict[str, charts.Series]] = {}
    for findings in found:
        network = findings.collected.experiment.recipe.settings.model
        for axis in charts.axes_of_curves(findings):
            for one in charts.over(findings, axis).series:
                settings = one.points[0].score.settings
                if one.flat or settings.model != network or not any(point.summary for point in one.points):
                    continue
                for place in _places(one.method, settings.norm.options.get("components", "both")):
                    panels.setdefault(place, {}).setdefault(one.label, one)
    if not any("both" not in _components(one) for one in panels.get(COMPONENTS, {}).values()):
        panels.pop(COMPONENTS, None)
    return [(PANELS[place], list(panels[place].values())) for place in sorted(panels)]


def _places(method: str, components: str) -> list[int]:
    """Return the panels of a curve; the paper shows GNI with both components again beside each of them."""
    if method != "gni":
        return [OF_METHOD.get(method, len(PANELS) - 1)]
    return [OF_METHOD[method], COMPONENTS] if components == "both" else [COMPONENTS]


def _components(series: charts.Series) -> str:
    return str(series.points[0].score.settings.norm.options.get("components", "both"))


def _scores(findings: Findings) -> list[Score]:
    return [row.score for row in findings.rows if row.score]


def _baselines(found: Sequence[Findings]) -> dict[str, tuple[float, object]]:
    """Return the mean of batch norm and the highest one of ghost batch norm, with their dashes."""
    lines: dict[str, tuple[float, object]] = {}
    for method, (name, style) in BASELINES.items():
        means = [
            score.mean
            for findings in found
            for score in _scores(findings)
            if score.settings.norm.method == method and score.mean is not None
        ]
        if means:
            lines[name] = max(means), style
    return lines


def _limits(
    panels: Sequence[tuple[str, Sequence[charts.Series]]], lines: dict[str, tuple[float, object]]
) -> tuple[float, float]:
    """Return a range that shows the gains; curves may leave it at the bottom."""
    bands = [_band(point) for _, series in panels for one in series for point in one.points if point.summary]
    means = [mean for mean, _ in lines.values()]
    top = max([*(high for _, high in bands), *means])
    bottom = min([*(low for low, _ in bands), *means])
    if "BN" in lines:
        least = min(means)  # of the lines, all of which are shown
        bottom = max(bottom, min(least, lines["BN"][0] - BELOW * (top - lines["BN"][0])))
    margin = 0.05 * (top - bottom) or 0.5
    return bottom - margin, top + margin


def _band(point: charts.ChartPoint) -> tuple[float, float]:
    assert point.summary is not None
    spread = point.score.std or 0.0
    return point.summary.mean - spread, point.summary.mean + spread


def _draw(axes: "Axes", series: charts.Series) -> None:
    points = [point for point in series.points if point.summary is not None]
    xs = [float(point.x) for point in points]
    color = series.color.light
    style = {"linestyle": LINES[series.dash], "marker": MARKERS[series.marker], "markersize": 3.5}
    means = [point.summary.mean for point in points if point.summary]
    axes.plot(xs, means, color=color, linewidth=1.5, label=series.label, **style)
    low, high = zip(*map(_band, points), strict=True)
    axes.fill_between(xs, low, high, color=color, alpha=0.18, linewidth=0)


def _finish(axes: "Axes", title: str, series: Sequence[charts.Series]) -> None:
    from matplotlib.ticker import NullLocator

    first = series[0].points[0]
    axis = next(key for key, value in first.score.at if value == first.x)
    xs = sorted({float(point.x) for one in series for point in one.points})
    if axis in charts.LOGARITHMIC:
        axes.set_xscale("log", base=2)
        ticks = [x for x in xs if math.log2(x).is_integer()]
        ticks = ticks[:: 2 if len(ticks) > 8 else 1]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(short(axis).replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    labels = [one.label for one in series]
    handles = [each for each in axes.get_legend_handles_labels()[0] if each.get_label() in labels]
    axes.legend(handles=handles, frameon=False, fontsize=7, loc="best")


def table(found: Sequence[Findings]) -> str:
    """Return one table in Markdown with a line for each experiment: the baseline, the best cell, and its ghost size."""
    rows = []
    for findings in found:
        base, best = findings.best(findings.baseline), None
        for row in findings.rows:
            if row.method != findings.baseline and findings.best(row.method):
                best = findings.best(row.method)
        sizes = [str(value) for key, value in best.at if key == charts.GHOST_SIZE] if best else []
        rows.append([
            findings.collected.experiment.recipe.name,
            tables.score_text(base),
            tables.score_text(best),
            ", ".join(sizes) or tables.NOTHING,
            tables.difference_text(findings.compare(best, base)) if best and base else tables.NOTHING,
        ])  # fmt: skip
    headings = ["network", "baseline, % ± std (n)", "GNI, % ± std (n)", "N", "difference [95 % interval]"]
    return tables.markdown_table(headings, rows)

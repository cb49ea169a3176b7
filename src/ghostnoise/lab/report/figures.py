"""The figure of an experiment as PNG, PDF and SVG: curves over an axis, or a row for each cell."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.report import charts, colors, histories
from ghostnoise.lab.report.charts import Chart, ChartPoint, Series
from ghostnoise.lab.report.measures import FEWEST_FOR_BAND, Summary
from ghostnoise.lab.report.noise import distinct, shortened
from ghostnoise.lab.report.statistics import Findings
from ghostnoise.lab.report.tables import numerics_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "cross": "P", "star": "X"}
LINES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.4)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "longdash": (0, (11, 2)),
}
TITLE_WIDTH, NOTE_WIDTH = 115, 75  # characters that fit into the width of a figure, and of its axes
NAME_WIDTH = 36  # characters of a series' label
FAINT = 0.35
NO_BAND = f"hollow: fewer than {FEWEST_FOR_BAND} seeds, no interval drawn"


def draw(findings: Findings, kind: str) -> bytes:
    """Draw the figure as "png", "pdf" or "svg"; experiments of noise without recorded noise show training curves."""
    from matplotlib.figure import Figure

    chart = charts.first(findings)
    training = findings.collected.experiment.report.form == "noise"
    rows = chart.form == "rows" and not training
    figure = Figure(figsize=(6.4, 1.3 + 0.32 * len(chart.series)) if rows else (6.8, 3.9), layout="constrained")
    axes = figure.subplots()
    if training:
        _draw_training(axes, findings)
    elif rows:
        _draw_rows(axes, chart)
    else:
        _draw_curves(axes, chart)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if rows else "y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    words = explained(chart, training=training)
    if findings.collected.mixed:
        words += f"\nmixed numerics: {numerics_text(findings.collected.numerics)}"
    words = "\n".join(textwrap.fill(line, TITLE_WIDTH) for line in words.splitlines())
    axes.set_title(words, fontsize=7.5, loc="left", color="#555555")
    return render(figure, kind)


def explained(chart: Chart, *, training: bool = False) -> str:
    """Explain the marks of a figure in words."""
    if training:
        return "lines: means over seeds; bands: 95 % intervals of the mean (t)"
    marks = [
        "dots: seeds" if chart.form == "rows" else "small dots: seeds",
        "bars: means with their 95 % interval (t)" if chart.form == "rows" else "bands: 95 % intervals of the mean (t)",
    ]
    if any(each.flat for each in chart.series):
        marks.append(f"dotted: methods without a {chart.x}")
    if any(point.paper is not None for each in chart.series for point in each.points):
        marks.append("◇: the paper")
    if chart.unbanded():
        marks.append(NO_BAND)
    return "; ".join(marks)


def render(figure: "Figure", kind: str) -> bytes:
    """Return the file contents of a figure without the date, so that the same runs give the same bytes."""
    import matplotlib

    rows = max((len(legend.get_texts()) for axes in figure.axes if (legend := axes.get_legend())), default=0)
    figure.set_figheight(max(figure.get_figheight(), 0.2 * rows))  # a longer legend would leave no room for the axes
    file = io.BytesIO()
    dates: dict[str, Any] = {"pdf": {"metadata": {"CreationDate": None}}, "svg": {"metadata": {"Date": None}}}
    with matplotlib.rc_context({"svg.hashsalt": "ghostnoise"}):  # otherwise the ids in an SVG are random
        figure.savefig(file, format=kind, dpi=160, **dates.get(kind, {}))
    return file.getvalue()


def _draw_curves(axes: "Axes", chart: Chart) -> None:
    curves = [each for each in chart.series if not each.flat]
    names = _names(chart)
    numeric = all(isinstance(point.x, int | float) for each in curves for point in each.points)
    for series in chart.series:
        points = [(point, point.summary) for point in series.points if point.summary]
        if points:
            name = names[series.label]
            if series.flat:
                _draw_flat(axes, series, points[0][1], name)
            else:
                _draw_curve(axes, series, points, numeric, name)
    if chart.log and numeric:
        _set_logarithmic(axes, sorted({point.x for each in curves for point in each.points}))
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.measure)
    _zoom(axes, chart)
    _legend(axes)


def _names(chart: Chart) -> dict[str, str]:
    """Return the labels of the series, shortened to what leaves room for the axes."""
    labels = list(dict.fromkeys(each.label for each in chart.series))
    return dict(zip(labels, distinct(labels, NAME_WIDTH), strict=True))


def _draw_flat(axes: "Axes", series: Series, summary: Summary, name: str) -> None:
    color = series.color.light
    axes.axhline(summary.mean, color=color, linestyle=":", linewidth=1.6, label=name)
    if summary.band:
        axes.axhspan(*summary.band, color=color, alpha=0.08, linewidth=0)


def _draw_curve(
    axes: "Axes", series: Series, points: Sequence[tuple[ChartPoint, Summary]], numeric: bool, name: str
) -> None:
    color, marker = series.color.light, MARKERS[series.marker]
    xs = [point.x if numeric else str(point.x) for point, _ in points]
    axes.plot(xs, [summary.mean for _, summary in points], color=color, linewidth=1.6, label=name,
              linestyle=LINES[series.dash], marker=marker, markersize=5)  # fmt: skip
    # A point without an interval has a band of no height, so that the band of its neighbours narrows towards it.
    bands = [summary.band or (summary.mean, summary.mean) for _, summary in points]
    low, high = zip(*bands, strict=True)
    axes.fill_between(xs, low, high, color=color, alpha=0.14, linewidth=0)
    for x, (point, summary) in zip(xs, points, strict=True):
        if summary.n > 1:
            axes.plot([x] * summary.n, summary.values, ".", color=color, alpha=FAINT, markersize=4, markeredgewidth=0)
        if summary.band is None:
            axes.plot(x, summary.mean, marker=marker, color=color, markerfacecolor="white", markersize=5.5)
        if point.paper is not None:
            axes.plot(x, point.paper, marker="D", markerfacecolor="none", markeredgecolor="black", markersize=6)


def _zoom(axes: "Axes", chart: Chart) -> None:
    """Zoom to the data, and name the points that are left out."""
    shown, outside = charts.zoomed(chart)
    if shown:
        axes.set_ylim(*shown)
    if outside:
        note = textwrap.fill(left_out(chart, outside), NOTE_WIDTH)
        axes.annotate(note, (0.015, 0.025), xycoords="axes fraction", fontsize=7,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # fmt: skip


def left_out(chart: Chart, points: Sequence[tuple[Series, ChartPoint, Summary]]) -> str:
    """Name the points outside of the figure with their values."""
    words = ", ".join(f"{series.label} {summary.mean:.1f} at {point.x}" for series, point, summary in points)
    return f"{'below' if chart.higher_is_better else 'above'}: {words}"


def _set_logarithmic(axes: "Axes", ticks: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    if not ticks:
        return
    few = [tick for tick in ticks if math.log2(tick).is_integer()] if len(ticks) > 10 else ticks
    axes.set_xscale("log", base=2)
    axes.set_xticks(few, [str(tick) for tick in few])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_rows(axes: "Axes", chart: Chart) -> None:
    """Draw a row for each cell: a dot for each seed, and below the dots the mean and its interval."""
    from matplotlib.ticker import MaxNLocator

    shown, outside = charts.zoomed(chart)
    left = {id(point) for _, point, _ in outside}
    for at, series in enumerate(chart.series):
        point = series.points[0]
        if point.summary is None:
            axes.annotate(point.score.lacking, (0.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        elif id(point) in left:
            axes.annotate(f"◂ {point.summary.mean:.2f}", (0.005, at), xycoords=("axes fraction", "data"), va="center",
                          fontsize=8, color=series.color.light)  # fmt: skip
        else:
            _draw_row(axes, at, series.color.light, point.summary)
        if point.paper is not None:
            axes.plot(point.paper, at, marker="D", markerfacecolor="none", markeredgecolor="black", markersize=6)
    names = _names(chart)
    axes.set_yticks(range(len(chart.series)), [names[each.label] for each in chart.series])
    axes.set_ylim(len(chart.series) - 0.5, -0.5)
    if shown:
        axes.set_xlim(*shown)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(chart.measure)


def _draw_row(axes: "Axes", at: int, color: str, summary: Summary) -> None:
    if summary.n > 1:
        axes.scatter(summary.values, [at - 0.16] * summary.n, s=16, color=color, alpha=FAINT, linewidths=0)
    if summary.band is None:
        axes.plot(summary.mean, at + 0.14, "o", color=color, markerfacecolor="white", markersize=5.5)
        return
    axes.plot(summary.band, [at + 0.14] * 2, color=color, linewidth=4.5, alpha=0.3, solid_capstyle="butt")
    axes.plot(summary.mean, at + 0.14, "|", color=color, markersize=9, markeredgewidth=2.2)


def _draw_training(axes: "Axes", findings: Findings) -> None:
    """Draw the accuracy over epochs: the mean of each cell's runs, and its interval."""
    styles: dict[str, int] = {}
    for score in histories.shown_first(findings):
        color = colors.of(score.settings.norm.method).light
        style = styles[color] = styles.get(color, -1) + 1
        found = histories.summaries([histories.history(run) for run in score.runs], "accuracy", histories.MOST_POINTS)
        if not found:
            continue
        marker = "o" if len(found) == 1 else ""  # runs that were evaluated once
        dash = LINES[charts.DASHES[style % len(charts.DASHES)]]
        line = {"label": shortened(score.cell, NAME_WIDTH), "linestyle": dash, "marker": marker}
        axes.plot(list(found), [each.mean for each in found.values()], color=color, linewidth=1.6, **line)
        low, high = zip(*(each.band or (each.mean, each.mean) for each in found.values()), strict=True)
        axes.fill_between(list(found), low, high, color=color, alpha=0.14, linewidth=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel(charts.first(findings).measure)
    _legend(axes)


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3)

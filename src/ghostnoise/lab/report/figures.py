"""The figure of an experiment (curves over an axis, or one line per cell) as PNG and PDF, and as data for the page."""

import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.report.collect import Run, number
from ghostnoise.lab.report.statistics import Findings, Score
from ghostnoise.lab.report.tables import numerics_text, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_FOR_QUARTILES = 8  # points
LOGARITHMIC = ("norm.ghost_size", "optim.lr", "optim.weight_decay")
MEASURES = {
    "accuracy": "{split} accuracy, %",
    "train_accuracy": "training accuracy, %",
    "loss": "{split} loss",
    "train_loss": "training loss",
}
# The color-blind safe palette of Okabe and Ito, without yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INITIALLY_SHOWN = 6  # training curves on the page


@dataclass
class PlotPoint:
    """A cell in a figure, at `x` on the axis."""

    x: Any
    score: Score

    @property
    def paper(self) -> float | None:
        """The paper's number, if its text begins with one."""
        found = re.match(r"\D{0,2}(\d+(?:\.\d+)?)", self.score.cell.paper or "")
        return float(found[1]) if found else None


@dataclass
class Curve:
    """The cells of a method along the axis; one cell if the method does not have the axis (`flat`)."""

    label: str
    points: list[PlotPoint] = field(default_factory=list)
    flat: bool = False


@dataclass
class Plot:
    """What the figure of an experiment shows."""

    form: str
    curves: list[Curve]
    y: str
    x: str = ""
    log: bool = False


def plot(findings: Findings) -> Plot:
    """Select curves over the axis that the experiment names, or one line ("bar") per cell."""
    report = findings.collected.experiment.report
    if report.form == "curves" and report.x:
        return _curves_over(findings, report.x)
    scores = [row.score for row in findings.rows if row.score]
    bars = [Curve(_bar_label(score), [PlotPoint(score.cell.name, score)]) for score in scores]
    return Plot("bars", bars, f"{_split(scores)} accuracy, %")


def draw(findings: Findings, kind: str) -> bytes:
    """Draw the figure as "png", "pdf" or "svg"; experiments of noise without recorded noise show training curves."""
    from matplotlib.figure import Figure

    shown = plot(findings)
    training = findings.collected.experiment.report.form == "noise"
    bars = shown.form == "bars" and not training
    figure = Figure(figsize=(6, 1 + 0.34 * len(shown.curves)) if bars else (6, 3.8), layout="constrained")
    axes = figure.subplots()
    if training:
        _draw_training(axes, findings)
    elif bars:
        _draw_bars(axes, shown)
    else:
        _draw_curves(axes, shown)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if bars else "y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(findings.collected.numerics) > 1:
        axes.set_title(f"mixed numerics: {numerics_text(findings.collected.numerics)}", fontsize=8, loc="left")
    return render(figure, kind)


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


def page_plots(findings: Findings) -> dict[str, Any]:
    """Return the data of the page's interactive figures."""
    return {"main": _plot_data(plot(findings)), "training": _histories(findings), "measures": _measures(findings)}


def history(run: Run) -> dict[str, list[float | None]]:
    """Return the epochs of a run and its measures after each; None where it diverged or was not evaluated."""
    lines = [line for line in (run.found.metrics() if run.found else []) if isinstance(line, dict)]
    lines = [line for line in lines if number(line.get("epoch")) is not None]
    return {name: [_rounded(line.get(name)) for line in lines] for name in ("epoch", *MEASURES)}


def _bar_label(score: Score) -> str:
    """Return the method and its values on the axes, without the names of the axes."""
    return " ".join([score.cell.method, ", ".join(str(value) for _, value in score.cell.at)]).strip()


def _curves_over(findings: Findings, axis: str) -> Plot:
    tested = [row.score for row in findings.rows if row.score]
    select = findings.collected.experiment.select
    scores = findings.tuning if select and axis in select.axes else tested  # one selected cell makes no curve
    curves: dict[str, Curve] = {}
    for score in scores:
        place = dict(score.cell.at)
        rest = [f"{short(key)}={value}" for key, value in place.items() if key != axis]
        label = " ".join([score.cell.method, *rest])
        curve = curves.setdefault(label, Curve(label, flat=axis not in place))
        curve.points.append(PlotPoint(place.get(axis), score))
    values = [point.x for curve in curves.values() if not curve.flat for point in curve.points]
    log = axis in LOGARITHMIC and all((number(x) or 0) > 0 for x in values)
    for curve in curves.values():
        if all(number(point.x) is not None for point in curve.points):
            curve.points.sort(key=lambda point: float(point.x))
    return Plot("curves", list(curves.values()), f"{_split(scores)} accuracy, %", short(axis).replace("_", " "), log)


def _split(scores: Iterable[Score]) -> str:
    return " or ".join(sorted({score.cell.settings.data.evaluate for score in scores})) or "test"


def _rounded(value: object) -> float | None:
    found = number(value)
    return None if found is None else float(f"{found:.6g}")


def _draw_curves(axes: "Axes", shown: Plot) -> None:
    curves = [curve for curve in shown.curves if not curve.flat]
    numeric = all(isinstance(point.x, int | float) for curve in curves for point in curve.points)
    for curve, color, marker in zip(shown.curves, cycle(COLORS), cycle(MARKERS), strict=False):
        points = [point for point in curve.points if point.score.mean is not None]
        if not points:
            continue
        means = [point.score.mean or 0.0 for point in points]
        stds = [point.score.std or 0.0 for point in points]
        if curve.flat:
            axes.axhline(means[0], color=color, linestyle=":", linewidth=1.6, label=curve.label)
            axes.axhspan(means[0] - stds[0], means[0] + stds[0], color=color, alpha=0.08, linewidth=0)
            continue
        xs = [point.x if numeric else str(point.x) for point in points]
        axes.plot(xs, means, color=color, marker=marker, markersize=5, linewidth=1.6, label=curve.label)
        low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    if shown.log and numeric:
        _set_logarithmic(axes, sorted({point.x for curve in curves for point in curve.points}))
    axes.set_xlabel(shown.x)
    axes.set_ylabel(shown.y)
    _leave_out_failures(axes, shown)
    _legend(axes)


def _leave_out_failures(axes: "Axes", shown: Plot) -> None:
    """Let the axis start at the lowest point that is not far below all others, and name the points below it.

    A method that fails at one value would otherwise make the differences between all others invisible. Points are far
    below if they are more than three interquartile ranges below the first quartile, as in a box plot.
    """
    points = [(point.score.mean, curve.label, point.x) for curve in shown.curves for point in curve.points
              if point.score.mean is not None]  # fmt: skip
    if len(points) < FEWEST_FOR_QUARTILES:
        return
    first, _, third = statistics.quantiles([mean for mean, _, _ in points], n=4)
    fence = first - 3 * (third - first)
    failed = [each for each in points if each[0] < fence]
    if failed:
        kept = [mean for mean, _, _ in points if mean >= fence]
        margin = 0.15 * (max(kept) - min(kept))
        axes.set_ylim(min(kept) - margin, max(kept) + margin)
        text = ", ".join(f"{label} {mean:.1f} at {x}" for mean, label, x in failed)
        axes.annotate(f"below: {text}", (0.015, 0.025), xycoords="axes fraction", fontsize=7,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # fmt: skip


def _set_logarithmic(axes: "Axes", ticks: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    if not ticks:
        return
    few = [tick for tick in ticks if math.log2(tick).is_integer()] if len(ticks) > 10 else ticks
    axes.set_xscale("log", base=2)
    axes.set_xticks(few, [str(tick) for tick in few])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_bars(axes: "Axes", shown: Plot) -> None:
    """Draw a line per cell: a dot for each seed, and below the dots the mean and the standard deviation."""
    from matplotlib.ticker import MaxNLocator

    for at, (curve, color) in enumerate(zip(shown.curves, _colors_by_method(shown.curves), strict=True)):
        score = curve.points[0].score
        values = list(score.values.values())
        if score.mean is not None:
            axes.scatter(values, [at - 0.14] * len(values), s=18, color=color, alpha=0.55, linewidths=0)
            axes.errorbar(score.mean, at + 0.14, xerr=score.std, fmt="|", color=color, markersize=9,
                          markeredgewidth=2.2, linewidth=1.6, capsize=3)  # fmt: skip
        else:
            axes.annotate(score.lacking, (0.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    papers = [
        (point.paper, at) for at, curve in enumerate(shown.curves) for point in curve.points if point.paper is not None
    ]
    if papers:
        numbers, places = zip(*papers, strict=True)
        axes.scatter(numbers, places, marker="D", s=24, facecolors="none", edgecolors="black", label="paper")
    axes.set_yticks(range(len(shown.curves)), [curve.label for curve in shown.curves])
    axes.set_ylim(len(shown.curves) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(shown.y)
    _legend(axes)


def _draw_training(axes: "Axes", findings: Findings) -> None:
    """Draw the accuracy over epochs: the mean of each cell's runs."""
    scores = [row.score for row in findings.rows if row.score]
    for score, color in zip(scores, cycle(COLORS), strict=False):
        by_epoch: dict[float, list[float]] = {}
        for past in map(history, score.runs):
            for epoch, accuracy in zip(past["epoch"], past["accuracy"], strict=True):
                if epoch is not None and accuracy is not None:
                    by_epoch.setdefault(epoch, []).append(accuracy)
        means = {epoch: statistics.fmean(values) for epoch, values in sorted(by_epoch.items())}
        if means:
            marker = "o" if len(means) == 1 else ""  # runs that were evaluated once
            axes.plot(
                list(means), list(means.values()), color=color, linewidth=1.6, marker=marker, label=score.cell.name
            )
    axes.set_xlabel("epoch")
    axes.set_ylabel(plot(findings).y)
    _legend(axes)


def _colors_by_method(curves: Sequence[Curve]) -> list[str]:
    methods = list(dict.fromkeys(curve.points[0].score.cell.method for curve in curves))
    return [COLORS[methods.index(curve.points[0].score.cell.method) % len(COLORS)] for curve in curves]


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))


def _plot_data(shown: Plot) -> dict[str, Any]:
    curves = [
        {
            "label": curve.label,
            "method": curve.points[0].score.cell.method,
            "flat": curve.flat,
            "points": [
                {
                    "x": point.x,
                    "mean": point.score.mean,
                    "std": point.score.std,
                    "n": point.score.n,
                    "seeds": list(point.score.values.values()),
                    "paper": point.paper,
                }
                for point in curve.points
            ],
        }
        for curve in shown.curves
    ]
    return {"form": shown.form, "x": shown.x, "y": shown.y, "log": shown.log, "curves": curves}


def _histories(findings: Findings) -> list[dict[str, Any]]:
    """Return the training curves of each cell; if there are many, only each method's best is shown at first."""
    leading = {id(findings.best(row.method)) for row in findings.rows}
    scores = [*(row.score for row in findings.rows if row.score), *findings.tuning]
    groups: list[Mapping[str, Any]] = []
    for score in scores:
        pasts = [{"seed": run.point.seed, "status": run.status, **history(run)} for run in score.runs]
        pasts = [past for past in pasts if past["epoch"]]
        tuning = " (tuning)" if score.stage == "tune" else ""
        if pasts:
            shown = len(scores) <= INITIALLY_SHOWN or id(score) in leading or score.chosen
            groups.append(
                {"label": score.cell.name + tuning, "method": score.cell.method, "shown": shown, "runs": pasts}
            )
    if groups and not any(group["shown"] for group in groups):
        groups = [{**group, "shown": at < INITIALLY_SHOWN} for at, group in enumerate(groups)]
    return [dict(group) for group in groups]


def _measures(findings: Findings) -> dict[str, str]:
    splits = {run.point.settings.data.evaluate for run in findings.collected.runs}
    split = " or ".join(sorted(splits)) or "test"
    return {name: text.format(split=split) for name, text in MEASURES.items()}

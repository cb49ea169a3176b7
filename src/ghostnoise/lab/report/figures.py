"""The figure of an experiment as PNG and PDF, in the paper's form."""

import io
import math
import statistics
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.report import noise_runs
from ghostnoise.lab.report.aggregate import Findings
from ghostnoise.lab.report.curves import Curve, Picture, history, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which all eyes tell apart, without the yellow that white paper swallows.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(findings: Findings, kind: str) -> bytes:
    """The figure as a "png" or "pdf"."""
    from matplotlib.figure import Figure

    if noise_runs.pictured(findings.gathered, findings.noise):
        return noise_runs.draw(findings.gathered, findings.noise, kind)
    shown = picture(findings)
    noise = findings.gathered.experiment.report.form == "noise"
    flat = shown.form == "bars" and not noise
    figure = Figure(figsize=(6, 1 + 0.34 * len(shown.curves)) if flat else (6, 3.8), layout="constrained")
    axes = figure.subplots()
    if noise:
        _training(axes, findings)
    elif shown.form == "curves":
        _curves(axes, shown)
    else:
        _bars(axes, shown)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if flat else "y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    file = io.BytesIO()
    # Without the date: the same runs give the same bytes.
    dates: dict[str, Any] = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
    figure.savefig(file, format=kind, dpi=160, **dates)
    return file.getvalue()


def _curves(axes: "Axes", shown: Picture) -> None:
    numeric = all(isinstance(spot.x, int | float) for curve in shown.curves if not curve.flat for spot in curve.spots)
    for curve, color, marker in zip(shown.curves, cycle(COLORS), cycle(MARKERS), strict=False):
        spots = [spot for spot in curve.spots if spot.score.mean is not None]
        if not spots:
            continue
        means = [spot.score.mean or 0.0 for spot in spots]
        stds = [spot.score.std or 0.0 for spot in spots]
        if curve.flat:
            axes.axhline(means[0], color=color, linestyle=":", linewidth=1.6, label=curve.label)
            axes.axhspan(means[0] - stds[0], means[0] + stds[0], color=color, alpha=0.08, linewidth=0)
            continue
        xs = [spot.x if numeric else str(spot.x) for spot in spots]
        axes.plot(xs, means, color=color, marker=marker, markersize=5, linewidth=1.6, label=curve.label)
        low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    if shown.log and numeric:
        _logarithmic(axes, shown)
    axes.set_xlabel(shown.x)
    axes.set_ylabel(shown.y)
    _legend(axes)


def _logarithmic(axes: "Axes", shown: Picture) -> None:
    from matplotlib.ticker import NullLocator

    ticks = sorted({spot.x for curve in shown.curves if not curve.flat for spot in curve.spots})
    if not ticks:
        return
    few = [tick for tick in ticks if math.log2(tick).is_integer()] if len(ticks) > 10 else ticks
    axes.set_xscale("log", base=2)
    axes.set_xticks(few, [str(tick) for tick in few])
    axes.xaxis.set_minor_locator(NullLocator())


def _bars(axes: "Axes", shown: Picture) -> None:
    """A line for each cell: a dot for each seed, and below them the mean and the deviation."""
    from matplotlib.ticker import MaxNLocator

    for at, (curve, color) in enumerate(zip(shown.curves, _by_method(shown.curves), strict=True)):
        spot = curve.spots[0]
        values = list(spot.score.values.values())
        if spot.score.mean is not None:
            axes.scatter(values, [at - 0.14] * len(values), s=18, color=color, alpha=0.55, linewidths=0)
            axes.errorbar(spot.score.mean, at + 0.14, xerr=spot.score.std, fmt="|", color=color, markersize=9,
                          markeredgewidth=2.2, linewidth=1.6, capsize=3)  # fmt: skip
        else:
            axes.annotate(spot.score.lacking, (0.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    papers = [
        (spot.paper, at) for at, curve in enumerate(shown.curves) for spot in curve.spots if spot.paper is not None
    ]
    if papers:
        numbers, places = zip(*papers, strict=True)
        axes.scatter(numbers, places, marker="D", s=24, facecolors="none", edgecolors="black", label="paper")
    axes.set_yticks(range(len(shown.curves)), [curve.label for curve in shown.curves])
    axes.set_ylim(len(shown.curves) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(shown.y)
    _legend(axes)


def _training(axes: "Axes", findings: Findings) -> None:
    """Accuracy over epochs: the mean of each cell's runs."""
    scores = [row.score for row in findings.rows if row.score]
    for score, color in zip(scores, cycle(COLORS), strict=False):
        by_epoch: dict[float, list[float]] = {}
        for past in map(history, score.runs):
            for epoch, accuracy in zip(past["epoch"], past["accuracy"], strict=True):
                if epoch is not None and accuracy is not None:
                    by_epoch.setdefault(epoch, []).append(accuracy)
        means = {epoch: statistics.fmean(values) for epoch, values in sorted(by_epoch.items())}
        if means:
            axes.plot(list(means), list(means.values()), color=color, linewidth=1.6, label=score.cell.name)
    axes.set_xlabel("epoch")
    axes.set_ylabel(picture(findings).y)
    _legend(axes)


def _by_method(curves: Sequence[Curve]) -> list[str]:
    methods = list(dict.fromkeys(curve.spots[0].score.cell.method for curve in curves))
    return [COLORS[methods.index(curve.spots[0].score.cell.method) % len(COLORS)] for curve in curves]


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))

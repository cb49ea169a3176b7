"""What the figures of a report show: series over an axis, or a row for each cell, of one measure."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ghostnoise.lab.report import colors, measures
from ghostnoise.lab.report.measures import Summary
from ghostnoise.lab.report.statistics import Findings, Score
from ghostnoise.lab.report.tables import short
from ghostnoise.lab.run import number

GHOST_SIZE = "norm.ghost_size"
FEWEST_SIZES = 3  # values on the axis of ghost sizes that make a curve
FEWEST_FOR_QUARTILES = 8  # points
LOGARITHMIC = (GHOST_SIZE, "optim.lr", "optim.weight_decay")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

Measure = Callable[[Score], Summary | None]


@dataclass
class ChartPoint:
    """A cell in a chart, at `x` on the axis; without a summary if no run has finished."""

    x: Any
    score: Score
    summary: Summary | None
    paper: float | None = None
    """The paper's number; a number that the paper gives for a method as a whole is at one of its cells only."""


@dataclass
class Series:
    """The cells of a method along the axis; one cell if the method does not have the axis (`flat`)."""

    label: str
    method: str
    """The method's name in the registry, which decides the colour."""
    style: int = 0
    """Distinguishes series with the same colour by marker and dashes."""
    points: list[ChartPoint] = field(default_factory=list)
    flat: bool = False

    @property
    def color(self) -> colors.Color:
        """The colour of the method."""
        return colors.of(self.method)

    @property
    def marker(self) -> str:
        """One of MARKERS."""
        return MARKERS[self.style % len(MARKERS)]

    @property
    def dash(self) -> str:
        """One of DASHES."""
        return DASHES[self.style % len(DASHES)]


@dataclass
class Chart:
    """A figure: curves over the axis `x`, or a row for each cell if `x` is empty."""

    title: str
    series: list[Series]
    measure: str
    """The measured quantity, with its unit."""
    x: str = ""
    log: bool = False
    higher_is_better: bool = True

    @property
    def form(self) -> str:
        """Either "curves" or "rows"."""
        return "curves" if self.x else "rows"

    def points(self) -> list[tuple[Series, ChartPoint, Summary]]:
        """Return the points that have a value."""
        return [(each, point, point.summary) for each in self.series for point in each.points if point.summary]

    def unbanded(self) -> bool:
        """Return whether a point has too few runs for an interval that can be drawn."""
        return any(summary.band is None for _, _, summary in self.points())


def views(findings: Findings) -> list[Chart]:
    """Return the figures of the accuracy, the one to be shown first in front.

    A grid with an axis of ghost sizes has a curve over it, whatever form the recipe names; every experiment has rows.
    """
    return [*(over(findings, axis) for axis in axes_of_curves(findings)), rows(findings)]


def first(findings: Findings) -> Chart:
    """Return the figure of the accuracy for files: rows if the recipe asks for them, else the first view."""
    report = findings.collected.experiment.report
    asked = "form" in report.model_fields_set and report.form == "bars"
    return rows(findings) if asked else views(findings)[0]


def gaps(findings: Findings) -> Chart:
    """Return the figure of the train-test gap, in the form of the first view of the accuracy."""
    axis = next(iter(axes_of_curves(findings)), "")
    chart = over(findings, axis, measures.gap) if axis else rows(findings, measures.gap)
    chart.measure = f"training minus {split(_scores(findings, axis))} accuracy, points"
    chart.higher_is_better = False
    for each in chart.series:
        for point in each.points:
            point.paper = None
    return chart


def over(findings: Findings, axis: str, measure: Measure = measures.accuracy) -> Chart:
    """Return curves over an axis; an axis that was tuned has those of the tuning, since one cell makes no curve."""
    scores, series = _scores(findings, axis), dict[str, Series]()
    for score in scores:
        place = dict(score.at)
        rest = [f"{short(key)}={value}" for key, value in place.items() if key != axis]
        label = " ".join([score.label, *rest])
        one = series.setdefault(label, Series(label, score.settings.norm.method, flat=axis not in place))
        paper = None if score.stage == "tune" else _paper(score)
        one.points.append(ChartPoint(place.get(axis), score, measure(score), paper))
    values = [point.x for one in series.values() if not one.flat for point in one.points]
    for one in series.values():
        if all(number(point.x) is not None for point in one.points):
            one.points.sort(key=lambda point: float(point.x))
    _style(series.values())
    _once(list(series.values()))
    log = axis in LOGARITHMIC and all((number(x) or 0) > 0 for x in values)
    name = short(axis).replace("_", " ")
    return Chart(f"Over the {name}", list(series.values()), f"{split(scores)} accuracy, %", name, log)


def rows(findings: Findings, measure: Measure = measures.accuracy) -> Chart:
    """Return a row for each cell of the results."""
    scores = [row.score for row in findings.rows if row.score]
    series = [
        Series(row_label(score), score.settings.norm.method, 0,
               [ChartPoint(score.cell, score, measure(score), _paper(score))])
        for score in scores
    ]  # fmt: skip
    _once(series)
    return Chart("Every cell", series, f"{split(scores)} accuracy, %")


def zoomed(chart: Chart) -> tuple[tuple[float, float] | None, list[tuple[Series, ChartPoint, Summary]]]:
    """Return the range of the measure that shows the data, and the points that lie outside of it.

    The range has all seeds and all intervals that are drawn. A cell that fails would make the differences between all
    others invisible: it is left out if its mean is worse than the nearer quartile of the means by more than three
    interquartile ranges.
    """
    points = chart.points()
    if not points:
        return None, []
    means = [summary.mean for _, _, summary in points]
    low, high = -math.inf, math.inf
    if len(means) >= FEWEST_FOR_QUARTILES:
        lower, _, upper = statistics.quantiles(means, n=4)
        far = 3 * (upper - lower)
        low, high = (lower - far, high) if chart.higher_is_better else (low, upper + far)
    shown: list[float] = []
    for _, point, summary in points:
        if low <= summary.mean <= high:
            shown += [*summary.values, *(summary.band or ()), *([point.paper] if point.paper is not None else [])]
    least, most = min(shown), max(shown)
    margin = 0.06 * (most - least) or 0.5
    return (least - margin, most + margin), [each for each in points if not low <= each[2].mean <= high]


def split(scores: Iterable[Score]) -> str:
    """Name the images on which the cells were evaluated."""
    return " or ".join(sorted({score.settings.data.evaluate for score in scores})) or "test"


def row_label(score: Score) -> str:
    """Return the method and its values on the axes, without the names of the axes."""
    return " ".join([score.label, ", ".join(str(value) for _, value in score.at)]).strip()


def axes_of_curves(findings: Findings) -> list[str]:
    """Return the axes that have curves: the one that the recipe names, and that of the ghost sizes."""
    report = findings.collected.experiment.report
    axes = [report.x] if report.form == "curves" and report.x else []
    return axes if GHOST_SIZE in axes or _sizes(findings) < FEWEST_SIZES else [*axes, GHOST_SIZE]


def _sizes(findings: Findings) -> int:
    return len({dict(score.at).get(GHOST_SIZE) for score in _scores(findings, GHOST_SIZE)} - {None})


def _scores(findings: Findings, axis: str) -> list[Score]:
    select = findings.collected.experiment.select
    if select and axis in select.axes:
        return findings.tuning
    return [row.score for row in findings.rows if row.score]


def _style(series: Iterable[Series]) -> None:
    """Number the series that have the same colour."""
    seen: dict[str, int] = {}
    for one in series:
        one.style = seen.get(one.color.light, 0)
        seen[one.color.light] = one.style + 1


def _once(series: Sequence[Series]) -> None:
    """Keep one of the equal numbers that the paper gives for a method: that at the cell with the highest mean."""
    by_method: dict[tuple[str, float], list[ChartPoint]] = {}
    for point in (point for one in series for point in one.points):
        if point.paper is not None:
            by_method.setdefault((point.score.label, point.paper), []).append(point)
    for points in by_method.values():
        best = max(points, key=lambda point: point.summary.mean if point.summary else -1.0)
        for point in points:
            point.paper = point.paper if point is best else None


def _paper(score: Score) -> float | None:
    """Return the paper's number, if its text begins with one."""
    found = re.match(r"\D{0,2}(\d+(?:\.\d+)?)", score.paper or "")
    return float(found[1]) if found else None

"""The data of the page's interactive figures, with the digits that can be seen."""

from collections.abc import Sequence
from typing import Any

from ghostnoise.lab.report import charts, colors, histories, measures, noise_figures
from ghostnoise.lab.report.charts import Chart, ChartPoint
from ghostnoise.lab.report.figures import explained, left_out
from ghostnoise.lab.report.noise import NoiseRun
from ghostnoise.lab.report.statistics import Findings


def plots(findings: Findings, noise: Sequence[NoiseRun]) -> dict[str, Any]:
    """Return the data of the interactive figures."""
    gap = charts.gaps(findings)
    return {
        "views": [_chart(each) for each in charts.views(findings)],
        "gap": _chart(gap) if gap.points() else None,
        "cost": cost(findings),
        "training": histories.page_data(findings),
        "noise": noise_figures.page_plots(noise, findings.collected.experiment.report.law_size),
    }


def _chart(chart: Chart) -> dict[str, Any]:
    """Return the data of a chart of the accuracy or the gap."""
    shown, outside = charts.zoomed(chart)
    left = {id(point) for _, point, _ in outside}
    series = [
        {
            "label": each.label,
            "color": each.color,
            "marker": each.marker,
            "dash": each.dash,
            "flat": each.flat,
            "points": [_point(point, id(point) in left) for point in each.points],
        }
        for each in chart.series
    ]
    return {
        "title": chart.title, "form": chart.form, "x": chart.x, "y": chart.measure, "log": chart.log,
        "range": shown and [_short(end) for end in shown], "note": note(chart), "series": series,
    }  # fmt: skip


def note(chart: Chart) -> str:
    """Explain the marks of a chart, and name the points outside of it."""
    _, outside = charts.zoomed(chart)
    words = f"{explained(chart)}."
    if outside and chart.form == "curves":
        words += f" Outside of the figure, {left_out(chart, outside)}."
    return words[:1].upper() + words[1:]


def _point(point: ChartPoint, outside: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"x": point.x}
    if point.summary is None:
        return made | {"lacking": point.score.lacking}
    found = point.summary
    made |= {"mean": _short(found.mean), "low": _short(found.low), "high": _short(found.high), "n": found.n}
    made["seeds"] = [_short(value) for value in found.values]
    made |= {"band": [_short(end) for end in found.band]} if found.band else {}
    made |= {"paper": point.paper} if point.paper is not None else {}
    return made | ({"outside": True} if outside else {})


def cost(findings: Findings) -> dict[str, Any] | None:
    """Return the data of the accuracy against the cost; None if fewer than two cells have both."""
    best = measures.leading(findings)
    chart = charts.rows(findings)
    _, outside = charts.zoomed(chart)
    found = {id(point.score): (point, summary) for _, point, summary in chart.points()}
    left = {id(point) for _, point, _ in outside}
    compared = [
        (score, cost, *found[id(score)]) for score, cost in measures.costs(findings) if id(score) in found
    ]  # fmt: skip
    compared = [each for each in compared if id(each[2]) not in left]
    if len(compared) < 2:
        return None
    times = [time for score, cost, *_ in compared if id(score) in best for time in (cost.fastest, cost.slowest)]
    means = [end for *_, summary in compared for end in summary.band or (summary.mean,)]
    points = [
        {
            "label": charts.row_label(score), "color": colors.of(score.settings.norm.method),
            "cost": _short(cost.median), "fastest": _short(cost.fastest), "slowest": _short(cost.slowest),
            "mean": _short(summary.mean), "band": summary.band and [_short(end) for end in summary.band],
            "best": id(score) in best,
        }
        for score, cost, _, summary in compared
    ]  # fmt: skip
    return {
        "baseline": findings.baseline, "x": f"training time relative to {findings.baseline}", "y": chart.measure,
        "points": points, "ranges": [_widened(times), _widened(means)],
    }  # fmt: skip


def _widened(values: Sequence[float]) -> list[float | None]:
    """Return the range of values with a margin."""
    margin = 0.06 * (max(values) - min(values)) or 0.1
    return [_short(min(values) - margin), _short(max(values) + margin)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")

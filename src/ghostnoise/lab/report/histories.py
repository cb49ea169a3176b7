"""Training curves for figures: the mean over the seeds of a cell with its interval, and the curve of each seed.

A page must stay small whatever the number of runs is: curves are thinned to what a screen can show, numbers are rounded
to what can be seen, and experiments with very many runs have no curves of single seeds.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from ghostnoise.lab.report import colors
from ghostnoise.lab.report.collect import Run, number
from ghostnoise.lab.report.measures import summarized
from ghostnoise.lab.report.statistics import Findings, Score

MEASURES = {
    "accuracy": "{split} accuracy, %",
    "loss": "{split} loss",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy, %",
}
"""In the order in which a page prefers them: it first shows one that was measured after more than one epoch."""
INITIALLY_SHOWN = 6  # cells whose curves a page shows at first
MOST_POINTS, FEWEST_POINTS = 120, 15  # of a curve
MOST_NUMBERS = 120_000  # of all curves on a page, about 0.6 MB

History = dict[str, list[float | None]]


def history(run: Run) -> History:
    """Return the epochs of a run and its measures after each; None where it diverged or was not evaluated."""
    lines = [line for line in (run.found.metrics() if run.found else []) if isinstance(line, dict)]
    lines = [line for line in lines if number(line.get("epoch")) is not None]
    return {name: [number(line.get(name)) for line in lines] for name in ("epoch", *MEASURES)}


def measure_names(findings: Findings) -> dict[str, str]:
    """Return the names of the measures."""
    splits = {run.point.settings.data.evaluate for run in findings.collected.runs}
    split = " or ".join(sorted(splits)) or "test"
    return {name: text.format(split=split) for name, text in MEASURES.items()}


def page_data(findings: Findings) -> dict[str, Any]:
    """Return the curves of each cell; if there are many cells, only each method's best is shown at first."""
    leading = {id(findings.best(row.method)) for row in findings.rows}
    scores = [*(row.score for row in findings.rows if row.score), *findings.tuning]
    recorded = [(score, [(run, history(run)) for run in score.runs]) for score in scores]
    recorded = [(score, [each for each in pasts if each[1]["epoch"]]) for score, pasts in recorded]
    recorded = [each for each in recorded if each[1]]
    few = len(recorded) <= INITIALLY_SHOWN
    counts = [len(pasts) for _, pasts in recorded]
    points, seeds = allowed(counts)
    groups: list[dict[str, Any]] = []
    for score, pasts in recorded:
        groups.append(
            {
                "label": score.cell.name + (" (tuning)" if score.stage == "tune" else ""),
                "color": colors.of(score.cell.settings.norm.method),
                "shown": few or id(score) in leading or score.chosen,
                "runs": [f"seed {run.point.seed}, {run.status}" for run, _ in pasts],
                "curves": {name: _curve([past for _, past in pasts], name, points, seeds) for name in MEASURES},
            }
        )
    if groups and not any(group["shown"] for group in groups):
        for group in groups[:INITIALLY_SHOWN]:
            group["shown"] = True
    curved = (name for name in MEASURES if any(len(group["curves"][name]["x"]) > 1 for group in groups))
    return {"groups": groups, "measures": measure_names(findings), "first": next(curved, "accuracy"), "seeds": seeds}


def allowed(counts: Sequence[int]) -> tuple[int, bool]:
    """Return the number of points of a curve, and whether curves of seeds are kept, for cells with `counts` runs."""
    for seeds in (True, False):
        lines = len(MEASURES) * sum(4 + (count if seeds and count > 1 else 0) for count in counts)
        points = MOST_NUMBERS // max(lines, 1)
        if points >= FEWEST_POINTS or not seeds:
            return max(min(points, MOST_POINTS), FEWEST_POINTS), seeds and points >= FEWEST_POINTS
    raise AssertionError


def means(pasts: Sequence[History], name: str) -> dict[float, list[float]]:
    """Return the values of all runs that have one, by epoch."""
    by_epoch: dict[float, list[float]] = {}
    for past in pasts:
        for epoch, value in zip(past["epoch"], past[name], strict=True):
            if epoch is not None and value is not None:
                by_epoch.setdefault(epoch, []).append(value)
    return dict(sorted(by_epoch.items()))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean as figures draw it; None for too few values."""
    summary = summarized(values)
    return summary.band if summary else None


def thinned(epochs: Sequence[float], most: int) -> list[float]:
    """Select at most `most` epochs, evenly spaced, with the first and the last."""
    if len(epochs) <= most:
        return list(epochs)
    last = len(epochs) - 1
    return [epochs[at] for at in sorted({round(last * k / (most - 1)) for k in range(most)})]


def _curve(pasts: Sequence[History], name: str, points: int, seeds: bool) -> dict[str, Any]:
    by_epoch = means(pasts, name)
    chosen = thinned(list(by_epoch), points)
    ends = [interval(by_epoch[epoch]) for epoch in chosen]
    made: dict[str, Any] = {
        "x": [int(epoch) for epoch in chosen],
        "mean": [_rounded(statistics.fmean(by_epoch[epoch])) for epoch in chosen],
        "low": [end and _rounded(end[0]) for end in ends],
        "high": [end and _rounded(end[1]) for end in ends],
    }
    if seeds and len(pasts) > 1:
        found = [dict(zip(past["epoch"], past[name], strict=True)) for past in pasts]
        made["runs"] = [[_rounded(each.get(epoch)) for epoch in chosen] for each in found]
    return made


def _rounded(value: float | None) -> float | None:
    """Round to what a screen can show, without a fraction if it is zero."""
    if value is None:
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def shown_first(findings: Findings) -> list[Score]:
    """Return the cells whose curves a figure in a file shows: all of a few, else the best of each method."""
    scores = [row.score for row in findings.rows if row.score]
    if len(scores) <= INITIALLY_SHOWN:
        return scores
    leading = {id(findings.best(row.method)) for row in findings.rows}
    return [score for score in scores if id(score) in leading]

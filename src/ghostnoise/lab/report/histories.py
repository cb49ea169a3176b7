"""Training curves for figures: the mean over the seeds of a cell with its interval, and the curve of each seed.

A page must stay small whatever the number of runs is: curves are thinned to what a screen can show, numbers are rounded
to what can be seen, and experiments with very many runs have no curves of single seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ghostnoise.lab.report import colors, measures
from ghostnoise.lab.report.measures import Summary, summarized
from ghostnoise.lab.report.statistics import Findings, Score
from ghostnoise.lab.run import Run, number
from ghostnoise.lab.store import folder as store

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

History = Mapping[int, Mapping[str, Any]]
"""Measures by epoch."""


def history(run: Run) -> History:
    """Return the measures of a run after each epoch; None where it diverged or was not evaluated."""
    return {line["epoch"]: line for line in store.history(run)}


def measure_names(findings: Findings) -> dict[str, str]:
    """Return the names of the measures."""
    splits = {run.settings.data.evaluate for run in findings.collected.runs}
    split = " or ".join(sorted(splits)) or "test"
    return {name: text.format(split=split) for name, text in MEASURES.items()}


def page_data(findings: Findings) -> dict[str, Any]:
    """Return the curves of each cell; if there are many cells, only each method's best is shown at first."""
    leading = measures.leading(findings)
    scores = [*(row.score for row in findings.rows if row.score), *findings.tuning]
    recorded = [(score, [(run, history(run)) for run in score.runs]) for score in scores]
    recorded = [(score, [each for each in pasts if each[1]]) for score, pasts in recorded]
    recorded = [each for each in recorded if each[1]]
    few = len(recorded) <= INITIALLY_SHOWN
    counts = [len(pasts) for _, pasts in recorded]
    points, seeds = allowed(counts)
    groups: list[dict[str, Any]] = []
    for score, pasts in recorded:
        groups.append(
            {
                "label": score.cell + (" (tuning)" if score.stage == "tune" else ""),
                "color": colors.of(score.settings.norm.method),
                "shown": few or id(score) in leading or score.chosen,
                "runs": [f"seed {run.seed}, {run.status}" for run, _ in pasts],
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


def evaluated(pasts: Sequence[History], name: str) -> list[int]:
    """Return the epochs after which a run has a measure, in order."""
    return sorted({epoch for past in pasts for epoch, line in past.items() if line.get(name) is not None})


def values_at(pasts: Sequence[History], name: str, epoch: int) -> list[float | None]:
    """Return a measure of each run after an epoch."""
    return [number(past[epoch].get(name)) if epoch in past else None for past in pasts]


def thinned(epochs: Sequence[int], most: int) -> list[int]:
    """Select at most `most` epochs, evenly spaced, with the first and the last."""
    if len(epochs) <= most:
        return list(epochs)
    last = len(epochs) - 1
    return [epochs[at] for at in sorted({round(last * k / (most - 1)) for k in range(most)})]


def summaries(pasts: Sequence[History], name: str, most: int) -> dict[int, Summary]:
    """Summarize a measure over the runs that have it, after at most `most` epochs."""
    found = {
        epoch: summarized(value for value in values_at(pasts, name, epoch) if value is not None)
        for epoch in thinned(evaluated(pasts, name), most)
    }
    return {epoch: summary for epoch, summary in found.items() if summary is not None}


def _curve(pasts: Sequence[History], name: str, points: int, seeds: bool) -> dict[str, Any]:
    found = summaries(pasts, name, points)
    bands = [summary.band or (None, None) for summary in found.values()]
    made: dict[str, Any] = {
        "x": list(found),
        "mean": [_rounded(summary.mean) for summary in found.values()],
        "low": [_rounded(low) for low, _ in bands],
        "high": [_rounded(high) for _, high in bands],
    }
    if seeds and len(pasts) > 1:
        columns = [map(_rounded, values_at(pasts, name, epoch)) for epoch in found]
        made["runs"] = [list(line) for line in zip(*columns, strict=True)] if columns else []
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
    leading = measures.leading(findings)
    return [score for score in scores if id(score) in leading]

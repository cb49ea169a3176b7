"""What the figures show, for paper and page alike: accuracy over an axis, bars, and training runs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ghostnoise.lab.report.aggregate import Findings, Score
from ghostnoise.lab.report.gather import Run, number
from ghostnoise.lab.report.tables import short

MEASURES = {
    "accuracy": "{split} accuracy, %",
    "train_accuracy": "training accuracy, %",
    "loss": "{split} loss",
    "train_loss": "training loss",
}


@dataclass
class Spot:
    """A cell in a figure."""

    x: Any
    score: Score

    @property
    def paper(self) -> float | None:
        """The paper's number, if it starts with one."""
        found = re.match(r"\D{0,2}(\d+(?:\.\d+)?)", self.score.cell.paper or "")
        return float(found[1]) if found else None


@dataclass
class Curve:
    """A method's cells along the axis; without the axis, one cell."""

    label: str
    spots: list[Spot] = field(default_factory=list)
    flat: bool = False


@dataclass
class Picture:
    """The figure of an experiment."""

    form: str
    curves: list[Curve]
    y: str
    x: str = ""
    log: bool = False


def picture(findings: Findings) -> Picture:
    """Curves over the axis that the experiment names, or bars."""
    report = findings.gathered.experiment.report
    if report.form == "curves" and report.x:
        return _curves(findings, report.x)
    scores = [row.score for row in findings.rows if row.score]
    bars = [Curve(_bar(score), [Spot(score.cell.name, score)]) for score in scores]
    return Picture("bars", bars, f"{_split(scores)} accuracy, %")


def _bar(score: Score) -> str:
    """The method and where it stands, without the axes' names."""
    return " ".join([score.cell.method, ", ".join(str(value) for _, value in score.cell.at)]).strip()


def _curves(findings: Findings, axis: str) -> Picture:
    tested = [row.score for row in findings.rows if row.score]
    select = findings.gathered.experiment.select
    scores = findings.tuning if select and axis in select.axes else tested  # winners alone make no curve
    made: dict[str, Curve] = {}
    for score in scores:
        place = dict(score.cell.at)
        rest = [f"{short(key)}={value}" for key, value in place.items() if key != axis]
        label = " ".join([score.cell.method, *rest])
        curve = made.setdefault(label, Curve(label, flat=axis not in place))
        curve.spots.append(Spot(place.get(axis), score))
    log = axis == "norm.ghost_size"
    for curve in made.values():
        if all(number(spot.x) is not None for spot in curve.spots):
            curve.spots.sort(key=lambda spot: float(spot.x))
    return Picture("curves", list(made.values()), f"{_split(scores)} accuracy, %", short(axis).replace("_", " "), log)


def _split(scores: Iterable[Score]) -> str:
    return " or ".join(sorted({score.cell.settings.data.evaluate for score in scores})) or "test"


def history(run: Run) -> dict[str, list[float | None]]:
    """The epochs of a run and its measures after each; None where it diverged."""
    lines = [line for line in (run.found.metrics() if run.found else []) if isinstance(line, dict)]
    lines = [line for line in lines if number(line.get("epoch")) is not None]
    return {name: [_rounded(line.get(name)) for line in lines] for name in ("epoch", *MEASURES)}


def _rounded(value: object) -> float | None:
    found = number(value)
    return None if found is None else float(f"{found:.6g}")

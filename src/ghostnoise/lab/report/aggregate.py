"""Cells as means over seeds, their differences to the baseline, and what that says about the claims."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ghostnoise.lab.config import plan
from ghostnoise.lab.config.grid import Cell
from ghostnoise.lab.config.plan import Stage
from ghostnoise.lab.report.gather import Gathered, Run, number
from ghostnoise.lab.report.inference import Corrected, Paired, holm, paired
from ghostnoise.lab.report.noise_runs import Measured

FEW = 5  # below so many seeds, intervals are wide and normality cannot be seen


@dataclass(frozen=True)
class Score:
    """The runs of a cell, and their accuracies."""

    cell: Cell
    stage: Stage
    runs: tuple[Run, ...]
    chosen: bool = False
    """Whether it won the tuning of its method."""

    @property
    def values(self) -> dict[int, float]:
        """The accuracy of each seed that finished."""
        return {run.point.seed: run.accuracy for run in self.runs if run.accuracy is not None}

    @property
    def n(self) -> int:
        """The runs that finished."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """Over the runs that finished."""
        return statistics.fmean(self.values.values()) if self.n else None

    @property
    def std(self) -> float | None:
        """Their standard deviation, with n - 1."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None

    @property
    def best(self) -> float | None:
        """The highest accuracy after any epoch of any run."""
        return max(self._numbers("best_accuracy"), default=None)

    @property
    def seconds(self) -> float | None:
        """The mean length of a run."""
        return _mean(self._numbers("seconds"))

    @property
    def speed(self) -> float | None:
        """The mean images a second."""
        return _mean(self._numbers("images_per_second"))

    @property
    def counts(self) -> Counter[str]:
        """How many runs there are of each status."""
        return Counter(run.status for run in self.runs)

    @property
    def lacking(self) -> str:
        """The runs without an accuracy, in words."""
        words = ("diverged", "failed", "unfinished", "missing")
        return ", ".join(f"{self.counts[word]} {word}" for word in words if self.counts[word])

    def _numbers(self, name: str) -> list[float]:
        found = [number(run.result.get(name)) for run in self.runs if run.status == "finished"]
        return [each for each in found if each is not None]


@dataclass
class Difference:
    """A cell against another one, over the seeds of both."""

    ours: Score
    theirs: Score
    paired: Paired | None
    corrected: Corrected | None = None

    @property
    def corrected_interval(self) -> tuple[float, float] | None:
        """At the level of Holm's correction."""
        return self.paired.interval(self.corrected.alpha) if self.paired and self.corrected else None


@dataclass
class Row:
    """A line of the table."""

    method: str
    at: tuple[tuple[str, Any], ...]
    score: Score | None
    paper: str | None = None
    difference: Difference | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The method and its place."""
        return self.score.cell.name if self.score else self.method


@dataclass
class Findings:
    """All that the report says."""

    gathered: Gathered
    rows: list[Row]
    tuning: list[Score]
    baseline: str
    differences: list[Difference] = field(default_factory=list)
    """All comparisons that Holm's correction counts."""
    noise: list[Measured] = field(default_factory=list)
    """The runs that have recorded their noise; `noise_runs.measured` finds them."""

    def best(self, method: str) -> Score | None:
        """The method's winner, or its cell with the highest mean among those with the fewest gaps."""
        scores = [row.score for row in self.rows if row.method == method and row.score and row.score.n]
        return max(scores, key=lambda score: (not score.counts["diverged"], score.n, score.mean), default=None)

    def compare(self, ours: Score, theirs: Score) -> Difference:
        """The difference of two cells; the same object for the same two."""
        for known in self.differences:
            if known.ours is ours and known.theirs is theirs:
                return known
        made = Difference(ours, theirs, paired(ours.values, theirs.values))
        self.differences.append(made)
        return made

    def correct(self) -> None:
        """Correct all comparisons for their number."""
        pairs = [each.paired.p if each.paired else None for each in self.differences]
        for difference, corrected in zip(self.differences, holm(pairs), strict=True):
            difference.corrected = corrected


def aggregate(gathered: Gathered) -> Findings:
    """The table's rows with their differences to the baseline; `claims.judge` adds its own, then `correct`."""
    experiment = gathered.experiment
    won = {plan.key(experiment.tested(cell).settings) for cell in gathered.winners.values()}
    scores = _scores(gathered, won)
    tuning = [score for score in scores if score.stage == "tune"]
    rows = [_row(score) for score in scores if score.stage == "test"]
    rows += _undecided(gathered, tuning)
    labels = [method.label for method in experiment.grid.methods]
    rows.sort(key=lambda row: labels.index(row.method))
    findings = Findings(gathered, rows, tuning, experiment.report.baseline or labels[0])
    for row in rows:
        _against_baseline(findings, row)
    return findings


def _scores(gathered: Gathered, won: set[str]) -> list[Score]:
    cells: dict[tuple[Stage, str], list[Run]] = {}
    for run in gathered.runs:
        cells.setdefault((run.point.stage, plan.key(run.point.cell.settings)), []).append(run)
    made = []
    for (stage, _), several in cells.items():
        cell = several[0].point.cell
        chosen = stage == "tune" and plan.key(gathered.experiment.tested(cell).settings) in won
        made.append(Score(cell, stage, tuple(several), chosen))
    return made


def _row(score: Score) -> Row:
    return Row(score.cell.method, score.cell.at, score, score.cell.paper, note=score.lacking)


def _undecided(gathered: Gathered, tuning: Sequence[Score]) -> list[Row]:
    """A row for each group of cells of which none is chosen yet."""
    experiment = gathered.experiment
    tuned = experiment.select.axes if experiment.select else []
    groups: dict[str, list[Score]] = {}
    for score in tuning:
        groups.setdefault(experiment.group(score.cell), []).append(score)
    made = []
    for name, own in groups.items():
        if name not in gathered.winners:
            left = sum(run.status not in ("finished", "diverged") for score in own for run in score.runs)
            note = f"not tested yet: {left} tuning {'run' if left == 1 else 'runs'} to go"
            at = tuple(pair for pair in own[0].cell.at if pair[0] not in tuned)
            made.append(
                Row(own[0].cell.method, at, None, note=note if left else "not tested: all that was tuned diverged")
            )
    return made


def _against_baseline(findings: Findings, row: Row) -> None:
    if row.method == findings.baseline or row.score is None:
        return
    theirs = [other for other in findings.rows if other.method == findings.baseline and other.score]
    here, select = dict(row.at), findings.gathered.experiment.select
    tuned = select.axes if select else []  # winners are compared wherever on these they stand
    theirs = [
        other for other in theirs if all(here.get(key, value) == value for key, value in other.at if key not in tuned)
    ]
    if len(theirs) == 1 and theirs[0].score:
        row.difference = findings.compare(row.score, theirs[0].score)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None

"""Means over seeds, paired differences with their intervals, paired tests, Holm correction, and ratios of gains."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.report.collect import Collected, numerics_of
from ghostnoise.lab.run import STATUSES, Numerics, Pairs, Run, Stage, number

if TYPE_CHECKING:
    from ghostnoise.lab.report.claims import Claim

ALPHA = 0.05
FEW_SEEDS = 5  # with fewer, intervals are wide and normality cannot be checked


@dataclass(frozen=True)
class Paired:
    """Mean of the paired differences of two methods, and the paired t-test of it."""

    n: int
    mean: float
    std: float | None = None
    """Standard deviation of the differences (n - 1 in the denominator); None for a single difference."""
    p: float | None = None
    """p-value of the two-sided paired t-test; None if the differences have no spread."""

    def interval(self, alpha: float = ALPHA) -> tuple[float, float] | None:
        """Return the 1 - alpha confidence interval of the mean, assuming normal differences; None without a test."""
        if self.std is None or self.p is None:
            return None
        from scipy.special import stdtrit

        half = float(stdtrit(self.n - 1, 1 - alpha / 2)) * self.std / math.sqrt(self.n)
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Corrected:
    """A p-value after Holm correction, the factor of the correction, and the number of tests in the family."""

    p: float
    factor: float
    tests: int

    @property
    def alpha(self) -> float:
        """Level of the interval that excludes 0 exactly if the corrected p-value is below ALPHA."""
        return ALPHA / self.factor


def paired(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> Paired | None:
    """Compare two methods over the keys (seeds) that both have; None if they have none in common."""
    differences = [ours[key] - theirs[key] for key in ours if key in theirs]
    if not differences:
        return None
    n, mean = len(differences), statistics.fmean(differences)
    if n == 1:
        return Paired(n, mean)
    std = statistics.stdev(differences)
    if std <= 1e-12 * max(1.0, abs(mean)):  # only rounding differs: a t-test would report near-certainty
        return Paired(n, mean, 0.0)
    from scipy.special import stdtr

    return Paired(n, mean, std, 2 * float(stdtr(n - 1, -abs(mean) / (std / math.sqrt(n)))))


def holm(values: Sequence[float | None]) -> list[Corrected | None]:
    """Apply the Holm correction to p-values; a None stays None and is not counted as a comparison."""
    order = sorted((p, at) for at, p in enumerate(values) if p is not None)
    corrected: list[Corrected | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, (len(order) - rank) * p)
        factor = largest / p if p else float(len(order) - rank)
        corrected[at] = Corrected(min(1.0, largest), factor, len(order))
    return corrected


@dataclass(frozen=True)
class Ratio:
    """The ratio of two means, and Fieller's confidence set of it: an interval, its outside, or every number."""

    value: float
    low: float
    high: float
    outside: bool = False
    """Whether the set is what lies outside of `low` and `high`; with -inf and inf, the set is every number."""


def fieller(first: Sequence[float], second: Sequence[float], alpha: float = ALPHA) -> Ratio:
    """Return the ratio of the means of paired samples with Fieller's 1 - alpha confidence set.

    The set has all r for which the paired t-test of `first - r * second` does not reject. It is unbounded if the mean
    of `second` is not significantly different from 0.
    """
    from scipy.special import stdtrit

    n, x, y = len(first), statistics.fmean(first), statistics.fmean(second)
    unit = float(stdtrit(n - 1, 1 - alpha / 2)) ** 2 / n
    a = y * y - unit * statistics.variance(second)
    b = x * y - unit * statistics.covariance(first, second)
    c = x * x - unit * statistics.variance(first)
    inside = b * b - a * c  # the set is a r² - 2 b r + c ≤ 0
    ratio = x / y if y else math.nan
    if a == 0 or (a < 0 and inside <= 0):
        return Ratio(ratio, -math.inf, math.inf)
    root = math.sqrt(max(inside, 0.0))
    low, high = sorted([(b - root) / a, (b + root) / a])
    return Ratio(ratio, low, high, outside=a < 0)


@dataclass(frozen=True)
class Score:
    """The runs of a cell, one per seed, and statistics of those that finished, each computed once."""

    runs: tuple[Run, ...]
    chosen: bool = False
    """Whether the tuning selected this cell."""

    @property
    def label(self) -> str:
        """Label of the method."""
        return self.runs[0].label

    @property
    def at(self) -> Pairs:
        """Values on the axes."""
        return self.runs[0].at

    @property
    def cell(self) -> str:
        """Name of the cell: label of the method and values on the axes."""
        return self.runs[0].cell

    @property
    def stage(self) -> Stage:
        """Whether these runs tune or test."""
        return self.runs[0].stage

    @property
    def paper(self) -> str | None:
        """The paper's result."""
        return self.runs[0].paper

    @cached_property
    def settings(self) -> Settings:
        """Settings of the first run."""
        return self.runs[0].settings

    @cached_property
    def values(self) -> dict[int, float]:
        """Accuracy of each seed that finished."""
        return {run.seed: run.accuracy for run in self.runs if run.accuracy is not None}

    @cached_property
    def comparable(self) -> dict[tuple[int, int], float]:
        """Accuracy by seed and age of the numerics: only runs that agree in both are paired."""
        return {(run.seed, run.numerics.behind): run.accuracy for run in self.runs if run.accuracy is not None}

    @cached_property
    def numerics(self) -> dict[Numerics, int]:
        """Numerics numbers of the runs that have a result, and how many runs have each."""
        return numerics_of(self.runs)

    @property
    def n(self) -> int:
        """Number of finished runs."""
        return len(self.values)

    @cached_property
    def mean(self) -> float | None:
        """Mean accuracy of the finished runs."""
        return _mean(list(self.values.values()))

    @cached_property
    def std(self) -> float | None:
        """Standard deviation of the accuracy (n - 1 in the denominator)."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of the mean, assuming normal accuracies; None for fewer than two."""
        if self.mean is None or self.std is None:
            return None
        from scipy.special import stdtrit

        half = float(stdtrit(self.n - 1, 1 - ALPHA / 2)) * self.std / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @cached_property
    def best(self) -> float | None:
        """Highest accuracy after any epoch of any finished run."""
        return max(self._numbers("best_accuracy"), default=None)

    @cached_property
    def seconds(self) -> float | None:
        """Mean duration of a finished run."""
        return _mean(self._numbers("seconds"))

    @cached_property
    def speed(self) -> float | None:
        """Mean number of images per second."""
        return _mean(self._numbers("images_per_second"))

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of runs of each status."""
        return Counter(run.status for run in self.runs)

    @cached_property
    def lacking(self) -> str:
        """Text with the number of runs that have no accuracy, by status."""
        return ", ".join(f"{self.counts[word]} {word}" for word in STATUSES[1:] if self.counts[word])

    def _numbers(self, name: str) -> list[float]:
        found = [number((run.result or {}).get(name)) for run in self.runs if run.status == "finished"]
        return [each for each in found if each is not None]


@dataclass
class Difference:
    """The paired difference between two cells; it is corrected if it is a declared test."""

    ours: Score
    theirs: Score
    paired: Paired | None
    corrected: Corrected | None = None

    @property
    def scores(self) -> tuple[Score, Score]:
        """The two cells."""
        return self.ours, self.theirs


@dataclass
class ResultRow:
    """A row of the results table."""

    method: str
    at: tuple[tuple[str, Any], ...]
    score: Score | None
    paper: str | None = None
    difference: Difference | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The method and its values on the axes."""
        return self.score.cell if self.score else self.method


@dataclass
class Findings:
    """The statistics of a report."""

    collected: Collected
    rows: list[ResultRow]
    tuning: list[Score]
    baseline: str
    claims: list["Claim"] = field(default_factory=list)
    """The declared tests, once `claims.judge` has filled them in."""
    _compared: dict[tuple[int, int], Difference] = field(default_factory=dict)

    def best(self, method: str) -> Score | None:
        """Return the method's best cell: no diverged runs first, then most finished runs, then highest mean."""
        return self._best.get(method)

    @cached_property
    def _best(self) -> dict[str, Score]:
        """The best cell of each method that has finished runs; the first of equal ones."""

        def order(score: Score) -> tuple[bool, int, float]:
            return not score.counts["diverged"], score.n, score.mean or 0.0

        best: dict[str, Score] = {}
        for row in self.rows:
            score = row.score
            if score and score.n and (row.method not in best or order(score) > order(best[row.method])):
                best[row.method] = score
        return best

    def compare(self, ours: Score, theirs: Score) -> Difference:
        """Compare two cells; the same two cells give the same object."""
        pair = id(ours), id(theirs)
        if pair not in self._compared:
            self._compared[pair] = Difference(ours, theirs, paired(ours.comparable, theirs.comparable))
        return self._compared[pair]


def aggregate(collected: Collected) -> Findings:
    """Compute the rows and their differences to the baseline, which are not corrected: they are no tests."""
    experiment = collected.experiment
    scores = _scores(collected)
    tuning = [score for score in scores if score.stage == "tune"]
    rows = [
        ResultRow(score.label, score.at, score, score.paper, note=score.lacking)
        for score in scores
        if score.stage == "test"
    ]
    rows += _undecided(collected, tuning)
    labels = [method.label for method in experiment.grid.methods]
    places = {label: at for at, label in reversed(list(enumerate(labels)))}
    rows.sort(key=lambda row: places[row.method])
    findings = Findings(collected, rows, tuning, experiment.report.baseline or labels[0])
    baseline = [row for row in rows if row.method == findings.baseline and row.score]
    for row in rows:
        _compare_with_baseline(findings, row, baseline)
    return findings


def _scores(collected: Collected) -> list[Score]:
    cells: dict[tuple[Stage, str], list[Run]] = {}
    for run in collected.runs:
        cells.setdefault((run.stage, run.cell), []).append(run)
    won = {run.cell for run in collected.winners.values()}
    return [Score(tuple(runs), stage == "tune" and cell in won) for (stage, cell), runs in cells.items()]


def _undecided(collected: Collected, tuning: Sequence[Score]) -> list[ResultRow]:
    """Make a row for each group of tuned cells from which none has been selected yet."""
    experiment = collected.experiment
    tuned = experiment.select.axes if experiment.select else []
    groups: dict[str, list[Score]] = {}
    for score in tuning:
        groups.setdefault(experiment.group(score.runs[0]), []).append(score)
    rows = []
    for name, scores in groups.items():
        if name not in collected.winners:
            left = sum(run.status not in ("finished", "diverged") for score in scores for run in score.runs)
            note = "not tested: every tuned cell has a run that diverged"
            if left:
                note = f"not tested yet: {left} tuning {'run' if left == 1 else 'runs'} not finished"
            at = tuple(pair for pair in scores[0].at if pair[0] not in tuned)
            rows.append(ResultRow(scores[0].label, at, None, note=note))
    return rows


def _compare_with_baseline(findings: Findings, row: ResultRow, baseline: Sequence[ResultRow]) -> None:
    """Compare a row with the baseline's row at the same values of the axes that both have, if there is exactly one."""
    if row.method == findings.baseline or row.score is None:
        return
    here, select = dict(row.at), findings.collected.experiment.select
    tuned = select.axes if select else []  # selected cells are compared whatever value was selected for them
    theirs = [
        other.score
        for other in baseline
        if other.score and all(here.get(key, value) == value for key, value in other.at if key not in tuned)
    ]
    if len(theirs) == 1:
        row.difference = findings.compare(row.score, theirs[0])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None

"""What a report shows of a cell's runs beside their accuracy: the gap between training and test, and the cost."""

import math
import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from ghostnoise.lab.report.statistics import ALPHA, Findings, Score
from ghostnoise.lab.run import Run, number

BUSY = 1.5  # slowest run of a cell divided by the fastest from which times are noted as rough
FEWEST_FOR_BAND = 3  # runs; the interval of two is 18 times their standard deviation wide, and would hide the rest
ROUNDING = 2.0  # seconds: the times of start and end have whole seconds


@dataclass(frozen=True)
class Summary:
    """The mean of the runs of a cell, with its 95 % interval if there are two runs or more."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.values)

    @property
    def band(self) -> tuple[float, float] | None:
        """The interval as figures draw it; None for fewer than three runs."""
        if self.low is None or self.high is None or self.n < FEWEST_FOR_BAND:
            return None
        return self.low, self.high


@dataclass(frozen=True)
class Cost:
    """Training time of a cell relative to the baseline: the median run, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float
    rough: bool
    """Whether equal runs, of the cell or of the baseline, differ much in time."""


def summarized(values: Iterable[float]) -> Summary | None:
    """Return the mean of values and its t interval; None if there are none."""
    kept = tuple(values)
    if not kept:
        return None
    mean = statistics.fmean(kept)
    if len(kept) == 1:
        return Summary(mean, None, None, kept)
    # statistics.stdev computes with fractions, which takes long for the many points of training curves
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / (len(kept) - 1))
    half = _t_factor(len(kept)) * std / math.sqrt(len(kept))
    return Summary(mean, mean - half, mean + half, kept)


@cache
def _t_factor(n: int) -> float:
    """Return the number of standard errors in one half of the 95 % interval of a mean of `n` values."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - ALPHA / 2))


def accuracy(score: Score) -> Summary | None:
    """Summarize the accuracy of the finished runs."""
    return summarized(score.values.values())


def leading(findings: Findings) -> set[int]:
    """Return the ids of the best cell of each method."""
    return {id(findings.best(method)) for method in dict.fromkeys(row.method for row in findings.rows)}


def gap(score: Score) -> Summary | None:
    """Summarize training accuracy minus the accuracy of the report, after the last epoch, in points."""
    pairs = ((number((run.result or {}).get("train_accuracy")), run.accuracy) for run in score.runs)
    return summarized(ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None)


def of_network(score: Score, column: str) -> dict[Hashable, float]:
    """Return a column of the noise meter by seed, after the last epoch: the mean of the layers that have it."""
    values: dict[Hashable, float] = {}
    for run in score.runs:
        for measured in run.noise[-1:]:
            found = [each for value in measured["layers"].get(column, ()) if (each := number(value)) is not None]
            if found:
                values[run.seed] = statistics.fmean(found)
    return values


def seconds_per_image(score: Score) -> list[float]:
    """Return the training time per image of the finished runs, without evaluations and checkpoints."""
    speeds = (number((run.result or {}).get("images_per_second")) for run in score.runs if run.status == "finished")
    return [1 / speed for speed in speeds if speed]


def costs(findings: Findings) -> list[tuple[Score, Cost]]:
    """Return the cost of each cell, relative to the median run of the baseline; empty if the baseline has no speed."""
    base = findings.best(findings.baseline)
    reference = seconds_per_image(base) if base else []
    if not reference:
        return []
    unit, found = statistics.median(reference), []
    busy = max(reference) > BUSY * min(reference)
    for score in (row.score for row in findings.rows):
        times = [time / unit for time in seconds_per_image(score)] if score else []
        if score and times:
            rough = busy or max(times) > BUSY * min(times)
            found.append((score, Cost(statistics.median(times), min(times), max(times), rough)))
    return found


def cost_notes(findings: Findings) -> list[str]:
    """List what limits the comparison of training times."""
    compared = costs(findings)
    runs = [run for score, _ in compared for run in score.runs if run.status == "finished"]
    notes = []
    for name, noun in (("device_name", "machines"), ("threads", "numbers of threads"), ("torch", "versions of torch")):
        if len(known := _distinct(runs, name)) > 1:
            notes.append(f"The runs come from different {noun} ({', '.join(known)}), so their times differ for that.")
    if stopped := sum(map(_resumed, runs)):
        notes.append(
            f"{stopped} of {len(runs)} runs were interrupted and resumed: their times are sums over the parts."
        )
    widest = max((cost.slowest / cost.fastest for _, cost in compared), default=1.0)
    if widest > BUSY:
        notes.append(
            f"Equal runs differ by a factor of up to {widest:.1f} in time, as on a busy machine: costs are rough. "
            "“ghostnoise bench” measures the cost of layers."
        )
    return notes


def _resumed(run: Run) -> bool:
    """Return whether a run trained for longer than the time between its last start and its end."""
    trained = number((run.result or {}).get("seconds"))
    try:
        started, ended = (
            datetime.fromisoformat(str(time))
            for time in (run.environment.get("started"), (run.result or {}).get("ended"))
        )
        passed = (ended - started).total_seconds()
    except (TypeError, ValueError):  # a time is missing, or only one of them has a time zone
        return False
    return trained is not None and trained > passed + ROUNDING


def _distinct(runs: Iterable[Run], name: str) -> list[str]:
    return sorted({str(run.environment[name]) for run in runs if run.environment.get(name) not in (None, "")})

"""Paired differences with their interval and test, and Holm's correction for several of them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHA = 0.05


@dataclass(frozen=True)
class Paired:
    """The mean difference over common seeds, and what can be said about it."""

    n: int
    mean: float
    std: float | None = None
    """Of the differences, with n - 1; None for a single one."""
    p: float | None = None
    """Of the two-sided paired t-test; None without a spread to compare the mean with."""

    def interval(self, alpha: float = ALPHA) -> tuple[float, float] | None:
        """Where the true difference lies with probability 1 - alpha, if differences are normal."""
        if self.std is None or self.p is None:
            return None
        from scipy.special import stdtrit

        half = float(stdtrit(self.n - 1, 1 - alpha / 2)) * self.std / math.sqrt(self.n)
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Corrected:
    """A p-value after Holm's correction, and the factor that made it."""

    p: float
    factor: float

    @property
    def alpha(self) -> float:
        """The level of an interval that excludes 0 exactly if the corrected p-value is below ALPHA."""
        return ALPHA / self.factor


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """The difference of two methods over the seeds that both have, or None if there are none."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences:
        return None
    n, mean = len(differences), statistics.fmean(differences)
    if n == 1:
        return Paired(n, mean)
    std = statistics.stdev(differences)
    if std <= 1e-12 * max(1.0, abs(mean)):  # equal but for rounding: a t-test would make certainty out of nothing
        return Paired(n, mean, 0.0)
    from scipy.special import stdtr

    return Paired(n, mean, std, 2 * float(stdtr(n - 1, -abs(mean) / (std / math.sqrt(n)))))


def holm(values: Sequence[float | None]) -> list[Corrected | None]:
    """P-values corrected for their number; None stays None, and counts for nothing."""
    order = sorted((p, at) for at, p in enumerate(values) if p is not None)
    made: list[Corrected | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, (len(order) - rank) * p)
        made[at] = Corrected(min(1.0, largest), largest / p if p else float(len(order) - rank))
    return made

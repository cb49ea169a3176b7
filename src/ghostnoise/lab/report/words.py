"""Numbers as people read them."""

from collections.abc import Sequence

from ghostnoise.lab.report.aggregate import Difference, Score

NOTHING = "–"


def mean_text(score: Score | None) -> str:
    """Mean ± standard deviation."""
    if score is None or score.mean is None:
        return NOTHING
    return f"{score.mean:.2f}" + (f" ± {score.std:.2f}" if score.std is not None else "")


def score_text(score: Score | None) -> str:
    """Mean ± standard deviation, and how many runs."""
    return f"{mean_text(score)} ({score.n})" if score and score.n else NOTHING


def interval_text(interval: Sequence[float]) -> str:
    """Both ends, with signs."""
    return f"[{interval[0]:+.2f}, {interval[1]:+.2f}]"


def difference_text(difference: Difference | None) -> str:
    """The mean difference and its 95 % interval."""
    if difference is None or difference.paired is None:
        return NOTHING
    interval = difference.paired.interval()
    return f"{difference.paired.mean:+.2f}" + (f" {interval_text(interval)}" if interval else "")


def p_text(p: float | None) -> str:
    """Two digits, or a bound."""
    if p is None:
        return NOTHING
    return f"{p:.2g}" if p >= 0.001 else "< 0.001"


def holm_text(difference: Difference | None) -> str:
    """The corrected p-value."""
    return p_text(difference.corrected.p if difference and difference.corrected else None)


def seconds_text(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def several(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

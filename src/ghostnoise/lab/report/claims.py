"""Whether the data supports what an experiment claims, in words."""

import itertools
from dataclasses import dataclass
from typing import Literal

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.aggregate import FEW, Difference, Findings, Score
from ghostnoise.lab.report.inference import ALPHA
from ghostnoise.lab.report.words import interval_text, mean_text, p_text, several

Verdict = Literal["supported", "points that way", "not supported", "cannot be told"]


@dataclass(frozen=True)
class Judged:
    """A claim, the verdict, and the numbers behind it."""

    claim: str
    verdict: Verdict
    why: str


def judge(findings: Findings) -> list[Judged]:
    """The verdict on every claim; corrects all of the report's comparisons for their number."""
    compared = [(claim, ours, theirs, _compare(findings, ours, theirs)) for claim, ours, theirs in _pairs(findings)]
    findings.correct()
    return [_judged(findings, *each) for each in compared]


def _pairs(findings: Findings) -> list[tuple[str, str, str]]:
    """The two methods of each claim; "A > B > C" is two claims."""
    pairs = []
    for claim in findings.gathered.experiment.report.claims:
        labels = [label.strip() for label in claim.split(">")]
        if len(labels) < 2 or not all(labels):
            raise UserError(f'report.claims: {claim!r} compares nothing; write it as "A > B", with labels of methods')
        pairs += [(f"{ours} > {theirs}", ours, theirs) for ours, theirs in itertools.pairwise(labels)]
    return pairs


def _compare(findings: Findings, ours: str, theirs: str) -> Difference | None:
    pair = findings.best(ours), findings.best(theirs)
    return findings.compare(pair[0], pair[1]) if pair[0] and pair[1] else None


def _judged(findings: Findings, claim: str, ours: str, theirs: str, difference: Difference | None) -> Judged:
    labels = [method.label for method in findings.gathered.experiment.grid.methods]
    if out := [label for label in (ours, theirs) if label not in labels]:
        return Judged(claim, "cannot be told", f"{' and '.join(out)} left out of this report.")
    if difference is None:
        without = [label for label in (ours, theirs) if findings.best(label) is None]
        return Judged(claim, "cannot be told", f"{' and '.join(without)} without a finished run that counts.")
    if difference.paired is None:
        return Judged(claim, "cannot be told", "No seed finished with both.")
    return Judged(claim, _verdict(difference), _why(findings, difference, ours, theirs))


def _verdict(difference: Difference) -> Verdict:
    assert difference.paired
    if difference.paired.mean <= 0:
        return "not supported"
    return "supported" if difference.corrected and difference.corrected.p < ALPHA else "points that way"


def _why(findings: Findings, difference: Difference, ours: str, theirs: str) -> str:
    found = difference.paired
    assert found
    words = [f"{_named(difference.ours)} against {_named(difference.theirs)}:"]
    words.append(f"{found.mean:+.2f} points over {several(found.n, 'common seed')}")
    if difference.corrected and (interval := difference.corrected_interval):
        words.append(f"(corrected 95 % interval {interval_text(interval)}, p = {p_text(difference.corrected.p)}).")
    elif found.n == 1:
        words.append("(one seed: no interval, and no test).")
    else:
        words.append("(the same for every seed: no spread to test it with).")
    if 1 < found.n < FEW:
        words.append(f"Only {found.n} seeds: read it with care.")
    if left := sum(_left(findings, label) for label in (ours, theirs)):
        words.append(f"So far: {several(left, 'run')} of the two to go.")
    if diverged := sum(score.counts["diverged"] for score in (difference.ours, difference.theirs)):
        words.append(f"{several(diverged, 'run')} diverged and cannot be averaged: the difference leaves them out.")
    return " ".join(words)


def _named(score: Score) -> str:
    return f"{score.cell.name} ({mean_text(score)}, n = {score.n})"


def _left(findings: Findings, method: str) -> int:
    runs = findings.gathered.runs
    return sum(run.point.cell.method == method and run.status not in ("finished", "diverged") for run in runs)

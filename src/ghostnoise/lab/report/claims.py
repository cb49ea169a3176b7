"""Claims: the declared tests of an experiment, and the verdicts that its runs give.

    A > B, A < B                        the accuracy of A is higher, or lower, than that of B
    A ~ B                               it is similar
    A gains twice B over C              A's gain over C is about twice that of B
    A over B > C over D                 the gain of A over B is higher than that of C over D
    gap A < B                           outputs in training differ less from those at inference, with each own method
    systematic gap A < B                the same for the means of the outputs over random ghost batches
    systematic gap of gni < gbn on A    two methods, measured on the same networks, those of A
    random noise of xbn ~ gbn on A      the standard deviation around that mean is similar
    ks_shift_conv < 0.05 on A           a column of the noise meter, mean over the layers after the last epoch

A, B and C are labels of methods, or cells such as "GNI ghost_size=16". If a method has several cells, its best one is
chosen by the first half of the seeds and tested on the other half; the same holds if `[select]` has tuned it.

The claims of an experiment that were stated before its runs are one family, and those that were stated later are
another one. The p-values of a family are Holm-corrected, and nothing else is counted.
"""

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.measures import of_network
from ghostnoise.lab.report.statistics import (
    ALPHA,
    Corrected,
    Difference,
    Findings,
    Paired,
    Ratio,
    Score,
    fieller,
    holm,
    paired,
)
from ghostnoise.lab.report.tables import DISTANCE

POINTS, OUTPUT, RELATIVE = "points", "% of the output", "% of the other"
MARGINS = {POINTS: 0.3, OUTPUT: 0.1, RELATIVE: 10.0, DISTANCE: 0.0}
"""The smallest effect of interest, by unit: smaller differences count as equal. Distances are compared with a limit."""
TWICE, LEAST_TWICE, MOST_TWICE = 2.0, 1.5, 2.5
"""What "about twice" means; the paper's own table 1 has a ratio of 1.58."""

Verdict = Literal["supported", "refuted", "equivalent", "inconclusive"]

KINDS = {"gap": "relative", "systematic gap": "systematic", "random noise": "random"}
"""Measures of the noise meter by their names in claims, and in its columns after the name of a method."""
KIND = "|".join(KINDS)
FORMS = {
    "limit": re.compile(r"(?P<column>\w[\w-]*) (?P<sign>[<>]) (?P<limit>\d[\d.]*) on (?P<on>.+)"),
    "on": re.compile(rf"(?P<kind>{KIND}) of (?P<ours>\w+) (?P<sign>[<>~]) (?P<theirs>\w+) on (?P<on>.+)"),
    "noise": re.compile(rf"(?P<kind>{KIND}) (?P<ours>.+?) (?P<sign>[<>~]) (?P<theirs>.+)"),
    "twice": re.compile(r"(?P<ours>.+?) gains twice (?P<theirs>.+?) over (?P<base>.+)"),
    "gains": re.compile(r"(?P<ours>.+?) over (?P<base>.+?) (?P<sign>[<>~]) (?P<theirs>.+?) over (?P<other>.+)"),
    "accuracy": re.compile(r"(?P<ours>.+?) (?P<sign>[<>~]) (?P<theirs>.+)"),
}
SIGNS = {">": 1, "<": -1, "~": 0}


@dataclass
class Claim:
    """A declared test, what was compared, and its verdict."""

    text: str
    methods: tuple[str, ...]
    """The labels of the methods that it needs."""
    sign: int
    """The sign of the difference that supports it; 0 if it says that there is none."""
    unit: str = POINTS
    difference: Difference | None = None
    """The compared accuracies; None if a method has no finished run, or if the claim is not about accuracies."""
    paired: Paired | None = None
    """The paired test of the claim."""
    gains: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """The gains of A and B over C by seed, for "gains twice"."""
    chosen: str = ""
    """How cells were chosen; empty if there was no choice."""
    corrected: Corrected | None = None
    late: bool = False
    """Whether it was stated after some of the runs."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the difference at the level of the Holm correction."""
        return self.paired.interval(self.corrected.alpha) if self.paired and self.corrected else None

    @property
    def margin(self) -> float:
        """The smallest effect of interest."""
        return MARGINS[self.unit]

    @cached_property
    def ratio(self) -> Ratio | None:
        """The ratio of the gains with its confidence set at the level of the Holm correction."""
        return fieller(*self.gains, self.corrected.alpha) if self.gains and self.corrected else None

    @property
    def equivalent(self) -> bool:
        """Whether the interval lies within the margin, with the level divided by the number of tests of the family."""
        if self.paired is None or self.corrected is None:
            return False
        interval = self.paired.interval(ALPHA / self.corrected.tests)
        return interval is not None and -self.margin < interval[0] and interval[1] < self.margin

    @property
    def verdict(self) -> Verdict:
        """What the runs say of the claim; inconclusive if there is no test."""
        if self.paired is None or self.corrected is None:
            return "inconclusive"
        if self.gains is not None:
            return self._twice(*self.gains)
        if self.equivalent:
            return "equivalent" if self.sign else "supported"
        if self.corrected.p >= ALPHA:
            return "inconclusive"
        return "supported" if self.paired.mean * self.sign > 0 else "refuted"

    @property
    def side(self) -> str:
        """Whether a gain is less or more than about twice another one, if that refutes the claim; else empty."""
        if self.gains is None or self.verdict != "refuted":
            return ""
        return "more" if self._against(*self.gains, MOST_TWICE) > 0 else "less"

    def _twice(self, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
        """Supported if the gain is significantly above the least and below the most that count as twice."""
        least, most = (self._against(ours, theirs, factor) for factor in (LEAST_TWICE, MOST_TWICE))
        if least > 0 > most:
            return "supported"
        return "refuted" if least < 0 or most > 0 else "inconclusive"

    def _against(self, ours: Sequence[float], theirs: Sequence[float], factor: float) -> int:
        """Return the sign of `ours - factor * theirs` if it is significant at the level of the correction, else 0."""
        found = paired(dict(enumerate(ours)), {at: factor * value for at, value in enumerate(theirs)})
        interval = found.interval(self.corrected.alpha) if found and self.corrected else None
        return 0 if interval is None else (interval[0] > 0) - (interval[1] < 0)


def judge(findings: Findings, further: Mapping[str, bool] | None = None) -> Findings:
    """Fill in the claims of the recipe and `further` ones, with whether they were stated after some of the runs."""
    further = further or {}
    texts = dict.fromkeys([*_pairs(findings.collected.experiment.report.claims), *further])
    findings.claims = [_judged(findings, text) for text in texts]
    known = {name for row in findings.rows for name in (row.method, row.name)}
    for claim in findings.claims:
        claim.late = further.get(claim.text, False)
        if claim.text in further and (unknown := [name for name in claim.methods if name not in known]):
            raise UserError(f"{claim.text!r}: {unknown[0]} is no method or cell; there are {', '.join(sorted(known))}")
    correct(findings.claims)
    return findings


def of_values(text: str, values: Mapping[str, Mapping[Hashable, float]]) -> Claim:
    """Return the claim "A > B", "A < B" or "A ~ B" about accuracies by seed, without its correction."""
    match = FORMS["accuracy"].fullmatch(text)
    if match is None:
        raise UserError(f"{text!r}: must be 'A > B', 'A < B' or 'A ~ B'")
    names = match["ours"], match["theirs"]
    if unknown := [name for name in names if name not in values]:
        raise UserError(f"{text!r}: {unknown[0]} is unknown; there are {', '.join(values)}")
    return Claim(text, names, SIGNS[match["sign"]], paired=paired(*(values[name] for name in names)))


def correct(claims: Iterable[Claim]) -> None:
    """Correct the p-values of the two families: of claims that were stated before the runs, and of later ones."""
    claims = list(claims)
    for late in (False, True):
        family = [claim for claim in claims if claim.late == late]
        corrected = holm([claim.paired.p if claim.paired else None for claim in family])
        for claim, each in zip(family, corrected, strict=True):
            claim.corrected = each
            if claim.difference is not None and claim.paired is claim.difference.paired:
                claim.difference.corrected = each


def _pairs(claims: Iterable[str]) -> list[str]:
    """Split the claims of a recipe: "A > B > C" is two of them."""
    found = []
    for claim in claims:
        labels = [label.strip() for label in claim.split(">")]
        if len(labels) < 2 or not all(labels):
            raise UserError(f'report.claims: {claim!r} compares nothing; write it as "A > B", with labels of methods')
        found += [f"{ours} > {theirs}" for ours, theirs in itertools.pairwise(labels)]
    return found


def _judged(findings: Findings, text: str) -> Claim:
    form, match = next(((name, found) for name, each in FORMS.items() if (found := each.fullmatch(text))), ("", None))
    if match is None:
        raise UserError(
            f"{text!r}: must be 'A > B', 'A < B', 'A ~ B', 'A gains twice B over C', 'A over B > C over D', "
            f"'{KIND.replace('|', ' or ')} A < B', the same with 'of METHOD < METHOD on A', or 'COLUMN < NUMBER on A'"
        )
    words = match.groupdict()
    sign = SIGNS[words["sign"]] if "sign" in words else 0
    if form == "accuracy":
        return _of_accuracy(findings, text, words["ours"], words["theirs"], sign)
    if form == "twice":
        return _of_twice(findings, text, words["ours"], words["theirs"], words["base"])
    if form == "gains":
        return _of_gains(findings, text, sign, *(words[side] for side in ("ours", "base", "theirs", "other")))
    if form == "limit":
        name, score = _fixed(findings, words["on"])
        values = of_network(score, words["column"]) if score else {}
        return Claim(text, (name,), sign, DISTANCE, paired=paired(values, dict.fromkeys(values, float(words["limit"]))))
    measure = KINDS[words["kind"]]
    if form == "on":
        sides = [_fixed(findings, words["on"])] * 2
        columns = [f"{words[side]}_{measure}" for side in ("ours", "theirs")]
    else:
        sides = [_fixed(findings, words[side]) for side in ("ours", "theirs")]
        columns = [own(score, measure) if score else "" for _, score in sides]
    ours, theirs = (
        of_network(score, column) if score else {} for (_, score), column in zip(sides, columns, strict=True)
    )
    names = tuple(dict.fromkeys(name for name, _ in sides))
    if words["kind"] == "random noise":
        relative = {key: 100 * (ours[key] / theirs[key] - 1) for key in ours if theirs.get(key)}
        return Claim(text, names, sign, RELATIVE, paired=paired(relative, dict.fromkeys(relative, 0.0)))
    percent = [{key: 100 * value for key, value in each.items()} for each in (ours, theirs)]
    return Claim(text, names, sign, OUTPUT, paired=paired(*percent))


def own(score: Score, measure: str) -> str:
    """Return the column of the noise meter for the method of a network."""
    return f"{score.settings.norm.method}_{measure}"


def _of_accuracy(findings: Findings, text: str, ours: str, theirs: str, sign: int) -> Claim:
    sides = [_Side(findings, each) for each in (ours, theirs)]
    methods = tuple(side.method for side in sides)
    first, other = halves(findings) if any(side.open for side in sides) else (None, None)
    scores = [side.chosen(first) for side in sides]
    if scores[0] is None or scores[1] is None:
        return Claim(text, methods, sign)
    difference = findings.compare(scores[0], scores[1])
    if other is not None:
        difference = Difference(*difference.scores, paired(*(_over(score, other) for score in difference.scores)))
    return Claim(text, methods, sign, difference=difference, paired=difference.paired, chosen=_choice(first, other))


def _of_twice(findings: Findings, text: str, *names: str) -> Claim:
    claim, values = _compared(findings, text, 0, *names)
    if values:
        gains = [tuple(value - base for value, base in zip(side, values[2], strict=True)) for side in values[:2]]
        claim.paired = paired(dict(enumerate(gains[0])), {at: TWICE * value for at, value in enumerate(gains[1])})
        if claim.paired is not None and claim.paired.p is not None:
            claim.gains = gains[0], gains[1]
    return claim


def _of_gains(findings: Findings, text: str, sign: int, *names: str) -> Claim:
    claim, values = _compared(findings, text, sign, *names)
    if values:
        ours, theirs = (
            {at: value - base for at, (value, base) in enumerate(zip(*side, strict=True))}
            for side in (values[:2], values[2:])
        )
        claim.paired = paired(ours, theirs)
    return claim


def _compared(findings: Findings, text: str, sign: int, *names: str) -> tuple[Claim, list[list[float]]]:
    """Return a claim about several cells, and their accuracies on common seeds; empty if one has no runs."""
    sides = [_Side(findings, each) for each in names]
    first, other = halves(findings) if any(side.open for side in sides) else (None, None)
    scores = [score for side in sides if (score := side.chosen(first)) is not None]
    claim = Claim(text, tuple(side.method for side in sides), sign, chosen=_choice(first, other))
    if len(scores) < len(sides):
        return claim, []
    values = [_over(score, other) for score in scores]
    keys = [key for key in values[0] if all(key in each for each in values)]
    return claim, [[each[key] for key in keys] for each in values]


def _over(score: Score, seeds: frozenset[int] | None) -> dict[Hashable, float]:
    """Return the accuracies of these seeds, or of all, by what is paired."""
    return {key: value for key, value in score.comparable.items() if seeds is None or key[0] in seeds}


def halves(findings: Findings) -> tuple[frozenset[int], frozenset[int]]:
    """Return the first half of the seeds, which chooses cells, and the other half, which tests them."""
    seeds = sorted({run.seed for run in findings.collected.runs})
    return frozenset(seeds[: len(seeds) // 2]), frozenset(seeds[len(seeds) // 2 :])


def _choice(first: frozenset[int] | None, other: frozenset[int] | None) -> str:
    if first is None or other is None:
        return ""
    return f"cells chosen by seeds {_range(first)}, tested on seeds {_range(other)}"


def _range(seeds: frozenset[int]) -> str:
    ordered = sorted(seeds)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered)) or "none"


class _Side:
    """A side of a comparison: a cell, or a method whose best cell is chosen."""

    def __init__(self, findings: Findings, name: str) -> None:
        self.findings = findings
        self.scores = [row.score for row in findings.rows if row.score and name in (row.method, row.name)]
        self.method = next((row.method for row in findings.rows if name in (row.method, row.name)), name)
        tuned = {findings.collected.experiment.group(score.runs[0]) for score in findings.tuning}
        self.tuned = [score for score in self.scores if findings.collected.experiment.group(score.runs[0]) in tuned]

    @property
    def open(self) -> bool:
        """Whether there is a choice, or was one."""
        return len(self.scores) > 1 or bool(self.tuned)

    def chosen(self, seeds: frozenset[int] | None) -> Score | None:
        """Return the cell: the only one, or the one with the best mean over these seeds, where none diverged."""
        experiment = self.findings.collected.experiment
        tuned = [id(score) for score in self.tuned]
        found: list[tuple[float, Score]] = []
        for score in self.scores:
            if id(score) in tuned:
                group = experiment.group(score.runs[0])
                rivals = [each for each in self.findings.tuning if experiment.group(each.runs[0]) == group]
                best = max(rivals, key=lambda each: _mean_over(each, seeds))
                if best.cell != score.cell:
                    continue  # these seeds would have selected a cell that was not tested
                found.append((_mean_over(best, seeds), score))
            elif score.n:
                found.append((_mean_over(score, seeds) if len(self.scores) > 1 else 0.0, score))
        found = [each for each in found if each[0] > float("-inf")]
        return max(found, key=lambda each: each[0])[1] if found else None


def _mean_over(score: Score, seeds: frozenset[int] | None) -> float:
    """Return the mean accuracy over seeds; -inf if a run of them diverged, or none finished."""
    runs = [run for run in score.runs if seeds is None or run.seed in seeds]
    values = [run.accuracy for run in runs if run.accuracy is not None]
    if not values or any(run.status == "diverged" for run in runs):
        return float("-inf")
    return sum(values) / len(values)


def _fixed(findings: Findings, name: str) -> tuple[str, Score | None]:
    """Return the label of a method, and its only cell."""
    side = _Side(findings, name)
    if len(side.scores) > 1:
        raise UserError(f"{name}: has several cells, and a measure of the noise meter needs one; name the cell")
    return side.method, side.scores[0] if side.scores else None

"""The paper's claims, each with the comparisons that test it: a table that is generated from records.

A file of claims has an entry for each of them:

    [[claim]]
    text = "ghost noise injection gains about twice what ghost batch norm gains"
    paper = "figure 3"
    tests = ["GNI-16 > GBN-16 in mnist1d-table1", "ratio GNI-16 : GBN-16 over BN in mnist1d-table1"]

    [[claim]]
    text = "the gain is larger without augmentation"
    paper = "table 3"
    verdict = "needs a GPU"

EXPERIMENT is a recipe, which may be followed by options of `ghostnoise report`, such as `--variant released`.
"A > B in EXPERIMENT" is a claim of the recipe. "CELL below the baseline in EXPERIMENT" and "CELL above the baseline in
EXPERIMENT" are rows of its table.
"ratio A : B over C in EXPERIMENT" is the gain of A over C divided by that of B; it supports the claim if its interval
contains 2 and excludes 1. "gap A < B in EXPERIMENT" compares how far outputs in training differ from those at
inference, and "systematic gap A < B in EXPERIMENT" how far their mean over random ghost batches does; B is the
baseline. A verdict is preliminary while runs of its methods are missing.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import fragments, tables
from ghostnoise.lab.report.notes import without_result
from ghostnoise.lab.report.statistics import ALPHA, Corrected, Difference, Findings
from ghostnoise.lab.report.tables import NOTHING

Verdict = Literal["supported", "not supported", "inconclusive", "needs a GPU"]
NOT_RUN = "not run yet"

COMPARISON = re.compile(r"(?P<claim>.+? > .+?) in (?P<experiment>.+)")
RATIO = re.compile(r"ratio (?P<ours>.+?) : (?P<theirs>.+?) over (?P<base>.+?) in (?P<experiment>.+)")
CELL = re.compile(r"(?P<cell>.+?) (?P<side>below|above) the baseline in (?P<experiment>.+)")
GAP = re.compile(rf"(?P<kind>{'|'.join(fragments.GAPS)}) (?P<ours>.+?) < (?P<theirs>.+?) in (?P<experiment>.+)")
HEADINGS = ["the paper", "where", "our test", "n", "difference, points [95 % interval]", "p (Holm)", "verdict"]
RESAMPLES = 10_000


class Statement(BaseModel):
    """A claim of the paper."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: Annotated[str, Field(min_length=1)]
    paper: str
    tests: list[str] = []
    verdict: Verdict | None = None
    """Only for claims without tests."""
    note: str = ""
    """Replaces the name of the test for claims without tests."""

    @model_validator(mode="after")
    def _decided(self) -> Self:
        if bool(self.tests) == bool(self.verdict):
            raise ValueError("must have either tests or a verdict")
        return self


class Outcome(NamedTuple):
    """What a comparison found, as text."""

    test: str
    n: str = "0"
    effect: str = NOTHING
    p: str = NOTHING
    verdict: str = "inconclusive"


def statements(path: Path) -> list[Statement]:
    """Read a file of claims."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return [Statement.model_validate(each) for each in tree["claim"]]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{path}: cannot be read as a file of claims ({error}); correct it") from None


def table(path: Path, load: Callable[[str], Findings | None]) -> str:
    """Return the table in Markdown. `load` returns the findings of an experiment, None if it has no records yet."""
    rows = []
    for each in statements(path):
        if each.verdict is not None:
            rows.append([each.text, each.paper, each.note or NOTHING, NOTHING, NOTHING, NOTHING, each.verdict])
        for at, test in enumerate(each.tests):
            found = outcome(test, load)
            rows.append([*(("", "") if at else (each.text, each.paper)), *found])
    return _markdown(HEADINGS, rows)


def summary(path: Path, load: Callable[[str], Findings | None]) -> str:
    """Return a short table in Markdown: a line for each claim, with the number of tests that have each verdict."""
    rows = []
    for each in statements(path):
        verdicts: list[str] = [each.verdict] if each.verdict else [outcome(test, load).verdict for test in each.tests]
        counts = {verdict: verdicts.count(verdict) for verdict in verdicts}
        words = [verdict if len(verdicts) == 1 else f"{count} {verdict}" for verdict, count in counts.items()]
        rows.append([each.text, each.paper, ", ".join(words)])
    return _markdown(["the paper's claim", "where", "our tests of it"], rows)


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]  # not escaped: claims and notes are Markdown
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def outcome(test: str, load: Callable[[str], Findings | None]) -> Outcome:
    """Return what the records give for a test."""
    kinds = ((RATIO, _ratio), (GAP, _gap), (CELL, _cell), (COMPARISON, _comparison))
    match, compare = next(((match, each) for kind, each in kinds if (match := kind.fullmatch(test))), (None, None))
    if match is None or compare is None:
        raise UserError(
            f"{test!r}: must be 'A > B in EXPERIMENT', 'CELL below the baseline in …' (or above), "
            "'ratio A : B over C in …', 'gap A < B in …' or 'systematic gap A < B in …'"
        )
    words = match.groupdict()
    findings = load(words["experiment"])
    title = test.removesuffix(f" in {words['experiment']}")
    if findings is None:
        return Outcome(f"`{words['experiment']}`: {title}", verdict=NOT_RUN)
    name = findings.collected.experiment.recipe.name
    return compare(f"[{name}](../results/{name}/README.md): {title}", words, findings)


def _comparison(name: str, words: Mapping[str, str], findings: Findings) -> Outcome:
    known = [each.text for each in findings.claims]
    if words["claim"] not in known:
        raise UserError(f"{words['claim']!r}: must be a claim of the recipe, one of {', '.join(known)}")
    claim = findings.claims[known.index(words["claim"])]
    if claim.difference is None:
        return Outcome(name, verdict=NOT_RUN)
    return _so_far(_difference(name, claim.difference, 1), findings, claim.ours, claim.theirs)


def _cell(name: str, words: Mapping[str, str], findings: Findings) -> Outcome:
    known = {row.name: row for row in findings.rows}
    if words["cell"] not in known:
        raise UserError(f"{words['cell']!r}: must be a cell of the experiment, one of {', '.join(known)}")
    row, expected = known[words["cell"]], 1 if words["side"] == "above" else -1
    return _so_far(_difference(name, row.difference, expected), findings, row.method, findings.baseline)


def _difference(name: str, difference: Difference | None, expected: int) -> Outcome:
    """Return the outcome of a difference whose sign should be `expected`."""
    if difference is None or difference.paired is None:
        return Outcome(name)
    verdict = _verdict(expected * difference.paired.mean, difference.corrected)
    effect = tables.difference_text(difference)
    return Outcome(name, str(difference.paired.n), effect, tables.holm_text(difference), verdict)


def _gap(name: str, words: Mapping[str, str], findings: Findings) -> Outcome:
    known = {gap.name: gap for gap in fragments.gaps(findings)[words["kind"]]}
    if words["ours"] not in known or words["theirs"] != findings.baseline:
        raise UserError(
            f"{words['kind']} {words['ours']} < {words['theirs']}: must be a method among {', '.join(known)} and the "
            f"baseline, {findings.baseline}"
        )
    gap = known[words["ours"]]
    if gap.paired is None:
        return Outcome(name, verdict=NOT_RUN)
    p = tables.p_text(gap.corrected.p if gap.corrected else None)
    verdict = _verdict(-gap.paired.mean, gap.corrected)
    method = next(row.method for row in findings.rows if row.name == gap.name)
    found = Outcome(name, str(gap.paired.n), f"{fragments.gap_text(gap)} of the {words['kind']}", p, verdict)
    return _so_far(found, findings, method, findings.baseline)


def _ratio(name: str, words: Mapping[str, str], findings: Findings) -> Outcome:
    methods = [words[part] for part in ("ours", "theirs", "base")]
    values = [score.comparable for score in map(findings.best, methods) if score is not None]
    if len(values) < 3:
        return Outcome(name, verdict=NOT_RUN)
    seeds = sorted(set(values[0]) & set(values[1]) & set(values[2]), key=repr)
    if len(seeds) < 3:
        return Outcome(name, str(len(seeds)))
    ours, theirs, base = (np.array([each[seed] for seed in seeds]) for each in values)
    ratio = (ours - base).mean() / (theirs - base).mean()
    low, high = _bootstrap(ours - base, theirs - base)
    verdict: Verdict = "inconclusive"
    if low > 1:
        verdict = "supported" if low <= 2 <= high else "not supported"
    elif high < 2:
        verdict = "not supported"
    found = Outcome(name, str(len(seeds)), f"ratio {ratio:.1f} [{low:.1f}, {high:.1f}]", NOTHING, verdict)
    return _so_far(found, findings, *methods)


def _so_far(found: Outcome, findings: Findings, *methods: str) -> Outcome:
    """Mark a verdict as preliminary while runs of its methods are missing."""
    return found._replace(verdict=f"{found.verdict} (preliminary)") if without_result(findings, methods) else found


def _bootstrap(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the ratio of two means, over resampled seeds."""
    first, second = np.asarray(first), np.asarray(second)
    drawn = np.random.Generator(np.random.PCG64(0)).integers(len(first), size=(RESAMPLES, len(first)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = first[drawn].mean(1) / second[drawn].mean(1)
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _verdict(mean: float, corrected: Corrected | None) -> Verdict:
    if corrected is None or corrected.p >= ALPHA:
        return "inconclusive"
    return "supported" if mean > 0 else "not supported"

"""The paper's claims, each with the tests of it: a table that is generated from records.

A file of claims has an entry for each statement of the paper:

    [[claim]]
    text = "Ghost noise injection beats ghost batch norm"
    paper = "figure 3, table 1"
    stated = "before the runs"
    tests = [
        "GNI-16 > GBN-16 in mnist1d-table1",
        { test = "GNI ~ XBN in mnist1d-fig3", stated = "post hoc" },
    ]

    [[claim]]
    text = "ResNet-50 on ImageNet gains"
    paper = "table 2"
    verdict = "untested"
    note = "`ghostnoise sweep table2-i1k`"

`stated` says when a test was stated: before the runs, after some of them, or after all of them (post hoc). EXPERIMENT
is a recipe, which may be followed by options of `ghostnoise report`, such as `--variant released`. The forms of tests
are those of `claims`. The tests of an experiment that were stated before its runs, and the claims of its recipe, are
one family; those whose `stated` does not start with "before" are another one.

"COLUMN < NUMBER in FILE.csv" compares each row of a file of the noise meter with a limit, and "COLUMN of LAYER < NUMBER
in FILE.json" each record of a benchmark, or the interval of its ratio; supported if all are below, refuted if all are
above. Such tests have no p-value. "A > B in FILE.csv" compares the rows of two methods by seed; the columns are
`method`, `seed` and `accuracy`, and the tests of a file are a family.

A verdict is preliminary while runs of its methods are missing.
"""

import csv
import json
import re
import tomllib
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import fragments, tables
from ghostnoise.lab.report.claims import Claim, correct, of_values
from ghostnoise.lab.report.notes import without_result
from ghostnoise.lab.report.statistics import Findings
from ghostnoise.lab.report.tables import NOTHING

UNTESTED = "untested"
NO_RUNS = "untested: no runs yet"
BEFORE = "before"
HEADINGS = [
    "the paper", "where", "our test", "stated", "n", "difference, points [corrected 95 % interval]", "p (Holm)",
    "verdict",
]  # fmt: skip
IN = re.compile(r"(?P<test>.+?) in (?P<where>.+)")
LIMIT = re.compile(r"(?P<column>[\w-]+)(?: of (?P<layer>.+?))? (?P<sign>[<>]) (?P<limit>\d[\d.]*)")
FILES = (".csv", ".json")

Load = Callable[[str], Findings | None]


class Part(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Test(Part):
    """A test, and when it was stated if that is not when its claim was."""

    __test__ = False  # not for pytest

    test: Annotated[str, Field(min_length=1)]
    stated: str | None = None


def _as_test(given: object) -> object:
    return {"test": given} if isinstance(given, str) else given


class Statement(Part):
    """A claim of the paper."""

    text: Annotated[str, Field(min_length=1)]
    paper: str
    tests: list[Annotated[Test, BeforeValidator(_as_test)]] = []
    stated: str = ""
    verdict: Literal["untested"] | None = None
    """Only for claims without tests."""
    note: str = ""
    """Replaces the name of the test for claims without tests."""

    @model_validator(mode="after")
    def _decided(self) -> Self:
        if bool(self.tests) == bool(self.verdict):
            raise ValueError("must have either tests or a verdict")
        if any(not (test.stated or self.stated) for test in self.tests):
            raise ValueError("stated: missing; say when the tests were stated")
        return self


class Outcome(NamedTuple):
    """What a test found, as text."""

    name: str
    n: str = "0"
    effect: str = NOTHING
    p: str = NOTHING
    verdict: str = NO_RUNS


def statements(path: Path) -> list[Statement]:
    """Read a file of claims."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return [Statement.model_validate(each) for each in tree["claim"]]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{path}: cannot be read as a file of claims ({error}); correct it") from None


def tests_of(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the tests of a file of claims that concern experiments, with the experiment, and whether it is late."""
    for statement in statements(path):
        for each in statement.tests:
            test, where = _split(each.test)
            if not where.endswith(FILES):
                yield test, where, not (each.stated or statement.stated).startswith(BEFORE)


def table(path: Path, load: Load) -> str:
    """Return the table in Markdown. `load` returns the findings of an experiment, None if it has no records yet."""
    rows, judge = [], _Judge(path, load)
    for each in judge.statements:
        if each.verdict is not None:
            rows.append([each.text, each.paper, each.note or NOTHING, *[NOTHING] * 4, each.verdict])
        for at, test in enumerate(each.tests):
            name, *found = judge.outcome(test.test)
            rows.append([*(("", "") if at else (each.text, each.paper)), name, test.stated or each.stated, *found])
    return _markdown(HEADINGS, rows)


def summary(path: Path, load: Load) -> str:
    """Return a short table in Markdown: a line for each claim, with the number of tests that have each verdict."""
    rows, judge = [], _Judge(path, load)
    for each in judge.statements:
        verdicts = (judge.outcome(test.test).verdict for test in each.tests)
        found = [verdict.partition(":")[0] for verdict in verdicts] or [UNTESTED]
        counts = {verdict: found.count(verdict) for verdict in found}
        words = [verdict if len(found) == 1 else f"{count} {verdict}" for verdict, count in counts.items()]
        rows.append([each.text, each.paper, ", ".join(words)])
    return _markdown(["the paper's claim", "where", "our tests of it"], rows)


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]  # not escaped: claims and notes are Markdown
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


class _Judge:
    """Finds what the records and files give for the tests of a file of claims."""

    def __init__(self, path: Path, load: Load) -> None:
        self.statements, self.load, self.root = statements(path), load, path.parents[1]

    def outcome(self, text: str) -> Outcome:
        """Return what was found for a test."""
        test, where = _split(text)
        if where.endswith(FILES):
            if where.endswith(".csv") and not LIMIT.fullmatch(test):
                claim = next(each for each in self._of_values(where) if each.text == test)
                return _outcome(f"[{Path(where).name}](../{where}): {_shown(test)}", claim)
            return _of_file(test, where, self.root)
        findings = self.load(where)
        if findings is None:
            return Outcome(f"`{where}`: {_shown(test)}")
        recipe = findings.collected.experiment.recipe.name
        claim = next(each for each in findings.claims if each.text == test)
        preliminary = " (preliminary)" if without_result(findings, claim.methods) else ""
        return _outcome(f"[{recipe}](../results/{recipe}/README.md): {_shown(test)}", claim, preliminary)

    def _of_values(self, where: str) -> list[Claim]:
        """Return the claims about the accuracies in a file."""
        values: dict[str, dict[Hashable, float]] = {}
        try:
            for row in csv.DictReader((self.root / where).read_text(encoding="utf-8").splitlines()):
                values.setdefault(row["method"], {})[int(row["seed"])] = float(row["accuracy"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{where}: cannot be tested ({type(error).__name__}: {error}); correct it") from None
        made = []
        for statement in self.statements:
            for each in statement.tests:
                test, file = _split(each.test)
                if file == where and not LIMIT.fullmatch(test):
                    made.append(of_values(test, values))
                    made[-1].late = not (each.stated or statement.stated).startswith(BEFORE)
        correct(made)
        return made


def _outcome(name: str, claim: Claim, preliminary: str = "") -> Outcome:
    if claim.paired is None:
        return Outcome(name)
    unit = "" if claim.unit == "points" or claim.gains else f" {claim.unit}"
    p = tables.p_text(claim.corrected.p if claim.corrected else None)
    verdict = f"{claim.verdict}: {claim.side}" if claim.side else claim.verdict
    return Outcome(name, str(claim.paired.n), f"{fragments.effect_text(claim)}{unit}", p, verdict + preliminary)


def _shown(test: str) -> str:
    """Return a test as Markdown; two tildes would strike out what is between them."""
    return test.replace("~", "≈").replace("_", r"\_")


def _split(text: str) -> tuple[str, str]:
    match = IN.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r}: must be a test and where, such as 'GNI > GBN in mnist1d-fig3'")
    return match["test"], match["where"]


def _of_file(test: str, where: str, root: Path) -> Outcome:
    """Compare what is in a file with a limit."""
    match, path = LIMIT.fullmatch(test), root / where
    if match is None:
        raise UserError(f"{test!r}: must be 'COLUMN < NUMBER' or 'COLUMN of LAYER < NUMBER', for {where}")
    try:
        ranges = (_of_csv if where.endswith(".csv") else _of_bench)(path, match["column"], match["layer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: {test!r} cannot be tested ({type(error).__name__}: {error}); correct one") from None
    if not ranges:
        raise UserError(f"{where}: nothing fits {test!r}; correct one of them")
    limit = float(match["limit"])
    below, above = all(high < limit for _, high in ranges), all(low > limit for low, _ in ranges)
    decided = "supported" if below == (match["sign"] == "<") else "refuted"
    verdict = decided if below or above else "inconclusive"
    values = [value for each in ranges for value in each]
    name = f"[{Path(where).name}](../{where}): {_shown(test)}"
    return Outcome(name, str(len(ranges)), f"{min(values):.3g} to {max(values):.3g}", NOTHING, verdict)


def _of_csv(path: Path, column: str, layer: str | None) -> list[tuple[float, float]]:
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return [(float(row[column]),) * 2 for row in rows if layer in (None, row["layer"])]


def _of_bench(path: Path, column: str, layer: str | None) -> list[tuple[float, float]]:
    """Return the values of a layer, or the intervals of its ratio if they were measured."""
    records: list[Mapping[str, Any]] = json.loads(path.read_bytes())["records"]
    ends = ("ratio_low", "ratio_high") if column == "ratio_paired" else (column, column)
    return [(float(each[ends[0]]), float(each[ends[1]])) for each in records if each["contender"] == layer]

"""Results in a repository: tables, figures and numbers in Markdown files, generated from `results/*/records.jsonl`."""

import csv
import io
import math
import os
import re
import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import blocks, evidence, figures, fragments, paper, tables, uncertainty
from ghostnoise.lab.report.claims import judge
from ghostnoise.lab.report.collect import collect
from ghostnoise.lab.report.statistics import Findings, aggregate
from ghostnoise.lab.store import atomic, records

RESULTS, RECORDS, PAGE, CLAIMS = "results", "records.jsonl", "README.md", "claims.toml"
PAGES = ("README.md", "docs", RESULTS)
TEMPLATE = """\
# {title}

{claim}

```
ghostnoise sweep {name}
ghostnoise report {name} --records {records}
```

<!-- generated: report {name} -->
<!-- end generated -->
"""
MATPLOTLIB = re.compile(rb"Matplotlib v[\d.]+")

Renderer = Callable[[list[str]], str]


@dataclass(frozen=True)
class Change:
    """A file whose contents differ from what the records give."""

    path: Path
    content: bytes


class Publisher:
    """Renders the generated blocks of the Markdown files in a folder.

    Args:
        root: The folder that contains `results/`.
        load: Returns the experiment for the arguments that `ghostnoise report` has: a recipe and options.
        others: Further kinds of blocks, by name.
    """

    def __init__(
        self, root: Path, load: Callable[[list[str]], Experiment], others: Mapping[str, Renderer] | None = None
    ) -> None:
        self.root, self.load, self.others = root, load, dict(others or {})
        about = {
            "about": fragments.about, "claims": fragments.claims, "gap": fragments.gap_table,
        }  # fmt: skip
        self.kinds: dict[str, Renderer] = {
            "report": self._report, "table": self._table,
            **{kind: partial(self._about, render) for kind, render in about.items()},
            "figure": self._figure, "paper": self._paper, "paper-table": self._paper_table,
            "value": self._value, "result": self._result, "noise": self._noise,
            "evidence": self._evidence, "uncertainty": self._uncertainty, "costs": self._costs, **self.others,
        }  # fmt: skip
        self._findings: dict[tuple[str, ...], Findings] = {}
        self._records: dict[Path, records.Records] = {}
        self._page = Path()
        self._files: dict[Path, bytes] = {}

    def changes(self) -> list[Change]:
        """Return the files that are to be written; pages for records without one are among them."""
        wanted: dict[Path, bytes] = {}
        for path, text in self._pages():
            self._page, self._files = path, wanted
            wanted[path] = blocks.regenerated(text, path, self._render).encode()
        return [Change(path, content) for path, content in wanted.items() if not _same(path, content)]

    def write(self, changes: Sequence[Change]) -> None:
        """Write files, each atomically."""
        for change in changes:
            atomic.make_folder(change.path.parent, "--root")
            atomic.write(change.path, change.content, "--root")

    def findings(self, words: list[str]) -> Findings:
        """Return the statistics of the experiment that the words select, from its records."""
        if tuple(words) not in self._findings:
            experiment = self.load(words)
            name = experiment.recipe.name
            path = self.root / RESULTS / name / RECORDS
            read = self._read(path)
            if read.recipe != name:
                raise UserError(
                    f"{path}: has the records of {read.recipe}, not of {name}; move it to {RESULTS}/{read.recipe}"
                )
            collected = collect(experiment, path.relative_to(self.root), _ignore, read.runs)  # pages show the path
            self._findings[tuple(words)] = judge(aggregate(collected), self._tests.get(_points(experiment)))
        return self._findings[tuple(words)]

    @cached_property
    def _tests(self) -> dict[Hashable, dict[str, bool]]:
        """The tests of each experiment in the file of claims, and whether they were stated late."""
        path, found = self.root / RESULTS / CLAIMS, dict[Hashable, dict[str, bool]]()
        for test, experiment, late in evidence.tests_of(path) if path.exists() else ():
            found.setdefault(_points(self.load(shlex.split(experiment))), {})[test] = late
        return found

    def _read(self, path: Path) -> records.Records:
        if path not in self._records:
            self._records[path] = records.load(path)
        return self._records[path]

    def _pages(self) -> Iterator[tuple[Path, str]]:
        for name in PAGES:
            top = self.root / name
            for path in sorted(top.rglob("*.md")) if top.is_dir() else [top] if top.exists() else []:
                yield path, path.read_text(encoding="utf-8")
        for path in sorted((self.root / RESULTS).glob(f"*/{RECORDS}")):
            page = path.with_name(PAGE)
            if not page.exists():
                yield page, self._new_page(path)

    def _new_page(self, path: Path) -> str:
        name = path.parent.name
        recipe = self.load([name]).recipe
        return TEMPLATE.format(
            title=name, name=name, claim=recipe.claim or "No claim.", records=path.relative_to(self.root)
        )

    def _render(self, arguments: str) -> str:
        try:
            kind, *words = shlex.split(arguments)
        except ValueError as error:
            raise UserError(f"{arguments!r}: {error}; write it like a command line") from None
        if kind not in self.kinds:
            raise UserError(f"{kind}: no kind of generated block; use one of {', '.join(self.kinds)}")
        return self.kinds[kind](words).strip("\n")

    def _about(self, render: Callable[[Findings], str], words: list[str]) -> str:
        return render(self.findings(words))

    def _table(self, words: list[str]) -> str:
        """Return the table of an experiment, with the costs of its methods if `--cost FILE` is given."""
        if "--cost" not in words:
            return fragments.table(self.findings(words))
        at = words.index("--cost")
        if at + 1 == len(words):
            raise UserError("--cost: needs a file, such as results/bench/demo.json")
        return fragments.table(self.findings([*words[:at], *words[at + 2 :]]), self.root / words[at + 1])

    def _report(self, words: list[str]) -> str:
        findings = self.findings(_without_name(words)[0])
        parts = [self._figure(words), fragments.table(findings), fragments.claims(findings), fragments.about(findings)]
        return "\n\n".join(part.strip("\n") for part in parts if part)

    def _figure(self, words: list[str]) -> str:
        """Return a link to the figure, and add the figure and its data to the files."""
        words, name = _without_name(words)
        findings = self.findings(words)
        folder = self.root / RESULTS / findings.collected.experiment.recipe.name
        drawn = {".svg": figures.draw(findings, "svg"), ".csv": tables.comma_separated(findings).encode()}
        for suffix, content in drawn.items():
            if self._files.setdefault(folder / f"{name}{suffix}", content) != content:
                raise UserError(f"{name}{suffix}: another figure has this name; give this one a name with --as NAME")
        link = self._relative(folder / f"{name}.svg")
        return f"![{tables.split(findings)} of {findings.collected.experiment.recipe.name}]({link})"

    def _paper(self, words: list[str]) -> str:
        """Return a link to the figure of several recipes as the paper draws it, and add the figure to the files."""
        words, name = _without_name(words)
        if not words:
            raise UserError("paper: needs recipes: paper mnist1d-fig3 mnist1d-fig3-agni")
        found = [self.findings([word]) for word in words]
        path = self.root / RESULTS / words[0] / f"{'paper' if name == 'figure' else name}.svg"
        self._files[path] = paper.draw(found, "svg")
        return f"![the same in the form of the paper's figure]({self._relative(path)})"

    def _paper_table(self, words: list[str]) -> str:
        """Return one table of several recipes, with a line for each."""
        if not words:
            raise UserError("paper-table: needs recipes: paper-table mnist1d-table3-vit mnist1d-table3-convmixer")
        return paper.table([self.findings([word]) for word in words])

    def _value(self, words: list[str]) -> str:
        """Return a number: FIELD, the name of a cell or a claim, and the experiment."""
        if len(words) < 3:
            raise UserError('value: needs a field, a cell or claim, and a recipe: value accuracy "GNI" demo')
        field, name, *rest = words
        return fragments.value(self.findings(rest), field, name)

    def _result(self, words: list[str]) -> str:
        """Return a sentence about a cell, with a link to the page of its experiment."""
        if len(words) < 2:
            raise UserError('result: needs a cell and a recipe: result "GNI" demo')
        findings = self.findings(words[1:])
        page = self.root / RESULTS / findings.collected.experiment.recipe.name / PAGE
        return fragments.result(findings, words[0], self._relative(page))

    def _relative(self, path: Path) -> str:
        """Return a link from the page that is being rendered."""
        return os.path.relpath(path, self._page.parent).replace(os.sep, "/")

    def _evidence(self, words: list[str]) -> str:
        """Return the table of a file of claims, or with `--short` a line for each claim."""
        files = [word for word in words if word != "--short"]
        if len(files) != 1:
            raise UserError("evidence: needs exactly one file, such as results/claims.toml")

        def load(experiment: str) -> Findings | None:
            chosen = shlex.split(experiment)
            path = self.root / RESULTS / self.load(chosen).recipe.name / RECORDS
            return self.findings(chosen) if path.exists() else None

        render = evidence.summary if "--short" in words else evidence.table
        return render(self.root / files[0], load)

    def _costs(self, words: list[str]) -> str:
        """Return what it costs to run each recipe again."""
        return fragments.costs(map(self._read, sorted((self.root / RESULTS).glob(f"*/{RECORDS}"))))

    def _noise(self, words: list[str]) -> str:
        if len(words) != 1:
            raise UserError("noise: needs exactly one file, such as results/fig6/noise.csv")
        return fragments.noise_table(self.root / words[0])

    def _uncertainty(self, words: list[str]) -> str:
        if len(words) != 1:
            raise UserError("uncertainty: needs exactly one file, such as results/uncertainty/mnist1d.csv")
        return uncertainty.render(self.root / words[0])


def _without_name(words: list[str]) -> tuple[list[str], str]:
    """Take `--as NAME`, the name of the files of a figure, out of the words; the default is "figure"."""
    if "--as" not in words:
        return words, "figure"
    at = words.index("--as")
    name = words[at + 1] if at + 1 < len(words) else ""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise UserError(f"--as {name}: must be a name of lower-case letters, digits and -; give one")
    return [*words[:at], *words[at + 2 :]], name


def _points(experiment: Experiment) -> Hashable:
    """Return what two descriptions of the same runs have in common."""
    cells = frozenset((run.cell, run.key, tuple(experiment.seeds_of(run.label))) for run in experiment.cells())
    return experiment.recipe.name, cells


def _ignore(line: str) -> None:
    """Records have been validated: nothing is left to warn about."""


def _same(path: Path, content: bytes) -> bool:
    """Whether a file has this content; numbers in CSV files may differ in their last digits.

    A figure that another version of matplotlib drew is not compared: its data, in the CSV file beside it, are.
    """
    try:
        present = path.read_bytes()
    except OSError:
        return False
    if path.suffix == ".svg" and MATPLOTLIB.findall(present) != MATPLOTLIB.findall(content):
        return True
    return present == content or (path.suffix == ".csv" and _equal_numbers(present.decode(), content.decode()))


def _equal_numbers(first: str, second: str) -> bool:
    rows, others = (list(csv.reader(io.StringIO(text))) for text in (first, second))
    return [len(row) for row in rows] == [len(row) for row in others] and all(
        _close(one, other) for row, same in zip(rows, others, strict=True) for one, other in zip(row, same, strict=True)
    )


def _close(first: str, second: str) -> bool:
    try:
        return first == second or math.isclose(float(first), float(second), rel_tol=1e-9, abs_tol=1e-12)
    except ValueError:
        return False

"""Results in a repository: tables, figures and numbers in Markdown files, generated from `results/*/records.jsonl`."""

import csv
import io
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ghostnoise.lab import records
from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import blocks, evidence, figures, tables
from ghostnoise.lab.report.collect import Run, collect, number
from ghostnoise.lab.report.notes import claim_line, notes
from ghostnoise.lab.report.statistics import Claim, Findings, ResultRow, aggregate, holm, paired
from ghostnoise.lab.report.tables import NOTHING, counted
from ghostnoise.lab.store import atomic

RESULTS, RECORDS, PAGE = "results", "records.jsonl", "README.md"
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
FIELDS = ("accuracy", "mean", "n", "interval", "difference", "p", "seconds")
CLAIM_FIELDS = ("verdict", "difference", "n", "p")
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
        self.kinds: dict[str, Callable[[list[str]], str]] = {
            "report": self._report, "table": lambda words: table(self.findings(words)),
            "about": lambda words: about(self.findings(words)), "claims": lambda words: claims(self.findings(words)),
            "gap": lambda words: gap_table(self.findings(words)), "figure": self._figure, "value": self._value,
            "noise": self._noise, "evidence": self._evidence, **self.others,
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
            if path not in self._records:
                self._records[path] = records.read(path)
            read = self._records[path]
            if read.recipe != name:
                raise UserError(
                    f"{path}: has the records of {read.recipe}, not of {name}; move it to {RESULTS}/{read.recipe}"
                )
            found = records.recorded(read.runs, name, path)
            self._findings[tuple(words)] = aggregate(collect(experiment, path, _ignore, found))
        return self._findings[tuple(words)]

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

    def _report(self, words: list[str]) -> str:
        findings = self.findings(_without_name(words)[0])
        parts = [self._figure(words), table(findings), claims(findings), about(findings)]
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
        link = os.path.relpath(folder / f"{name}.svg", self._page.parent).replace(os.sep, "/")
        return f"![{tables.split(findings)} of {findings.collected.experiment.recipe.name}]({link})"

    def _value(self, words: list[str]) -> str:
        """Return a number: FIELD, the name of a cell or a claim, and the experiment."""
        if len(words) < 3:
            raise UserError('value: needs a field, a cell or claim, and a recipe: value accuracy "GNI" demo')
        field, name, *rest = words
        return value(self.findings(rest), field, name)

    def _evidence(self, words: list[str]) -> str:
        """Return the table of a file of claims."""
        if len(words) != 1:
            raise UserError("evidence: needs exactly one file, such as results/claims.toml")

        def load(name: str) -> Findings | None:
            return self.findings([name]) if (self.root / RESULTS / name / RECORDS).exists() else None

        return evidence.table(self.root / words[0], load, gaps)

    def _noise(self, words: list[str]) -> str:
        if len(words) != 1:
            raise UserError("noise: needs exactly one file, such as results/fig6/noise.csv")
        return noise_table(self.root / words[0])


def _without_name(words: list[str]) -> tuple[list[str], str]:
    """Take `--as NAME`, the name of the files of a figure, out of the words; the default is "figure"."""
    if "--as" not in words:
        return words, "figure"
    at = words.index("--as")
    name = words[at + 1] if at + 1 < len(words) else ""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise UserError(f"--as {name}: must be a name of lower-case letters, digits and -; give one")
    return [*words[:at], *words[at + 2 :]], name


def table(findings: Findings) -> str:
    """Return the table of a report, with the interval of each mean, in Markdown."""
    headings, rows = tables.lines(findings)
    place = 2 + len(tables.axes_of(findings.rows))
    headings = [*headings[:place], "95 % interval of the mean", *headings[place:]]
    rows = [
        [*row[:place], _interval(each), *row[place:]] for row, each in zip(rows, findings.rows, strict=True)
    ]  # fmt: skip
    if all(row.paper is None for row in findings.rows):
        drop = headings.index("paper")
        headings, rows = [*headings[:drop], *headings[drop + 1 :]], [[*row[:drop], *row[drop + 1 :]] for row in rows]
    return tables.markdown_table(headings, rows)


def claims(findings: Findings) -> str:
    """Return a list of the claims with their verdicts, and of what a reader has to know."""
    lines = [claim_line(findings, claim) for claim in findings.claims] + notes(findings)
    return "".join(f"- {tables.markdown_text(line)}\n" for line in lines)


def about(findings: Findings) -> str:
    """Return a sentence with the environment of the runs: hardware, versions, commits, dates and time."""
    ended = [run for run in findings.collected.runs if run.status in ("finished", "diverged")]
    if not ended:
        return "No runs have finished."
    dates = sorted(day for run in ended for day in _days(run))
    threads = _distinct(ended, "threads")
    commits = [commit[:10] + ("+" if commit.endswith("+") else "") for commit in _distinct(ended, "commit")]
    hours = sum(float(run.result.get("seconds", 0)) for run in ended) / 3600
    period = dates[0] if dates[:1] == dates[-1:] else " to ".join([dates[0], dates[-1]]) if dates else "unknown dates"
    facts = [
        f"{counted(len(ended), 'run')} on {' and '.join(_distinct(ended, 'device_name')) or 'unknown hardware'}",
        f"{' or '.join(threads)} {'thread' if threads == ['1'] else 'threads'} each",
        f"torch {' and '.join(_distinct(ended, 'torch'))}",
        f"{period}, {tables.duration_text(3600 * hours)} of training in all",
        f"numerics {' and '.join(map(str, findings.collected.numerics))}",
        f"commit {' and '.join(commits)}",
    ]
    return tables.markdown_text("; ".join(facts) + ".") + "\n"


def value(findings: Findings, field: str, name: str) -> str:
    """Return a number about a cell or a claim as text."""
    claim = next((each for each in findings.claims if each.text == name), None)
    if claim is not None:
        return _of_claim(claim, field)
    rows = [row for row in findings.rows if name in (row.method, row.name)]
    if len(rows) != 1:
        known = ", ".join([*(row.name for row in findings.rows), *(each.text for each in findings.claims)])
        raise UserError(f"value {field} {name!r}: must be one cell or claim of {known}; give its full name")
    row, score = rows[0], rows[0].score
    texts: dict[str, Callable[[], str]] = {
        "accuracy": lambda: tables.mean_text(score),
        "mean": lambda: NOTHING if score is None or score.mean is None else f"{score.mean:.2f}",
        "n": lambda: str(score.n if score else 0),
        "interval": lambda: _interval(row),
        "difference": lambda: tables.difference_text(row.difference),
        "p": lambda: tables.holm_text(row.difference),
        "seconds": lambda: tables.duration_text(score.seconds if score else None),
    }
    if field not in texts:
        raise UserError(f"value {field}: no such field; use one of {', '.join(FIELDS)}")
    return texts[field]()


def gap_table(findings: Findings) -> str:
    """Return how far outputs in training differ from those at inference, for each method, after the last epoch."""
    measured = gaps(findings)
    ranges = {
        row.name: statistics.fmean(found) for row in findings.rows if (found := _own(row, "range_ratio").values())
    }
    base = measured.get(findings.baseline, {})
    pairs = [paired(each, base) if name != findings.baseline else None for name, each in measured.items()]
    corrected = holm([pair.p if pair else None for pair in pairs])
    rows = []
    for (name, found), pair, p in zip(measured.items(), pairs, corrected, strict=True):
        interval = pair.interval() if pair else None
        rows.append([
            name, str(len(found)), tables.percent_text(list(found.values())),
            f"{pair.mean:+.2f}{f' {tables.interval_text(interval)}' if interval else ''}" if pair else NOTHING,
            tables.p_text(p.p if p else None), f"{ranges[name]:.2f}" if name in ranges else NOTHING,
        ])  # fmt: skip
    headings = [
        "method", "n", "gap, % ± std", f"difference to {findings.baseline} [95 % interval]", "p (Holm)",
        "largest output, training / inference",
    ]  # fmt: skip
    return tables.markdown_table(headings, rows)


def gaps(findings: Findings) -> dict[str, dict[Hashable, float]]:
    """Return the gap of each cell between training and inference, in percent by seed."""
    return {
        row.name: {seed: 100 * value for seed, value in _own(row, "relative").items()} for row in findings.rows
    }  # fmt: skip


def _own(row: ResultRow, measure: str) -> dict[Hashable, float]:
    """Return a measure of a cell's own method by seed, after the last epoch: the mean of the layers that have it."""
    values: dict[Hashable, float] = {}
    for run in row.score.runs if row.score else ():
        name = f"{run.point.settings.norm.method}_{measure}"
        for measured in getattr(run.found, "noise", ())[-1:]:
            found = [each for layer in measured.rows() if (each := number(layer.get(name))) is not None]
            if found:
                values[run.point.seed] = statistics.fmean(found)
    return values


def noise_table(path: Path) -> str:
    """Return the distances of measured noise to its laws, from a report's noise.csv."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        cells = [
            [
                row["epoch"],
                f"{row['layer']} ({row['channels']} channels)",
                *(f"{float(row[name]):.3f}" for name in ("ks_shift_fc", "ks_scale_fc", "ks_scale_fc-exact")),
                *(f"{float(row[f'effective_size_{part}']):.1f}" for part in ("shift", "scale")),
            ]
            for row in rows
        ]
        size = int(rows[0]["ghost_size"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: cannot be read as a report's noise.csv ({error}); give another file") from None
    headings = [
        "epoch", "layer", f"shift, N(0, 1/{size})", f"scale, χ²({size})/{size} (the paper's)",
        f"scale, χ²({size - 1})/{size} (exact)", "N of the shift", "N of the scale",
    ]  # fmt: skip
    return tables.markdown_table(headings, cells)


def _of_claim(claim: Claim, field: str) -> str:
    if field not in CLAIM_FIELDS:
        raise UserError(f"value {field}: no such field of a claim; use one of {', '.join(CLAIM_FIELDS)}")
    paired = claim.difference.paired if claim.difference else None
    if field == "n":
        return str(paired.n if paired else 0)
    if field == "verdict":
        return claim.verdict
    return tables.difference_text(claim.difference) if field == "difference" else tables.holm_text(claim.difference)


def _interval(row: ResultRow) -> str:
    interval = row.score.interval() if row.score else None
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else NOTHING


def _distinct(runs: Sequence[Run], name: str) -> list[str]:
    return sorted({str(run.environment[name]) for run in runs if run.environment.get(name) not in (None, "")})


def _days(run: Run) -> list[str]:
    return [str(found)[:10] for found in (run.environment.get("started"), run.result.get("ended")) if found]


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

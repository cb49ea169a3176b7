"""The table as Markdown, CSV and LaTeX, and for the terminal."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ghostnoise.lab.report.aggregate import Findings, Row, Score
from ghostnoise.lab.report.words import NOTHING, difference_text, holm_text, score_text

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "±": r"$\pm$", "–": "--", "σ": r"$\sigma$", "μ": r"$\mu$",
    "×": r"$\times$", "−": "$-$", "\n": " ", "\r": " ",
}  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a spreadsheet knows a formula


def axes_of(scores: Sequence[Row | Score]) -> list[str]:
    """The axes that any of the rows stands on, in their order."""
    at = (score.cell.at if isinstance(score, Score) else score.at for score in scores)
    return list(dict.fromkeys(key for place in at for key, _ in place))


def short(key: str) -> str:
    """An axis's name without its section."""
    return key.rpartition(".")[2]


def value_text(place: Sequence[tuple[str, Any]], key: str) -> str:
    """Where on an axis a cell stands."""
    return str(dict(place).get(key, NOTHING))


def split(findings: Findings) -> str:
    """What accuracy the rows have."""
    kinds = {row.score.cell.settings.data.evaluate for row in findings.rows if row.score}
    return f"{' or '.join(sorted(kinds))} accuracy" if kinds else "test accuracy"


def lines(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Headings, and the texts of each row."""
    axes = axes_of(findings.rows)
    headings = [
        "method", *map(short, axes), f"{split(findings)}, % ± std (n)", "paper",
        f"difference to {findings.baseline} [95 % interval]", "p (Holm)", "note",
    ]  # fmt: skip
    made = [
        [
            row.method, *(value_text(row.at, key) for key in axes), score_text(row.score), row.paper or NOTHING,
            difference_text(row.difference), holm_text(row.difference), row.note,
        ]
        for row in findings.rows
    ]  # fmt: skip
    if not any(row[-1] for row in made):
        return headings[:-1], [row[:-1] for row in made]
    return headings, made


def markdown(findings: Findings) -> str:
    """A GitHub-flavoured table."""
    headings, rows = lines(findings)
    made = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(_markdown, row))} |\n" for row in made)


def comma_separated(findings: Findings) -> str:
    """One number in a column, with all digits; what a spreadsheet would take for a formula has a ' before it."""
    axes = axes_of(findings.rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([
        "method", *axes, "n", "mean", "std", "best", "paper", "baseline", "difference", "low", "high", "p", "p_holm",
        "diverged", "failed", "unfinished", "missing", "seconds", "images_per_second", "note",
    ])  # fmt: skip
    for row in findings.rows:
        place = [dict(row.at).get(key, "") for key in axes]
        writer.writerow([_plain(each) for each in [row.method, *place, *_numbers(findings, row), row.note]])
    return file.getvalue()


def noise(findings: Findings) -> str:
    """As CSV, a line for each layer of each reading of each run that has recorded its noise."""
    axes = list(dict.fromkeys(key for each in findings.noise for key, _ in each.run.point.cell.at))
    lines: list[dict[str, Any]] = []
    for each in findings.noise:
        point, found = each.run.point, each.run.found
        told = {"run": found.identity if found else "", "method": point.cell.method, "seed": point.seed}
        for epoch, reading in each.readings.items():
            lines += [told | dict(point.cell.at) | {"epoch": epoch} | dict(layer.row) for layer in reading.layers]
    names = dict.fromkeys(["run", "method", *axes, "seed", "epoch", *(name for line in lines for name in line)])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_plain(line.get(name)) for name in names] for line in lines)
    return file.getvalue()


def latex(findings: Findings) -> str:
    """A table for the booktabs package."""
    headings, rows = lines(findings)
    columns = "l" + "r" * (len(headings) - 1)
    body = [_latex_line(headings), "\\midrule\n", *map(_latex_line, rows)]
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{''.join(body)}\\bottomrule\n\\end{{tabular}}\n"


def terminal(findings: Findings) -> Table:
    """The table for a terminal; headings wrap, numbers do not."""
    headings, rows = lines(findings)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        wraps = heading in ("paper", "note")
        width = max([len(row[number]) for row in rows] + [6])
        shown = textwrap.fill(heading.replace("_", " "), width, break_long_words=False)
        table.add_column(
            escape(shown), justify="left" if wraps or not number else "right", no_wrap=not wraps, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _numbers(findings: Findings, row: Row) -> list[Any]:
    score, difference = row.score, row.difference
    if score is None:
        return ["" for _ in range(16)]
    found = difference.paired if difference else None
    low, high = (found.interval() if found else None) or ("", "")
    return [
        score.n, score.mean, score.std, score.best, row.paper, findings.baseline if found else "",
        found.mean if found else "", low, high, found.p if found else "",
        difference.corrected.p if difference and difference.corrected else "",
        *(score.counts[status] for status in ("diverged", "failed", "unfinished", "missing")),
        score.seconds, score.speed,
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    if value is None or value != value:  # also NaN: nothing is known
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _markdown(text: str) -> str:
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", flat)


def _latex_line(cells: Sequence[str]) -> str:
    translate: Callable[[str], str] = lambda cell: "".join(LATEX.get(sign, sign) for sign in cell)  # noqa: E731
    return " & ".join(map(translate, cells)) + " \\\\\n"

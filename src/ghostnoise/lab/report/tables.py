"""The results table as Markdown, CSV, LaTeX and for the terminal, and the format of the numbers in a report."""

import csv
import io
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ghostnoise.lab.report.markup import EMPTY
from ghostnoise.lab.report.statistics import Difference, Findings, Ratio, ResultRow, Score
from ghostnoise.lab.run import Numerics

NOTHING = "–"
DISTANCE = "of the distance"
"""The unit of distances between distributions, which are small numbers."""
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "±": r"$\pm$", "–": "--", "σ": r"$\sigma$", "μ": r"$\mu$",
    "×": r"$\times$", "−": "$-$", "`": r"\textasciigrave{}", "\n": " ", "\r": " ",
}  # fmt: skip
WORD_WIDTH = 12  # longest word that a column of text does not break in the terminal
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters that make a spreadsheet read a cell as a formula


# Numbers


def mean_text(score: Score | None) -> str:
    """Format the mean ± standard deviation."""
    if score is None or score.mean is None:
        return NOTHING
    return f"{score.mean:.2f}" + (f" ± {score.std:.2f}" if score.std is not None else "")


def percent_text(values: Sequence[float]) -> str:
    """Format the mean ± standard deviation of numbers."""
    if not values:
        return NOTHING
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def score_text(score: Score | None) -> str:
    """Format the mean ± standard deviation and the number of runs."""
    return f"{mean_text(score)} ({score.n})" if score and score.n else NOTHING


def interval_text(interval: Sequence[float], digits: int = 2) -> str:
    """Format an interval with the signs of its ends."""
    return f"[{interval[0]:+.{digits}f}, {interval[1]:+.{digits}f}]"


def digits(unit: str) -> int:
    """Return the number of digits after the point with which a difference of this unit is shown."""
    return 3 if unit == DISTANCE else 2


def ratio_text(ratio: Ratio) -> str:
    """Format a ratio with its confidence set."""
    if ratio.low == -math.inf and ratio.high == math.inf:
        return f"{ratio.value:.2f} [any number]"
    if ratio.outside:
        return f"{ratio.value:.2f} [unbounded: up to {ratio.low:.2f}, and from {ratio.high:.2f}]"
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def difference_text(difference: Difference | None) -> str:
    """Format the mean difference and its 95 % interval, or why it has none, and n if the cells have other numbers."""
    if difference is None or difference.paired is None:
        return NOTHING
    found = difference.paired
    interval = found.interval()
    why = "(n = 1)" if found.n == 1 else "(no spread)"
    fewer = found.n > 1 and found.n < max(difference.ours.n, difference.theirs.n)
    return f"{found.mean:+.2f} {interval_text(interval) if interval else why}{f' (n = {found.n})' if fewer else ''}"


def mean_interval_text(score: Score | None) -> str:
    """Format the 95 % interval of the mean, or why it has none."""
    if score is None or not score.n:
        return NOTHING
    interval = score.interval()
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "n = 1"


def p_text(p: float | None) -> str:
    """Format a p-value with two digits, or as a bound."""
    if p is None:
        return NOTHING
    return f"{p:.2g}" if p >= 0.001 else "< 0.001"


def holm_text(difference: Difference | None) -> str:
    """Format the corrected p-value."""
    return p_text(difference.corrected.p if difference and difference.corrected else None)


def duration_text(seconds: float | None) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def numerics_text(counts: Mapping[Numerics, int]) -> str:
    """Format numerics numbers with the number of runs of each: "1 (5 runs) and 1 instead of 2 (1 run)"."""
    return " and ".join(f"{number} ({counted(runs, 'run')})" for number, runs in counts.items())


# Tables


def axes_of(scores: Sequence[ResultRow | Score]) -> list[str]:
    """List the axes on which any of the rows has a value, in order of appearance."""
    places = (score.at for score in scores)
    return list(dict.fromkeys(key for place in places for key, _ in place))


def short(key: str) -> str:
    """Return an axis's name without its section."""
    return key.rpartition(".")[2]


def value_text(at: Sequence[tuple[str, Any]], key: str) -> str:
    """Format a cell's value on an axis."""
    return str(dict(at).get(key, NOTHING))


def split(findings: Findings) -> str:
    """Name the accuracy that the rows contain, such as "test accuracy"."""
    kinds = {row.score.settings.data.evaluate for row in findings.rows if row.score}
    return f"{' or '.join(sorted(kinds))} accuracy" if kinds else "test accuracy"


def note_text(findings: Findings, row: ResultRow) -> str:
    """Return the row's note, with its numerics numbers if one is not current and the runs are not all comparable."""
    numbers = row.score.numerics if row.score and findings.collected.mixed else {}
    numbers = numbers if any(each.behind for each in numbers) else {}
    return "; ".join(filter(None, [row.note, f"numerics {' and '.join(map(str, numbers))}" if numbers else ""]))


def numerics_notice(findings: Findings) -> str:
    """Warn if the runs of the report are not all comparable; empty otherwise."""
    if not findings.collected.mixed:
        return ""
    return (
        f"Mixed numerics: the runs were computed with numerics {numerics_text(findings.collected.numerics)}, whose "
        "results may differ by more than rounding. Means include all of these runs; differences pair only current runs "
        f"with current ones. To correct this, rerun `ghostnoise sweep {findings.collected.experiment.recipe.words}` "
        "with the settings of this report: it trains again the runs that were computed with another number than their "
        "method has now."
    )


def lines(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and the text of each cell of each row."""
    axes = axes_of(findings.rows)
    headings = [
        "method", *map(short, axes), f"{split(findings)}, % ± std (n)", "paper",
        f"difference to {findings.baseline} [95 % interval]", "p (Holm)", "note",
    ]  # fmt: skip
    rows = [
        [
            row.method, *(value_text(row.at, key) for key in axes), score_text(row.score), row.paper or NOTHING,
            difference_text(row.difference), holm_text(row.difference), note_text(findings, row),
        ]
        for row in findings.rows
    ]  # fmt: skip
    return without_empty(headings, rows)


def without_empty(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns in which no row has a value."""
    kept = [at for at in range(len(headings)) if not at or any(row[at] not in EMPTY for row in rows)]
    return [headings[at] for at in kept], [[row[at] for at in kept] for row in rows]


def markdown(findings: Findings) -> str:
    """Format the table as GitHub-flavoured Markdown."""
    notice = numerics_notice(findings)
    return markdown_table(*lines(findings)) + (f"\n{markdown_text(notice)}\n" if notice else "")


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format headings and rows as a Markdown table."""
    table = [map(markdown_text, headings), ["---"] * len(headings), *(map(markdown_text, row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def comma_separated(findings: Findings) -> str:
    """Format the table as CSV with one number per column and all digits."""
    axes = axes_of(findings.rows)
    names = [
        "method", *axes, "n", "mean", "std", "best", "paper", "baseline", "difference", "low", "high", "p", "p_holm",
        "diverged", "failed", "unfinished", "missing", "seconds", "images_per_second", "numerics", "note",
    ]  # fmt: skip
    rows = []
    for row in findings.rows:
        place = [dict(row.at).get(key, "") for key in axes]
        rows.append([row.method, *place, *_numbers(findings, row), note_text(findings, row)])
    return write_csv(names, rows)


def write_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as CSV; a ' is put before text that a spreadsheet would run as a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_plain(value) for value in row] for row in rows)
    return file.getvalue()


def latex(findings: Findings) -> str:
    """Format the table for the LaTeX package booktabs."""
    headings, rows = lines(findings)
    columns = "l" + "r" * (len(headings) - 1)
    body = [_latex_line(headings), "\\midrule\n", *map(_latex_line, rows), "\\bottomrule\n"]
    if notice := numerics_notice(findings):
        body.append(f"\\multicolumn{{{len(headings)}}}{{p{{\\linewidth}}}}{{{_latex(notice)}}} \\\\\n")
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{''.join(body)}\\end{{tabular}}\n"


def terminal(findings: Findings) -> Table:
    """Format the table for a terminal; headings wrap, numbers do not."""
    headings, rows = lines(findings)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for at, heading in enumerate(headings):
        wraps = heading in ("paper", "note")
        width = max([len(row[at]) for row in rows] + [6])
        shown = textwrap.fill(heading.replace("_", " "), width, break_long_words=False)
        longest_word = max([len(word) for row in rows for word in row[at].split()] + [0])
        table.add_column(
            shown, justify="left" if wraps or not at else "right", no_wrap=not wraps, overflow="fold",
            min_width=min(longest_word, WORD_WIDTH) if wraps else None,
        )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _numbers(findings: Findings, row: ResultRow) -> list[Any]:
    score, difference = row.score, row.difference
    if score is None:
        return ["", "", "", "", row.paper, *[""] * 13]
    found = difference.paired if difference else None
    low, high = (found.interval() if found else None) or ("", "")
    return [
        score.n, score.mean, score.std, score.best, row.paper, findings.baseline if found else "",
        found.mean if found else "", low, high, found.p if found else "",
        difference.corrected.p if difference and difference.corrected else "",
        score.counts["diverged"], score.counts["failed"], score.counts["running"] + score.counts["interrupted"],
        score.counts["missing"],
        score.seconds, score.speed, " ".join(str(each.number) for each in score.numerics),
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    if value is None or value != value:  # NaN, like None, means that the value is unknown
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def markdown_text(text: str) -> str:
    """Escape a text for Markdown, on one line."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", flat)


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex, cells)) + " \\\\\n"

"""The tables of the page: results, tuning, runs without a result, and all runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ghostnoise.lab.config.overrides import flat
from ghostnoise.lab.report import colors, measures
from ghostnoise.lab.report.markup import TableCell, section, table, text
from ghostnoise.lab.report.measures import Cost
from ghostnoise.lab.report.statistics import Findings, ResultRow, Score
from ghostnoise.lab.report.tables import (
    NOTHING,
    axes_of,
    difference_text,
    duration_text,
    holm_text,
    mean_interval_text,
    note_text,
    score_text,
    short,
    split,
    value_text,
)
from ghostnoise.lab.run import Run, Status, number

STATUS_CLASSES: dict[Status, str] = {
    "finished": "good", "diverged": "bad", "failed": "bad", "running": "fair", "interrupted": "fair", "missing": "open",
}  # fmt: skip


def results(findings: Findings) -> str:
    """Return the table of results and the table of the tuning."""
    axes = axes_of(findings.rows)
    headings = [
        "method", *map(short, axes), f"{split(findings)}, % (n)", "95 % interval", "runs", "paper",
        f"difference to {findings.baseline}", "p (Holm)", "best, %", "train–test gap", "cost", "time", "images/s",
    ]  # fmt: skip
    caption = (
        f"Mean ± standard deviation over seeds with the 95 % interval of the mean, and the paired difference to "
        f"{findings.baseline} with its 95 % interval; “best” is the highest accuracy after any epoch, “cost” the "
        f"training time relative to {findings.baseline}"
    )
    relative = {id(score): cost for score, cost in measures.costs(findings)}
    return section(
        "results", "Results",
        table("main", caption, headings, [_result(findings, row, axes, relative) for row in findings.rows]),
        _no_intervals(findings),
        "<p class=\"files\">The same as <a href=\"table.md\">Markdown</a>, <a href=\"table.csv\">CSV</a> and "
        "<a href=\"table.tex\">LaTeX</a>; the figure as <a href=\"figure.png\">PNG</a> and "
        "<a href=\"figure.pdf\">PDF</a>.</p>",
        _tuning(findings) if findings.tuning else "",
    )  # fmt: skip


def _no_intervals(findings: Findings) -> str:
    """Explain the intervals that are missing in the table of results."""
    scores = [row.score for row in findings.rows if row.score]
    pairs = [row.difference.paired for row in findings.rows if row.difference and row.difference.paired]
    words = []
    if any(score.n == 1 for score in scores) or any(pair.n == 1 for pair in pairs):
        words.append("n = 1: a single seed has no standard deviation, no interval and no test.")
    if any(pair.n > 1 and pair.interval() is None for pair in pairs):
        words.append("No spread: the difference is the same for every seed, so there is no interval and no test.")
    if any(not score.n for score in scores):
        words.append("Rows without numbers: no run of the cell has finished.")
    return f'<p class="files">{text(" ".join(words))}</p>' if words else ""


def _result(
    findings: Findings, row: ResultRow, axes: Sequence[str], relative: Mapping[int, Cost]
) -> list[TableCell | str]:
    score, difference = row.score, row.difference
    found = difference.paired if difference else None
    corrected = difference.corrected if difference else None
    note = note_text(findings, row)
    state = TableCell(note, label="bad" if "diverged" in note or "failed" in note else "open")
    gap = measures.gap(score) if score else None
    cost = relative.get(id(score))
    color = colors.of(score.settings.norm.method) if score else None
    return [
        TableCell(row.method, color=color), *(_place(row.at, key) for key in axes),
        TableCell(score_text(score), score.mean if score else None),
        TableCell(mean_interval_text(score), score.mean if score else None),
        state if note else "", row.paper or NOTHING,
        TableCell(difference_text(difference), found.mean if found else None),
        TableCell(holm_text(difference), corrected.p if corrected else None),
        _percent(score.best if score else None),
        TableCell(f"{gap.mean:.2f}", gap.mean) if gap else NOTHING,
        TableCell(f"{'≈ ' if cost.rough else ''}{cost.median:.2f} ×", cost.median) if cost else NOTHING,
        *_effort(score),
    ]  # fmt: skip


def _tuning(findings: Findings) -> str:
    axes = axes_of(findings.tuning)
    select = findings.collected.experiment.select
    metric = select.metric.replace("_", " ") if select else ""
    headings = ["method", *map(short, axes), "validation accuracy, % (n)", "best, %", "time", "images/s", "chosen"]
    rows: list[list[TableCell | str]] = [
        [
            score.label, *(_place(score.at, key) for key in axes), TableCell(score_text(score), score.mean),
            _percent(score.best), *_effort(score), TableCell("chosen", label="good") if score.chosen else score.lacking,
        ]
        for score in findings.tuning
    ]  # fmt: skip
    caption = f"Tuning on validation images; each method’s best cell by {metric} is tested"
    return f"<h3>Tuning</h3>{table('tuning', caption, headings, rows)}"


def _effort(score: Score | None) -> list[TableCell | str]:
    if score is None:
        return [NOTHING] * 2
    speed = NOTHING if score.speed is None else f"{score.speed:,.0f}"
    seconds = TableCell(duration_text(score.seconds), score.seconds)
    return [seconds, TableCell(speed, score.speed)]


def _percent(value: float | None) -> TableCell:
    return TableCell(NOTHING if value is None else f"{value:.2f}", value)


def _place(at: Sequence[tuple[str, Any]], key: str) -> TableCell:
    return TableCell(value_text(at, key), number(dict(at).get(key)))


def problems(findings: Findings) -> str:
    """Return the table of runs that failed, diverged, or have not finished."""
    rows: list[list[TableCell | str]] = [
        [run.name, _stage(run), _status(run), run.failed_for or NOTHING]
        for run in findings.collected.runs
        if run.status != "finished"
    ]
    if not rows:
        return ""
    content = table("problems", "Runs without a result", ["run", "stage", "status", "reason"], rows)
    return section("open", f"Missing and failed ({len(rows)})", content)


def runs(findings: Findings) -> str:
    """Return the table of all runs, with the settings that differ among them."""
    flats = [flat(run.settings.model_dump(exclude_none=True)) for run in findings.collected.runs]
    keys = dict.fromkeys(key for each in flats for key in each)
    differing = [key for key in keys if key != "seed" and len({str(each.get(key)) for each in flats}) > 1]
    headings = ["method", "seed", "stage", "status", "accuracy, %", "best, %", "time", "numerics", *differing, "folder"]
    rows: list[list[TableCell | str]] = []
    for run, own in zip(findings.collected.runs, flats, strict=True):
        values = [TableCell(str(own.get(key, NOTHING))) for key in differing]
        rows.append([*_run(run), *values, NOTHING if run.status == "missing" else run.identity])
    content = table("runs", "All runs, and the settings that differ among them", headings, rows)
    return section("details", "Runs", f"<p>Read from <code>{text(findings.collected.folder)}</code>.</p>", content)


def _run(run: Run) -> list[TableCell | str]:
    seconds = number((run.result or {}).get("seconds"))
    return [
        TableCell(run.label, color=colors.of(run.settings.norm.method)),
        TableCell(str(run.seed), run.seed), _stage(run), _status(run),
        _percent(run.accuracy), _percent(number((run.result or {}).get("best_accuracy"))),
        TableCell(duration_text(seconds), seconds),
        TableCell(str(run.numerics), run.numerics.number) if run.status != "missing" else NOTHING,
    ]  # fmt: skip


def _stage(run: Run) -> str:
    return "tuning" if run.stage == "tune" else "final"


def _status(run: Run) -> TableCell:
    return TableCell(run.status, label=STATUS_CLASSES[run.status])

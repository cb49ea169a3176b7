"""The parts of the page, in their order."""

from collections.abc import Sequence
from typing import Any

from ghostnoise.lab.config.overrides import flat
from ghostnoise.lab.report import noise_runs
from ghostnoise.lab.report.aggregate import FEW, Findings, Row, Score
from ghostnoise.lab.report.claims import Judged
from ghostnoise.lab.report.gather import Run, Status
from ghostnoise.lab.report.markup import Cell, items, label, section, table, text
from ghostnoise.lab.report.tables import axes_of, short, split, value_text
from ghostnoise.lab.report.words import (
    NOTHING,
    difference_text,
    holm_text,
    score_text,
    seconds_text,
    several,
)

VERDICTS = {
    "supported": ("Supported", "good"),
    "points that way": ("Points that way, not shown", "fair"),
    "not supported": ("Not supported", "bad"),
    "cannot be told": ("Cannot be told yet", "open"),
}
STATUSES: dict[Status, str] = {
    "finished": "good",
    "diverged": "bad",
    "failed": "bad",
    "unfinished": "fair",
    "missing": "open",
}
ENVIRONMENT = (
    "ghostnoise", "commit", "python", "torch", "numpy", "system", "machine", "device", "device_name", "threads",
    "processes", "backend", "malloc",
)  # fmt: skip


def summary(findings: Findings, judged: Sequence[Judged]) -> str:
    """What is claimed, whether the data supports it, and how much of the data there is."""
    claim = findings.gathered.experiment.recipe.claim
    cards = "".join(
        f'<li class="card"><p class="claim">{text(each.claim)} {label(*VERDICTS[each.verdict])}</p>'
        f"<p>{text(each.why)}</p></li>"
        for each in judged
    )
    none = "" if judged else "<p>The recipe names no comparison, so there is no verdict; the table has the numbers.</p>"
    return section(
        "summary", "Summary",
        f'<p class="lead">The recipe’s claim: {text(claim or "none is written down")}</p>',
        f'<ul class="cards">{cards}</ul>' if cards else none,
        items(notes(findings, judged)),
    )  # fmt: skip


def notes(findings: Findings, judged: Sequence[Judged]) -> list[str]:
    """What to know before believing a number."""
    gathered, experiment = findings.gathered, findings.gathered.experiment
    made = []
    if experiment.smoke:
        made.append("Smoke runs: shrunk to seconds, and their numbers mean nothing.")
    lacking = [f"{gathered.count(word)} {word}" for word in STATUSES if word != "finished" and gathered.count(word)]
    if lacking:
        made.append(
            f"{gathered.count('finished')} of {several(len(gathered.runs), 'run')} finished; {', '.join(lacking)}."
        )
    if not gathered.runs or not gathered.count("finished"):
        made.append("There is no finished run yet, and so no number.")
    largest = max((row.score.n for row in findings.rows if row.score), default=0)
    if largest == 1:
        made.append("One seed for each cell: no deviations, no intervals, no tests.")
    elif 1 < largest < FEW:
        made.append(
            f"At most {largest} seeds for a cell: deviations are rough, and intervals rest on differences being normal."
        )
    if judged and not experiment.select and any(row.at for row in findings.rows):
        made.append("Best cells are chosen by the very runs that are compared, which favours methods with more cells.")
    return made + noise_runs.notes(gathered, findings.noise) + folder_notes(findings)


def folder_notes(findings: Findings) -> list[str]:
    """What else was found among the run folders."""
    gathered = findings.gathered
    made = []
    if gathered.damaged:
        names = ", ".join(path.name for path in gathered.damaged)
        made.append(f"{several(len(gathered.damaged), 'damaged run folder')} left out: {names}.")
    if gathered.twice:
        made.append(f"{several(gathered.twice, 'run folder')} left out: the same run was made on another device too.")
    if gathered.others:
        made.append(f"{several(gathered.others, 'other run')} in {gathered.folder}, of no cell of this experiment.")
    return made


def results(findings: Findings) -> str:
    """The table, and that of the tuning."""
    axes = axes_of(findings.rows)
    headings = [
        "method", *map(short, axes), f"{split(findings)}, % (n)", "runs", "paper", f"difference to {findings.baseline}",
        "p (Holm)", "best, %", "time", "images/s",
    ]  # fmt: skip
    caption = (
        f"Mean ± standard deviation over seeds, and the paired difference to {findings.baseline} with its 95 % "
        "interval; “best” is the highest after any epoch"
    )
    return section(
        "results", "Results",
        table("main", caption, headings, [_result(row, axes) for row in findings.rows]),
        "<p class=\"files\">The same as <a href=\"table.md\">Markdown</a>, <a href=\"table.csv\">CSV</a> and "
        "<a href=\"table.tex\">LaTeX</a>; the figure as <a href=\"figure.png\">PNG</a> and "
        "<a href=\"figure.pdf\">PDF</a>.</p>",
        _tuning(findings) if findings.tuning else "",
    )  # fmt: skip


def _result(row: Row, axes: Sequence[str]) -> list[Cell | str]:
    score, difference = row.score, row.difference
    found = difference.paired if difference else None
    corrected = difference.corrected if difference else None
    state = Cell(row.note, label="bad" if "diverged" in row.note or "failed" in row.note else "open")
    return [
        row.method, *(_place(row.at, key) for key in axes),
        Cell(score_text(score), score.mean if score else None), state if row.note else "all", row.paper or NOTHING,
        Cell(difference_text(difference), found.mean if found else None),
        Cell(holm_text(difference), corrected.p if corrected else None), *_effort(score),
    ]  # fmt: skip


def _tuning(findings: Findings) -> str:
    axes = axes_of(findings.tuning)
    select = findings.gathered.experiment.select
    metric = select.metric.replace("_", " ") if select else ""
    headings = ["method", *map(short, axes), "validation accuracy, % (n)", "best, %", "time", "images/s", "chosen"]
    rows: list[list[Cell | str]] = [
        [
            score.cell.method, *(_place(score.cell.at, key) for key in axes), Cell(score_text(score), score.mean),
            *_effort(score), Cell("chosen", label="good") if score.chosen else score.lacking,
        ]
        for score in findings.tuning
    ]  # fmt: skip
    caption = f"Tuning on validation images; each method’s best cell by {metric} is tested"
    return f"<h3>Tuning</h3>{table('tuning', caption, headings, rows)}"


def _effort(score: Score | None) -> list[Cell | str]:
    if score is None:
        return [NOTHING] * 3
    best = NOTHING if score.best is None else f"{score.best:.2f}"
    speed = NOTHING if score.speed is None else f"{score.speed:,.0f}"
    return [Cell(best, score.best), Cell(seconds_text(score.seconds), score.seconds), Cell(speed, score.speed)]


def _place(place: Sequence[tuple[str, Any]], key: str) -> Cell:
    value = dict(place).get(key)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(value_text(place, key), float(value) if plain else None)  # type: ignore[arg-type]


def problems(findings: Findings) -> str:
    """The runs that failed, diverged, or are not there."""
    rows: list[list[Cell | str]] = [
        [run.point.name, _stage(run), Cell(run.status, label=STATUSES[run.status]), run.reason or NOTHING]
        for run in findings.gathered.runs
        if run.status != "finished"
    ]
    if not rows:
        return ""
    made = table("problems", "Runs without a result", ["run", "stage", "status", "why"], rows)
    return section("open", f"Missing and failed ({len(rows)})", made)


def runs(findings: Findings) -> str:
    """All runs, with the settings in which they differ."""
    flats = [flat(run.point.settings.model_dump(exclude_none=True)) for run in findings.gathered.runs]
    keys = dict.fromkeys(key for each in flats for key in each)
    differing = [key for key in keys if key != "seed" and len({str(each.get(key)) for each in flats}) > 1]
    headings = ["method", "seed", "stage", "status", "accuracy, %", "best, %", "time", *differing, "folder"]
    rows: list[list[Cell | str]] = []
    for run, own in zip(findings.gathered.runs, flats, strict=True):
        values = [Cell(str(own.get(key, NOTHING))) for key in differing]
        rows.append([*_run(run), *values, run.found.identity if run.found else NOTHING])
    made = table("runs", "Each run, and the settings in which runs differ", headings, rows)
    return section("details", "Runs", f"<p>Folders are in <code>{text(findings.gathered.folder)}</code>.</p>", made)


def _run(run: Run) -> list[Cell | str]:
    best, seconds = run.result.get("best_accuracy"), run.result.get("seconds")
    best = best if isinstance(best, int | float) else None
    seconds = seconds if isinstance(seconds, int | float) else None
    return [
        run.point.cell.method, Cell(str(run.point.seed), run.point.seed), _stage(run),
        Cell(run.status, label=STATUSES[run.status]),
        Cell(NOTHING if run.accuracy is None else f"{run.accuracy:.2f}", run.accuracy),
        Cell(NOTHING if best is None else f"{best:.2f}", best), Cell(seconds_text(seconds), seconds),
    ]  # fmt: skip


def _stage(run: Run) -> str:
    return "tuning" if run.point.stage == "tune" else "final"


def environment(findings: Findings) -> str:
    """What the runs ran on, and where that differs among them."""
    met: dict[str, dict[str, int]] = {}
    for run in findings.gathered.runs:
        own = run.found.environment() if run.found else {}
        for key in ENVIRONMENT:
            if key in own:
                values, value = met.setdefault(key, {}), _shortened(key, str(own[key]))
                values[value] = values.get(value, 0) + 1
    differing = [key for key, values in met.items() if len(values) > 1]
    warning = f"The runs differ in {', '.join(differing)}: compare their numbers with care." if differing else ""
    entries = "".join(
        f"<div{' class=differs' if key in differing else ''}><dt>{text(key.replace('_', ' '))}</dt><dd>"
        + "<br>".join(
            text(value if len(values) == 1 else f"{value} ({several(n, 'run')})") for value, n in values.items()
        )
        + "</dd></div>"
        for key, values in met.items()
    )
    content = f"<dl>{entries}</dl>" if entries else "<p>No run has recorded one.</p>"
    return section("environment", "Environment", f'<p class="warning">{text(warning)}</p>' if warning else "", content)


def _shortened(key: str, value: str) -> str:
    """A commit by its first digits, and whether it was changed."""
    return value[:10] + ("+" if value.endswith("+") else "") if key == "commit" and len(value) > 10 else value

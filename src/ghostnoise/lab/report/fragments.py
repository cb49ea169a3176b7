"""Fragments of Markdown about an experiment, for pages that are generated from records."""

import csv
import json
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import tables
from ghostnoise.lab.report.claims import KINDS, Claim, own
from ghostnoise.lab.report.measures import of_network
from ghostnoise.lab.report.notes import claim_line, notes
from ghostnoise.lab.report.statistics import Findings, Paired, ResultRow, paired
from ghostnoise.lab.report.tables import NOTHING, counted
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.records import Records

FIELDS = ("accuracy", "mean", "n", "interval", "difference", "p", "seconds")
CLAIM_FIELDS = ("verdict", "difference", "n", "p")


def table(findings: Findings, cost: Path | None = None) -> str:
    """Return the table of a report, with the interval of each mean, in Markdown.

    `cost` is the JSON file of `ghostnoise bench recipe`; the table then has a column with the time of a training step.
    """
    headings, rows = tables.lines(findings)
    place = 1 + next((at for at, heading in enumerate(headings) if heading.endswith("(n)")), len(headings) - 1)
    headings = [*headings[:place], "95 % interval of the mean", *headings[place:]]
    rows = [
        [*row[:place], tables.mean_interval_text(each.score), *row[place:]]
        for row, each in zip(rows, findings.rows, strict=True)
    ]  # fmt: skip
    if cost is None:
        return tables.markdown_table(*tables.without_empty(headings, rows))
    column = _costs(cost, findings.baseline)
    headings.append(f"time per training step, relative to {findings.baseline} [95 % interval]")
    rows = [[*row, column.texts.get(each.name, NOTHING)] for row, each in zip(rows, findings.rows, strict=True)]
    return (
        f"{tables.markdown_table(*tables.without_empty(headings, rows))}\n{tables.markdown_text(column.conditions)}\n"
    )


class Costs(NamedTuple):
    """The time of a training step of each cell as text, and a sentence about the measurement."""

    texts: dict[str, str]
    conditions: str


def _costs(path: Path, baseline: str) -> Costs:
    """Read the file of `ghostnoise bench recipe`."""
    try:
        records = json.loads(path.read_bytes())["records"]
        texts = {
            each["contender"]: NOTHING if each["contender"] == baseline else
            f"{each['ratio_paired']:.2f} [{each['ratio_low']:.2f}, {each['ratio_high']:.2f}]"
            for each in records
        }  # fmt: skip
        first = records[0]
        conditions = (
            f"Training steps: medians of the ratios in n = {first['n']} interleaved rounds, {first['clock']}, "
            f"{first['device_name']}, {counted(first['threads'], 'thread')}, torch {first['torch']}, {first['date']}."
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a file that `ghostnoise bench recipe` wrote") from None
    return Costs(texts, conditions)


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
    hours = sum(float((run.result or {}).get("seconds", 0)) for run in ended) / 3600
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


def costs(all_records: Iterable[Records]) -> str:
    """Return what it costs to run each recipe again, in Markdown: its runs, their times, and where they ran."""
    rows = []
    for each in all_records:
        ended = list(each.runs.values())
        seconds = [float((run.result or {}).get("seconds") or 0) for run in ended]
        where = Counter(
            f"{run.environment.get('device_name', '')}, {counted(run.environment.get('threads', 1), 'thread')}"
            for run in ended
        )
        rows.append([
            each.recipe, str(len(ended)), tables.duration_text(statistics.median(seconds)),
            tables.duration_text(sum(seconds)), "; ".join(f"{name} ({n})" for name, n in where.most_common()),
        ])  # fmt: skip
    return tables.markdown_table(["recipe", "runs", "time of a run, median", "all runs", "measured on (runs)"], rows)


def value(findings: Findings, field: str, name: str) -> str:
    """Return a number about a cell or a claim as text."""
    claim = next((each for each in findings.claims if each.text == name), None)
    if claim is not None:
        return _of_claim(claim, field)
    row = _row(findings, name, f"value {field}")
    score = row.score
    texts: dict[str, Callable[[], str]] = {
        "accuracy": lambda: tables.mean_text(score),
        "mean": lambda: NOTHING if score is None or score.mean is None else f"{score.mean:.2f}",
        "n": lambda: str(score.n if score else 0),
        "interval": lambda: tables.mean_interval_text(score),
        "difference": lambda: tables.difference_text(row.difference),
        "p": lambda: tables.holm_text(row.difference),
        "seconds": lambda: tables.duration_text(score.seconds if score else None),
    }
    if field not in texts:
        raise UserError(f"value {field}: no such field; use one of {', '.join(FIELDS)}")
    return texts[field]()


def result(findings: Findings, name: str, link: str) -> str:
    """Return a sentence with the result of a cell: accuracy, interval, and the difference to the baseline."""
    row = _row(findings, name, "result")
    if row.score is None or not row.score.n:
        raise UserError(f"result {name!r}: has no finished runs; remove the block, or add records")
    interval = tables.mean_interval_text(row.score)
    text = f"{tables.split(findings)} {tables.mean_text(row.score)} % (n = {row.score.n}, 95 % interval {interval})"
    if row.difference is not None:
        text += f", difference to {findings.baseline} {tables.difference_text(row.difference)} points"
        if row.difference.corrected is not None:
            text += f", p (Holm) {tables.holm_text(row.difference)}"
    recipe = findings.collected.experiment.recipe.name
    return f"{tables.markdown_text(row.name)} in [{recipe}]({link}): {tables.markdown_text(text)}."


def _row(findings: Findings, name: str, kind: str) -> ResultRow:
    """Return the cell with this name; raises a UserError if it is not exactly one."""
    rows = [row for row in findings.rows if name in (row.method, row.name)]
    if len(rows) != 1:
        known = ", ".join([*(row.name for row in findings.rows), *(each.text for each in findings.claims)])
        raise UserError(f"{kind} {name!r}: must be one cell or claim of {known}; give its full name")
    return rows[0]


def gap_table(findings: Findings) -> str:
    """Return how far the outputs of all cells in training differ from those at inference, in Markdown.

    Columns of what was not measured are left out. Intervals are not corrected; the tests are among the claims.
    """
    base = next((row for row in findings.rows if row.method == findings.baseline), None)
    headings, rows = ["method", "n"], [[row.name, str(len(_percents(row, "relative")))] for row in findings.rows]
    for kind, measure in list(KINDS.items())[:2]:
        headings += [f"{kind}, % ± std", f"difference to {findings.baseline} [95 % interval]"]
        theirs = _percents(base, measure) if base else {}
        for line, row in zip(rows, findings.rows, strict=True):
            ours = _percents(row, measure)
            difference = None if row is base else paired(ours, theirs)
            line += [tables.percent_text(list(ours.values())), _paired_text(difference)]
    headings += ["random, % ± std", "largest output, training / inference"]
    for line, row in zip(rows, findings.rows, strict=True):
        ratios = list(_own(row, "range_ratio").values())
        random = tables.percent_text(list(_percents(row, "random").values()))
        line += [random, f"{statistics.fmean(ratios):.2f}" if ratios else NOTHING]
    return tables.markdown_table(*tables.without_empty(headings, rows))


def _paired_text(found: Paired | None) -> str:
    if found is None:
        return NOTHING
    interval = found.interval()
    return f"{found.mean:+.2f}{f' {tables.interval_text(interval)}' if interval else ''}"


def _percents(row: ResultRow, measure: str) -> dict[Hashable, float]:
    return {seed: 100 * value for seed, value in _own(row, measure).items()}


def _own(row: ResultRow, measure: str) -> dict[Hashable, float]:
    """Return a measure of a cell's own method by seed, after the last epoch: the mean of the layers that have it."""
    return of_network(row.score, own(row.score, measure)) if row.score else {}


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
    if field == "n":
        return str(claim.paired.n if claim.paired else 0)
    if field == "verdict":
        return claim.verdict
    return (
        effect_text(claim) if field == "difference" else tables.p_text(claim.corrected.p if claim.corrected else None)
    )


def effect_text(claim: Claim) -> str:
    """Format what a claim compares with its corrected interval, or why it has none."""
    if claim.paired is None:
        return NOTHING
    if claim.ratio is not None:
        return f"ratio {tables.ratio_text(claim.ratio)}"
    digits = tables.digits(claim.unit)
    why = "(n = 1)" if claim.paired.n == 1 else "(no spread)"
    shown = tables.interval_text(claim.interval, digits) if claim.interval else why
    return f"{claim.paired.mean:+.{digits}f} {shown}"


def _distinct(runs: Sequence[Run], name: str) -> list[str]:
    return sorted({str(run.environment[name]) for run in runs if run.environment.get(name) not in (None, "")})


def _days(run: Run) -> list[str]:
    return [str(found)[:10] for found in (run.environment.get("started"), (run.result or {}).get("ended")) if found]

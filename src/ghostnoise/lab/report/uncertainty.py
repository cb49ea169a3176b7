"""The figures of `ghostnoise uncertainty` as a table, and the claims that were stated before they were measured."""

import csv
import statistics
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import tables
from ghostnoise.lab.report.statistics import ALPHA, holm, paired

Key = tuple[str, str]
Row = dict[str, str]

GHOST_NOISE = "ghost noise"
BASELINES = ("deterministic", "MC dropout", "MC batch norm")


class Measured(NamedTuple):
    """The rows of a kind of inference of a method, by seed."""

    key: Key
    rows: dict[Hashable, Row]

    def values(self, column: str) -> dict[Hashable, float]:
        """Return a figure by seed."""
        return {seed: float(row[column]) for seed, row in self.rows.items()}

    def auroc(self) -> dict[Hashable, float]:
        """Return the mean AUROC over the shifts, by seed."""
        return {
            seed: statistics.fmean(float(value) for name, value in row.items() if name.startswith("auroc "))
            for seed, row in self.rows.items()
        }


def read(path: Path) -> list[Measured]:
    """Read the file that `ghostnoise uncertainty` writes."""
    try:
        found: dict[Key, dict[Hashable, Row]] = {}
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            found.setdefault((row["method"], row["inference"]), {})[int(row["seed"])] = row
        if not found:
            raise ValueError("it has no rows")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: cannot be read as a file of `ghostnoise uncertainty` ({error}); give another"
        ) from None
    return [Measured(key, rows) for key, rows in found.items()]


def render(path: Path) -> str:
    """Return the table, the claims and a line about the measurement."""
    measured = read(path)
    return "\n\n".join((table(measured), claims(measured), about(measured)))


def table(measured: list[Measured]) -> str:
    """Return the mean ± standard deviation over seeds of all figures."""
    first = next(iter(measured[0].rows.values()))
    shifts = [name for name in first if name.startswith("auroc ")]
    headings = ["trained with", "inference", "n", "accuracy, %", "NLL", "ECE, %"]
    headings += [f"AUROC {name.removeprefix('auroc ')}, %" for name in shifts]
    rows = []
    for each in measured:
        figures = [list(each.values(name).values()) for name in ("accuracy", "nll", "ece", *shifts)]
        digits = [2, 3, 2, *(2 for _ in shifts)]
        cells = [_text(values, places) for values, places in zip(figures, digits, strict=True)]
        rows.append([*each.key, str(len(each.rows)), *cells])
    return tables.markdown_table(headings, rows).rstrip("\n")


def claims(measured: list[Measured]) -> str:
    """Return the verdict of each claim: paired t-tests over seeds, Holm-corrected over all of them."""
    ours = next((each for each in measured if each.key[1] == GHOST_NOISE), None)
    if ours is None:
        return "No claim: no network was run with ghost noise."
    compared = []
    for baseline in BASELINES:
        same = baseline == "deterministic"
        theirs = next((e for e in measured if e.key[1] == baseline and (not same or e.key[0] == ours.key[0])), None)
        if theirs is not None:
            name = f"{ours.key[0]} with sampling against {theirs.key[0]}, {baseline}"
            better = paired(theirs.values("ece"), ours.values("ece"))  # a smaller error is better
            compared.append((f"lower ECE: {name}", "ECE", -1, better))
            compared.append((f"higher mean AUROC: {name}", "AUROC", 1, paired(ours.auroc(), theirs.auroc())))
    corrected = holm([each[3].p if each[3] else None for each in compared])
    lines = []
    for (name, unit, sign, found), p in zip(compared, corrected, strict=True):
        if found is None or p is None:
            lines.append(f"- {name}: inconclusive.")
            continue
        verdict = "inconclusive" if p.p >= ALPHA else "supported" if found.mean > 0 else "refuted"
        interval = found.interval()
        assert interval is not None
        ends = sorted(sign * end for end in interval)
        lines.append(
            f"- {name}: {verdict}. {sign * found.mean:+.2f} points of {unit} over {found.n} common seeds, 95 % "
            f"interval {tables.interval_text(ends)}, p (Holm) {_p(p.p)}."
        )
    return "\n".join(map(tables.markdown_text, lines))


def about(measured: list[Measured]) -> str:
    """Return how the figures were measured."""
    rows = [row for each in measured for row in each.rows.values()]

    def distinct(column: str) -> str:
        return ", ".join(sorted({row[column] for row in rows}))

    samples, keep = (max(int(row[column]) for row in rows) for column in ("samples", "keep"))
    threads = distinct("threads")
    return (
        f"{distinct('test')} test inputs and {distinct('shifted')} of each shift; {samples} samples; "
        f"{keep} kept samples; networks of {distinct('recipe')}; {distinct('device')}, "
        f"{threads} {'thread' if threads == '1' else 'threads'}; torch {distinct('torch')}; {distinct('date')}; commit "
        f"{', '.join(sorted({row['commit'][:10] for row in rows}))}."
    )


def _text(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _p(p: float) -> str:
    text = tables.p_text(p)
    return text if text.startswith("<") else f"= {text}"

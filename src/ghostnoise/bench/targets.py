"""Targets of the benchmarks, compared with what was measured: a table in Markdown."""

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ghostnoise.bench.markdown import read
from ghostnoise.bench.settings import Record
from ghostnoise.bench.tables import geometric_mean, name, number
from ghostnoise.lab.errors import UserError

ALLOCATOR = "default"
STATISTICS: dict[str, Callable[[list[float]], float]] = {"mean": geometric_mean, "worst": max}


def targets(path: Path) -> str:
    """Return the table of a TOML file with a list of `target`.

    Each has a `text`, the ratio that it `must` not exceed, the one to `aim` for (if any), and the `file` of a benchmark
    beside the TOML file. Measured is a `value` of a `contender` with the default allocator, by default the ratio of its
    median to the baseline of the row, or that to the contender `over`; in `rows` or else in all rows that have both:
    the geometric "mean", or the "worst". Targets that are missed are in bold.
    """
    try:
        listed: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
        records = {file: read(path.parent / file) for file in {each["file"] for each in listed}}
        lines = [_line(each, records[each["file"]]) for each in listed]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); see docs/guides/reports.md for its form") from None
    heading = ["quantity", "must", "aim", "measured"]
    return "".join(f"| {' | '.join(line)} |\n" for line in [heading, ["---"] * len(heading), *lines])


def _line(target: dict[str, Any], records: list[Record]) -> list[str]:
    records = [each for each in records if each["allocator"] == ALLOCATOR]
    contender, over = target["contender"], target.get("over")
    value, rows = target.get("value", "ratio_p50"), target.get("rows") or _rows(records, contender, over)
    ratios = [_ratio(records, row, contender, over, value) for row in rows]
    measured = STATISTICS[target.get("statistic", "worst")](ratios)
    text = number(measured) if measured <= target["must"] else f"**{number(measured)}**"
    return [target["text"], number(target["must"]), number(target.get("aim", math.nan)), text]


def _rows(records: list[Record], *contenders: str | None) -> list[str]:
    """Return the rows that have all of these contenders."""
    found = [{each["row"] for each in records if name(each) == one} for one in contenders if one is not None]
    if not (common := set.intersection(*found)):
        raise ValueError(f"no row has {' and '.join(filter(None, contenders))}")
    return sorted(common)


def _ratio(records: list[Record], row: str, contender: str, over: str | None, value: str) -> float:
    of_row = {name(each): each for each in records if each["row"] == row}
    if not of_row:
        raise ValueError(f"no row {row}; there are {', '.join(dict.fromkeys(each['row'] for each in records))}")
    missing = [each for each in (contender, over) if each is not None and each not in of_row]
    if missing:
        raise ValueError(f"{row} has no {' and no '.join(missing)}; it has {', '.join(of_row)}")
    if over is None:
        return float(of_row[contender][value])
    return float(of_row[contender]["p50_ms"]) / float(of_row[over]["p50_ms"])

"""Tables of records in Markdown, from the JSON file that `ghostnoise bench` writes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ghostnoise.bench.settings import Record
from ghostnoise.bench.tables import name, number, summary
from ghostnoise.lab.errors import UserError

VALUES = (
    "ratio_p50",
    "ratio_best",
    "p50_ms",
    "images_per_second",
    "speed_ratio",
    "over_limit",
    "ratio_kept",
    "ratio_peak",
)


def read(path: Path) -> list[Record]:
    """Read the records of a JSON file; raises a UserError if it has none."""
    try:
        found = json.loads(path.read_bytes())["records"]
        records: list[Record] = [
            each for each in found if {"row", "contender", "backend", "kind", "bench", "allocator"} <= each.keys()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a file that `ghostnoise bench` wrote") from None
    if not records:
        raise UserError(f"{path}: has no records; give a file that `ghostnoise bench` wrote")
    return records


def markdown(path: Path, value: str | None = None, backend: str | None = None) -> str:
    """Return the table of a file, and the conditions of the measurement.

    Without `value`, it is the summary of `bench layers`: a line for each contender. With it, the table has a line for
    each row of the bench and a column for each contender. Numbers of the two allocator modes are separated by a slash.
    `backend` selects the contenders of one backend of this library.
    """
    records = [each for each in read(path) if backend is None or each["backend"] in (backend, "")]
    allocators = list(dict.fromkeys(each["allocator"] for each in records))
    parts = [[each for each in records if each["allocator"] == allocator] for allocator in allocators]
    try:
        tables = [summary(part) if value is None else _matrix(part, value) for part in parts]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its records have no {error}; measure again, or choose another --value") from None
    headings, rows = tables[0]
    joined: list[list[str]] = []
    for first, cells in rows.items():
        columns = [
            [number(table[1][first][at]) if first in table[1] else "" for table in tables] for at in range(len(cells))
        ]
        joined.append([first, *(" / ".join(column) if any(column) else "" for column in columns)])
    title = f"{' / '.join(allocators)} allocator"
    lines = [[title, *(heading.replace("\n", " ") for heading in headings)], ["---"] * (len(headings) + 1), *joined]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n" + _conditions(records) + "\n"


def _matrix(records: Sequence[Record], value: str) -> tuple[list[str], dict[str, list[float]]]:
    if value not in VALUES:
        raise UserError(f"--value {value}: must be one of {', '.join(VALUES)}")
    contenders = list(dict.fromkeys(map(name, records)))
    rows: dict[str, list[float]] = {
        row: [math.nan] * len(contenders) for row in dict.fromkeys(r["row"] for r in records)
    }
    for record in records:
        if value in record:
            rows[record["row"]][contenders.index(name(record))] = float(record[value])
    return contenders, rows


def _conditions(records: Sequence[Record]) -> str:
    def distinct(key: str) -> str:
        return " and ".join(sorted({str(record[key]) for record in records if key in record}))

    counts = sorted({int(record["n"]) for record in records if "n" in record})
    rounds = f", n = {counts[0]}" + (f" to {counts[-1]}" if counts[-1] > counts[0] else "") if counts else ""
    return (
        f"{distinct('device_name')}, {distinct('threads')} threads, torch {distinct('torch')}, ghostnoise "
        f"{distinct('ghostnoise')}, {distinct('date')}{rounds}."
    )

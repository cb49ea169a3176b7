"""Tables of records in Markdown, from the JSON file that `ghostnoise bench` writes."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ghostnoise.bench.settings import Record
from ghostnoise.bench.tables import PART, STEP, memory_summary, name, number, part_text, parts, summary
from ghostnoise.lab.errors import UserError

Numbers = Callable[[list[Record]], tuple[list[str], dict[str, list[float]]]]
Texts = dict[str, list[str]]
PROFILE_FIELDS = ("scope", "level", "part", "p50_ms", "ratio_p50")
PROFILE = (  # with the functions of the C++ library and the networks of earlier records
    ("layer", (STEP, PART), "Microseconds of forward + backward and of its parts, with the ratio to `nn.BatchNorm*d`"),
    (
        "layer",
        ("function",),
        "Microseconds and ratios of the C++ functions as separate calls, which take longer than inside of the fused "
        "calls",
    ),
    (
        "network",
        (STEP, PART),
        "Milliseconds of a training step and of its parts, with the ratio to the first step of a row",
    ),
)
VALUES = (
    "ratio_p50",
    "ratio_best",
    "p50_ms",
    "images_per_second",
    "speed_ratio",
    "over_limit",
    "over_eager",
    "added_ratio",
    "ratio_kept",
    "ratio_peak",
)


def read(path: Path) -> list[Record]:
    """Read the records of a JSON file; raises a UserError if it has none."""
    try:
        found = json.loads(path.read_bytes())["records"]
        records: list[Record] = [
            each for each in found if {"row", "contender", "kind", "bench", "allocator"} <= each.keys()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a file that `ghostnoise bench` wrote") from None
    if not records:
        raise UserError(f"{path}: has no records; give a file that `ghostnoise bench` wrote")
    return records


def markdown(
    path: Path,
    value: str | None = None,
    backend: str | None = None,
    only: Sequence[str] = (),
    contenders: Sequence[str] = (),
) -> str:
    """Return the table of a file, and the conditions of the measurement.

    Without `value`, it is the summary of `bench layers` or `bench memory`: a line for each contender. With it, the
    table has a line for each row of the bench and a column for each contender. Numbers of the two allocator modes are
    separated by a slash. `contenders` selects by the names in the table, `backend` those of one backend in earlier
    records, and `only` the rows whose names contain one of these texts.
    """
    records = [
        each
        for each in read(path)
        if (backend is None or each.get("backend", "") in (backend, ""))
        and (not only or any(text in each["row"] for text in only))
    ]
    if not records:
        raise UserError(f"{path}: has no records of these rows and this backend; check --only and --backend")
    names = dict.fromkeys(map(name, records))
    if unknown := [each for each in contenders if each not in names]:
        raise UserError(f"--contender {unknown[0]}: {path} has none of this name; must be one of {', '.join(names)}")
    records = [each for each in records if not contenders or name(each) in contenders]
    summaries: dict[str, Numbers] = {"memory": memory_summary}
    numbers = partial(_matrix, value=value) if value else summaries.get(records[0]["bench"], summary)

    def texts(part: list[Record]) -> tuple[list[str], dict[str, list[str]]]:
        headings, rows = numbers(part)
        return headings, {first: list(map(number, cells)) for first, cells in rows.items()}

    return _table(path, records, texts) + "\n" + _conditions(records) + "\n"


def single(path: Path, value: str | None, only: Sequence[str], contenders: Sequence[str]) -> str:
    """Return one number of a file with two decimals: the one that `value`, `only` and `contenders` select."""
    found = [
        float(each[value or "ratio_p50"])
        for each in read(path)
        if name(each) in contenders and any(text in each["row"] for text in only)
    ]
    if len(found) != 1:
        raise UserError(f"{path}: --number selects {len(found)} numbers; give --only and --contender of a single one")
    return number(found[0])


def profile(path: Path) -> str:
    """Return the tables of a file of `bench profile`."""
    records = read(path)
    missing = sorted(field for field in PROFILE_FIELDS if any(field not in each for each in records))
    if missing:
        raise UserError(f"{path}: its records have no {missing[0]}; give a file that `ghostnoise bench profile` wrote")
    tables = []
    for scope, levels, caption in PROFILE:
        chosen = [each for each in records if each["scope"] == scope and each["level"] in levels]
        if chosen:
            tables += [f"{caption}:\n\n", _table(path, chosen, _parts), "\n"]
    return "".join(tables) + _conditions(records) + "\n"


def _table(path: Path, records: list[Record], texts: Callable[[list[Record]], tuple[list[str], Texts]]) -> str:
    """Return a table of the headings and lines that `texts` makes of the records of each allocator mode."""
    allocators = list(dict.fromkeys(each["allocator"] for each in records))
    try:
        tables = [texts([each for each in records if each["allocator"] == allocator]) for allocator in allocators]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its records have no {error}; measure again, or choose another --value") from None
    headings, rows = tables[0]
    joined: list[list[str]] = []
    for first, cells in rows.items():
        columns = [[table[1][first][at] if first in table[1] else "" for table in tables] for at in range(len(cells))]
        joined.append([first, *(" / ".join(column) if any(column) else "" for column in columns)])
    title = f"{' / '.join(allocators)} allocator"
    lines = [[title, *(heading.replace("\n", " ") for heading in headings)], ["---"] * (len(headings) + 1), *joined]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _parts(records: list[Record]) -> tuple[list[str], Texts]:
    """Return a line for each contender of each row, with the time of each part and, in parentheses, its ratio."""
    headings = parts(records)
    rows: Texts = {}
    for each in records:
        cells = rows.setdefault(f"{each['row']}, {each['contender']}", [""] * len(headings))
        cells[headings.index(each["part"])] = part_text(each)
    return headings, rows


def _matrix(records: Sequence[Record], value: str) -> tuple[list[str], dict[str, list[float]]]:
    if value not in VALUES:
        raise UserError(f"--value {value}: must be one of {', '.join(VALUES)}")
    records = [record for record in records if value in record]
    if not records:
        raise ValueError(value)
    contenders = list(dict.fromkeys(map(name, records)))
    rows: dict[str, list[float]] = {
        row: [math.nan] * len(contenders) for row in dict.fromkeys(r["row"] for r in records)
    }
    for record in records:
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

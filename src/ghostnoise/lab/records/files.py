"""Files of records: a header line, then a line for each run; written by an export that keeps what is in the file."""

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.limits import checked_name, read_bytes
from ghostnoise.lab.records import record
from ghostnoise.lab.records.folders import from_folder
from ghostnoise.lab.records.record import RunRecord
from ghostnoise.lab.store import atomic, scan
from ghostnoise.lab.store.contents import parse_json
from ghostnoise.text import counted

FORMAT, VERSION = "ghostnoise records", 1
MOST_BYTES, LONGEST_LINE = 2**28, 2**24
MOST_REPORTED = 20  # bad lines of a file


@dataclass(frozen=True)
class Records:
    """The records of an experiment, by identity."""

    recipe: str
    runs: dict[str, RunRecord]


@dataclass(frozen=True)
class Exported:
    """The outcome of an export: the number of records in the file, and how many of them are new."""

    path: Path
    total: int
    added: int


def read(path: Path) -> Records:
    """Read a file of records; raises a UserError that names every bad line and the reason."""
    try:
        content = read_bytes(path, MOST_BYTES, follow=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); give a file that `ghostnoise runs export` wrote") from None
    return _parse(io.BytesIO(content), path)


def write(path: Path, records: Records) -> None:
    """Write a file of records in a fixed order, so that the same records give the same bytes."""
    header = json.dumps({"format": FORMAT, "version": VERSION, "recipe": records.recipe}, separators=(",", ":"))
    lines = [header, *(each.line() for each in sorted(records.runs.values(), key=lambda each: each.order))]
    atomic.make_folder(path.parent, "--out")
    atomic.write(path, "".join(f"{line}\n" for line in lines).encode(), "--out")


def export(folder: Path, path: Path, warn: Callable[[str], object]) -> Exported:
    """Add the ended runs in `folder` (`runs/<recipe>`) to a file of records; records in it are kept.

    Runs that cannot be exported are skipped with a warning. A record is replaced only by one with a higher numerics
    number; another result with the same number is an error.
    """
    try:
        recipe = checked_name(folder.name)
    except ValueError as error:
        raise UserError(f"{error}; rename its folder") from None
    known = read(path) if os.path.lexists(path) else Records(recipe, {})
    if known.recipe != recipe:
        raise UserError(f"{path}: has the records of {known.recipe}, not of {recipe}; give another file with --out")
    merged = dict(known.runs)
    for found in scan.scan(folder, warn).values():
        if found.status not in ("finished", "diverged"):
            continue
        try:
            made = from_folder(found)
        except ValueError as error:
            warn(f"{found.path} is not exported: {error}")
            continue
        if (before := merged.get(made.identity)) is None or _replaces(made, before, path, warn):
            merged[made.identity] = made
    if merged != known.runs or not known.runs:
        write(path, Records(recipe, merged))
    return Exported(path, len(merged), len(merged) - len(known.runs))


def _replaces(made: RunRecord, before: RunRecord, path: Path, warn: Callable[[str], object]) -> bool:
    """Decide between two records of the same run; raises a UserError if there is no reason to prefer one."""
    ours, theirs = made.environment.numerics, before.environment.numerics
    if made.agrees(before) or ours < theirs:
        return False
    if ours == theirs:
        raise UserError(
            f"{path}: has another record of run {made.identity}, and a run has one result per numerics number; remove "
            "that line or the run, or export to another file with --out"
        )
    warn(f"run {made.identity}: its record with numerics {theirs} is replaced by one with numerics {ours}")
    return True


def _parse(file: BinaryIO, path: Path) -> Records:
    bad: list[str] = []
    runs: dict[str, RunRecord] = {}
    recipe = _header(file.readline(LONGEST_LINE + 1), path)
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=2):
        if len(line) > LONGEST_LINE:
            bad.append(f"{path}, line {number}: more than {LONGEST_LINE:,} bytes; the rest of the file was not read")
            break
        try:
            made = record.parse(line)
            if made.identity in runs:
                raise ValueError(f"run {made.identity} has a record already")
        except ValueError as error:
            bad.append(f"{path}, line {number}: {error}")
        else:
            runs[made.identity] = made
    if bad:
        more = [f"and {counted(len(bad) - MOST_REPORTED, 'more bad line')}"] if len(bad) > MOST_REPORTED else []
        raise UserError("\n".join([*bad[:MOST_REPORTED], *more, "nothing was changed; correct or remove these lines"]))
    return Records(recipe, runs)


def _header(line: bytes, path: Path) -> str:
    try:
        header = parse_json(line)
        if header.get("format") != FORMAT:
            raise ValueError(f'must have "format":"{FORMAT}"')
    except ValueError as error:
        raise UserError(
            f"{path}, line 1: not the header of a file of records ({error}); give a file that `ghostnoise runs export` "
            "wrote"
        ) from None
    if header.get("version") != VERSION or isinstance(header["version"], bool):
        raise UserError(
            f"{path}, line 1: version {ascii(header.get('version'))[:40]} of the format: this version of ghostnoise "
            f"reads version {VERSION}; install the version that wrote the file"
        )
    if unknown := sorted(set(header) - {"format", "version", "recipe"}):
        raise UserError(f"{path}, line 1: {ascii(unknown[0])[:80]}: unknown; remove it from the header")
    try:
        return checked_name(header.get("recipe"))
    except ValueError as error:
        raise UserError(f"{path}, line 1: {error}; correct the header") from None

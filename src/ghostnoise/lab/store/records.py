"""Files of records: a header line, then the record of each run; and run folders that are made from them."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.garbage import uncollected
from ghostnoise.lab.limits import checked_name, read_bytes
from ghostnoise.lab.run import ENDED, IMPORTED, Run
from ghostnoise.lab.store import atomic, record, scan
from ghostnoise.lab.store.folder import RUN, read, whole
from ghostnoise.text import counted

FORMAT, VERSION, READ = "ghostnoise records", 2, (1, 2)
MAX_BYTES, MAX_LINE = 2**31, 2**24
MAX_REPORTED = 20  # bad lines of a file
TEMPORARY = ".import-"


@dataclass(frozen=True)
class Records:
    """The runs of a recipe that a file has records of, by identity."""

    recipe: str
    runs: dict[str, Run]


@dataclass(frozen=True)
class Exported:
    """The outcome of an export: the number of records in the file, and how many of them are new."""

    path: Path
    total: int
    added: int


@uncollected()
def load(path: Path) -> Records:
    """Read a file of records; raises a UserError that names every bad line and the reason."""
    try:
        content = read_bytes(path, MAX_BYTES, follow=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); give a file that `ghostnoise runs export` wrote") from None
    return _parse(io.BytesIO(content), path)


def export(folder: Path, path: Path, warn: Callable[[str], object]) -> Exported:
    """Add the runs in `folder` (`runs/<recipe>`) that have ended to a file of records; records in it are kept.

    Runs that cannot be exported are skipped with a warning; it is an error if all of them are. A record is replaced
    only by one with a higher numerics number; another result with the same number is an error.
    """
    try:
        recipe = checked_name(folder.name)
    except ValueError as error:
        raise UserError(f"{error}; rename its folder") from None
    known = load(path) if os.path.lexists(path) else Records(recipe, {})
    if known.recipe != recipe:
        raise UserError(f"{path}: has the records of {known.recipe}, not of {recipe}; give another file with --out")
    merged, refused = dict(known.runs), 0
    for found in scan.scan(folder, warn).values():
        if found.status not in ENDED:
            refused += found.status == "damaged"
            continue
        try:
            assert found.folder is not None
            made = whole(read(found.folder))
        except (OSError, ValueError) as error:
            warn(f"{found.folder} is not exported: {error}")
            refused += 1
            continue
        if (before := merged.get(made.identity)) is None or _replaces(made, before, path, warn):
            merged[made.identity] = made
    if not merged:
        why = f"{counted(refused, 'run')} cannot be exported" if refused else "no run has ended"
        raise UserError(f"{folder}: {why}, so nothing was written to {path}; `ghostnoise runs {recipe}` lists the runs")
    if merged != known.runs:
        _write(path, recipe, merged.values())
    return Exported(path, len(merged), len(merged) - len(known.runs))


def import_records(given: Iterable[tuple[Path, Records]], runs: Path) -> tuple[int, int]:
    """Write the records of files as run folders.

    Returns how many are new, and how many were there. Nothing is written if any of them disagrees with a folder or with
    a record of another file. Folders are not changed.
    """
    wanted: dict[Path, tuple[Run, Path]] = {}
    conflicts: list[str] = []
    there = 0
    for source, found in given:
        for identity, run in found.runs.items():
            path = runs / found.recipe / identity
            if path in wanted and not record.agree(wanted[path][0], run):
                conflicts.append(f"{source}: run {identity} differs from that in {wanted[path][1]}; import one of them")
            elif os.path.lexists(path):
                there += 1
                conflicts += [f"{source}: {reason}" for reason in _conflict(path, run)]
            elif path not in wanted:
                wanted[path] = run, source
    if conflicts:
        last = f"nothing was imported because of {counted(len(conflicts), 'conflict')}"
        raise UserError("\n".join([*conflicts[:MAX_REPORTED], last]))
    for folder in dict.fromkeys(path.parent for path in wanted):
        atomic.make_folder(folder)
        with FileLock(folder / ".import.lock"):
            for left in folder.glob(f"{TEMPORARY}*"):  # by an import that was killed
                shutil.rmtree(left, ignore_errors=True)
            for path, (run, source) in wanted.items():
                if path.parent == folder:
                    _make_folder(path, run, source)
            atomic.sync_folder(folder)
    return len(wanted), there


def _replaces(made: Run, before: Run, path: Path, warn: Callable[[str], object]) -> bool:
    """Decide between two records of the same run; raises a UserError if there is no reason to prefer one."""
    ours, theirs = made.numerics.number, before.numerics.number
    if record.agree(made, before) or ours < theirs:
        return False
    if ours == theirs:
        raise UserError(
            f"{path}: has another record of run {made.identity}, and a run has one result per numerics number; remove "
            "that line or the run, or export to another file with --out"
        )
    warn(f"run {made.identity}: its record with numerics {theirs} is replaced by one with numerics {ours}")
    return True


def _write(path: Path, recipe: str, runs: Iterable[Run]) -> None:
    """Write a file of records in a fixed order, so that the same records give the same bytes."""
    header = json.dumps({"format": FORMAT, "version": VERSION, "recipe": recipe}, separators=(",", ":"))
    lines = [header, *(record.line(run) for run in sorted(runs, key=record.order))]
    for number, line in enumerate(lines, start=1):
        if len(line) >= MAX_LINE:
            raise UserError(f"{path}, line {number}: would have more than {MAX_LINE:,} bytes, which cannot be read")
    content = "".join(f"{line}\n" for line in lines).encode()
    if len(content) > MAX_BYTES:
        raise UserError(
            f"{path}: would have {len(content):,} bytes, and a file of records has at most {MAX_BYTES:,}; export to "
            "several files"
        )
    atomic.make_folder(path.parent, "--out")
    atomic.write(path, content, "--out")


def _parse(file: BinaryIO, path: Path) -> Records:
    bad: list[str] = []
    runs: dict[str, Run] = {}
    recipe = _header(file.readline(MAX_LINE + 1), path)
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=2):
        if len(line) > MAX_LINE:
            bad.append(f"{path}, line {number}: more than {MAX_LINE:,} bytes; the rest of the file was not read")
            break
        try:
            run = record.parse(line, recipe)
            if run.identity in runs:
                raise ValueError(f"run {run.identity} has a record already")
        except ValueError as error:
            bad.append(f"{path}, line {number}: {error}")
        else:
            runs[run.identity] = run
    if bad:
        more = [f"and {counted(len(bad) - MAX_REPORTED, 'more bad line')}"] if len(bad) > MAX_REPORTED else []
        raise UserError("\n".join([*bad[:MAX_REPORTED], *more, "nothing was changed; correct or remove these lines"]))
    return Records(recipe, runs)


def _header(line: bytes, path: Path) -> str:
    try:
        header = record.loads(line)
        if header.get("format") != FORMAT:
            raise ValueError(f'must have "format":"{FORMAT}"')
    except ValueError as error:
        raise UserError(
            f"{path}, line 1: not the header of a file of records ({error}); give a file that `ghostnoise runs export` "
            "wrote"
        ) from None
    if header.get("version") not in READ or isinstance(header["version"], bool):
        raise UserError(
            f"{path}, line 1: version {ascii(header.get('version'))[:40]} of the format: this version of ghostnoise "
            f"reads versions {' and '.join(map(str, READ))}; install the version that wrote the file"
        )
    if unknown := sorted(set(header) - {"format", "version", "recipe"}):
        raise UserError(f"{path}, line 1: {ascii(unknown[0])[:80]}: unknown; remove it from the header")
    try:
        return checked_name(header.get("recipe"))
    except ValueError as error:
        raise UserError(f"{path}, line 1: {error}; correct the header") from None


def _conflict(path: Path, run: Run) -> list[str]:
    """Return why a record cannot be imported although its folder exists; empty if the folder has the same record."""
    found = scan.look(path, lambda text: None)
    try:
        if found.status in ENDED:
            reason = "" if record.agree(whole(found), run) else "has another result"
        else:
            reason = f"is {found.status}"
    except (OSError, ValueError) as error:
        reason = f"is damaged ({error})"
    remedy = f"`ghostnoise runs remove {path}` removes it, and --runs chooses another folder"
    return [f"{path} exists and {reason}; {remedy}"] if reason else []


def _make_folder(path: Path, run: Run, source: Path) -> None:
    """Create a run folder under a temporary name, and rename it when it is complete and on the disk."""
    mark = {"from": str(source), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    atomic.make_folder(temporary)
    with atomic.writing(path):
        atomic.write(temporary / RUN, (record.line(run) + "\n").encode())
        atomic.write(temporary / IMPORTED, (json.dumps(mark, indent=2) + "\n").encode())
        temporary.rename(path)

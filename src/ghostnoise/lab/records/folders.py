"""Records and run folders: a record of a folder, folders of records, and records that are read like folders."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.records import record
from ghostnoise.lab.records.record import EVALUATED, TRAINED, NoiseAt, RunRecord
from ghostnoise.lab.store import atomic
from ghostnoise.lab.store.contents import HEADER
from ghostnoise.lab.store.folder import IMPORTED, MEASURED, NOISE, finite
from ghostnoise.lab.store.scan import Found, look
from ghostnoise.meter.reading import Reading
from ghostnoise.text import counted

TEMPORARY = ".import-"


@dataclass(frozen=True)
class RecordedRun(Found):
    """A run that is read from its record; its folder does not exist."""

    lines: tuple[dict[str, Any], ...] = ()
    noise: tuple[NoiseAt, ...] = ()

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each epoch."""
        return list(self.lines)


def recorded(runs: Mapping[str, RunRecord], recipe: str, folder: Path) -> dict[str, Found]:
    """Return records as `scan.scan` would return the runs in a folder."""
    found: dict[str, Found] = {}
    for identity, each in runs.items():
        files = _files(each, recipe)
        found[identity] = RecordedRun(
            folder / identity, each.result.status, files["settings.json"], files["result.json"],
            recorded_environment=files["environment.json"], lines=tuple(each.curve.lines()), noise=tuple(each.noise),
        )  # fmt: skip
    return found


def from_folder(found: Found) -> RunRecord:
    """Make the record of a run folder; raises a ValueError if its files are not those of a finished run."""
    settings = {name: value for name, value in found.settings.items() if name not in HEADER}
    result = {name: value for name, value in (found.result or {}).items() if name not in HEADER}
    tree = {
        "identity": found.identity,
        "settings": settings,
        "environment": found.environment(),
        "curve": _curve(found.metrics()),
        "result": result,
    }
    if noise := _noise(found.path):
        tree["noise"] = noise
    return record.parse(json.dumps(tree).encode())  # the same checks as for a file


def import_files(files: Iterable[tuple[Path, str, Mapping[str, RunRecord]]], runs: Path) -> tuple[int, int]:
    """Write the records of files (path, recipe, records) as run folders.

    Returns how many are new, and how many were there. Nothing is written if any of them disagrees with a folder or with
    a record of another file. Folders are not changed.
    """
    wanted: dict[Path, tuple[RunRecord, Path]] = {}
    conflicts: list[str] = []
    there = 0
    for source, recipe, records in files:
        for identity, each in records.items():
            path = runs / recipe / identity
            if path in wanted and not wanted[path][0].agrees(each):
                conflicts.append(f"{source}: run {identity} differs from that in {wanted[path][1]}; import one of them")
            elif os.path.lexists(path):
                there += 1
                conflicts += [f"{source}: {reason}" for reason in _conflict(path, each)]
            elif path not in wanted:
                wanted[path] = each, source
    if conflicts:
        last = f"nothing was imported because of {counted(len(conflicts), 'conflict')}"
        raise UserError("\n".join([*conflicts[:20], last]))
    for folder in dict.fromkeys(path.parent for path in wanted):
        atomic.make_folder(folder)
        with FileLock(folder / ".import.lock"):
            _remove_temporary(folder)
            for path, (each, source) in wanted.items():
                if path.parent == folder:
                    _make_folder(path, each, source)
            atomic.sync_folder(folder)
    return len(wanted), there


def _curve(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if not all(isinstance(line, dict) for line in lines) or [line.get("epoch") for line in lines] != list(
        range(1, len(lines) + 1)
    ):
        raise ValueError("metrics.jsonl: must have one line for each epoch, from 1")
    scored = [line for line in lines if any(line.get(name) is not None for name in EVALUATED)]
    return (
        {name: [line.get(name) for line in lines] for name in TRAINED}
        | {"evaluated": [line["epoch"] for line in scored]}
        | {name: [line.get(name) for line in scored] for name in EVALUATED}
    )


def _noise(folder: Path) -> list[Any]:
    """Return the measured noise of a run folder: of an imported run as it was imported, otherwise from its readings."""
    if (folder / MEASURED).exists():
        found = json.loads(read_bytes(folder / MEASURED))
        return found if isinstance(found, list) else [found]
    noise = []
    for path in sorted((folder / NOISE).glob("epoch-*.npz")):
        try:
            rows = Reading.load(path).rows()
            epoch = int(path.stem.removeprefix("epoch-"))
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{path.name} is damaged ({error})") from error
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [finite(row.get(name)) for row in rows] for name in names}
        noise.append({"epoch": epoch, "layers": columns})
    return noise


def _files(each: RunRecord, recipe: str) -> dict[str, dict[str, Any]]:
    header = {"recipe": recipe, "identity": each.identity}
    result = each.result.tree()
    return {
        "settings.json": header | each.settings.model_dump(exclude_none=True),
        "environment.json": each.environment.tree(),
        "result.json": {"status": result.pop("status")} | header | result,
    }


def _conflict(path: Path, each: RunRecord) -> list[str]:
    """Return why a record cannot be imported although its folder exists; empty if the folder has the same record."""
    found = look(path, lambda text: None)
    try:
        if found.status in ("finished", "diverged"):
            reason = "" if from_folder(found).agrees(each) else "has another result"
        else:
            reason = f"is {found.status}"
    except ValueError as error:
        reason = f"is damaged ({error})"
    remedy = f"`ghostnoise runs remove {path}` removes it, and --runs chooses another folder"
    return [f"{path} exists and {reason}; {remedy}"] if reason else []


def _make_folder(path: Path, each: RunRecord, source: Path) -> None:
    """Create a run folder under a temporary name, and rename it when it is complete and on the disk."""
    contents = {name: json.dumps(content, indent=2) + "\n" for name, content in _files(each, path.parent.name).items()}
    contents["metrics.jsonl"] = "".join(json.dumps(line) + "\n" for line in each.curve.lines())
    if each.noise:
        contents[MEASURED] = json.dumps([found.model_dump() for found in each.noise]) + "\n"
    mark = {"from": str(source), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    contents[IMPORTED] = json.dumps(mark, indent=2) + "\n"
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    atomic.make_folder(temporary)
    with atomic.writing(path):
        for name, text in contents.items():
            with open(temporary / name, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        atomic.sync_folder(temporary)
        temporary.rename(path)


def _remove_temporary(folder: Path) -> None:
    """Remove folders that a killed import left; the caller holds the lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)

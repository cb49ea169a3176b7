"""Read the run folders of a recipe without changing them."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ghostnoise.lab.store import folder

Status = Literal["finished", "diverged", "failed", "unfinished", "damaged", "outdated"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A run folder: the status of its run, and the files that were read."""

    path: Path
    status: Status
    settings: Record = field(default_factory=dict)
    result: Record | None = None
    failure: Record | None = None
    reason: str = ""
    """Why it is damaged or outdated."""

    @property
    def identity(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def failed_for(self) -> str:
        """The first line of the reason for a failure; empty if the run did not fail."""
        if self.status != "failed":
            return ""
        failure = self.failure or {}
        texts = [failure[name] for name in ("message", "error", "reason") if isinstance(failure.get(name), str)]
        texts += [value for value in failure.values() if isinstance(value, str)]
        lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        return lines[0] if lines else "no reason was recorded"

    @property
    def imported(self) -> bool:
        """Whether the run was imported from a file of records."""
        return (self.path / folder.IMPORTED).exists()

    def environment(self) -> Record:
        """The environment metadata; empty if they cannot be read."""
        return _json(self.path / "environment.json") or {}

    @property
    def numerics(self) -> int:
        """The numerics number that it was made with; 1 for runs that recorded none."""
        return folder.numerics(self.environment())

    def metrics(self) -> list[Record]:
        """The metrics of each epoch, up to the first line that cannot be read."""
        lines: list[Record] = []
        with suppress(OSError, ValueError):  # the last line may be incomplete while the run is being written
            lines.extend(map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines()))
        return lines


def scan(runs: Path, warn: Callable[[str], object], numerics: int | None = None) -> dict[str, Found]:
    """Read the folders in `runs`, which is `runs/<recipe>`, by identity. Damaged ones are included, with a warning.

    With `numerics`, runs that ended with another numerics number are "outdated" and have no result.
    """
    try:
        with os.scandir(runs) as entries:  # one system call per folder less than Path.is_dir
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {name: look(runs / name, warn, numerics) for name in names}


def look(path: Path, warn: Callable[[str], object], numerics: int | None = None) -> Found:
    """Read one run folder; see `scan`."""
    read: dict[str, Record | None] = {}
    for name in ("settings", "result", "failure"):
        if name == "failure" and read["result"] is not None:
            break  # the run was repeated and ended
        file = path / f"{name}.json"
        try:
            read[name] = _strict(file)
        except FileNotFoundError:
            read[name] = None
        except (OSError, ValueError) as error:
            return _damaged(
                path, f"{file} is damaged ({error}); the run is ignored and the folder is left unchanged", warn
            )
    settings, result, failure = read["settings"] or {}, read["result"], read.get("failure")
    status: Status = "unfinished" if failure is None else "failed"
    if result is not None:
        status = result.get("status", "damaged")
        if status not in ("finished", "diverged"):
            return _damaged(
                path, f"{path / 'result.json'} has no status; the run is ignored and the folder is left unchanged", warn
            )
    found = Found(path, status, settings, result, failure)
    if numerics is not None and result is not None and (made := found.numerics) != numerics:
        return Found(path, "outdated", settings, reason=f"made with numerics {made}, not {numerics}")
    return found


def _damaged(path: Path, reason: str, warn: Callable[[str], object]) -> Found:
    warn(reason)
    return Found(path, "damaged", reason=reason)


def _strict(file: Path) -> Record:
    record = json.loads(file.read_bytes())
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _json(file: Path) -> Record | None:
    try:
        return _strict(file)
    except (OSError, ValueError):
        return None

"""What the run folders of a recipe say, without changing anything in them."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["finished", "diverged", "failed", "unfinished", "damaged"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A run folder: how far its run is, and its files as they were read."""

    path: Path
    status: Status
    settings: Record = field(default_factory=dict)
    result: Record | None = None
    failure: Record | None = None
    reason: str = ""
    """Why it is damaged."""

    @property
    def identity(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def failed_for(self) -> str:
        """The first line of why it failed; empty if it did not."""
        if self.status != "failed":
            return ""
        failure = self.failure or {}
        texts = [failure[name] for name in ("message", "error", "reason") if isinstance(failure.get(name), str)]
        texts += [value for value in failure.values() if isinstance(value, str)]
        lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        return lines[0] if lines else "no reason was recorded"

    def environment(self) -> Record:
        """What it ran on, as far as that can be read."""
        return _json(self.path / "environment.json") or {}

    def metrics(self) -> list[Record]:
        """The lines of its epochs, as far as they can be read."""
        lines: list[Record] = []
        with suppress(OSError, ValueError):  # the last line of a run that is being written
            lines.extend(map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines()))
        return lines


def scan(folder: Path, warn: Callable[[str], object]) -> dict[str, Found]:
    """The runs in `folder`, `runs/<recipe>`, by identity; damaged ones are said, and are in it as such."""
    try:
        with os.scandir(folder) as entries:  # which knows folders without asking for each
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {name: look(folder / name, warn) for name in names}


def look(path: Path, warn: Callable[[str], object]) -> Found:
    """One run folder."""
    read: dict[str, Record | None] = {}
    for name in ("settings", "result", "failure"):
        if name == "failure" and read["result"] is not None:
            break  # it ended after all
        file = path / f"{name}.json"
        try:
            read[name] = _strict(file)
        except FileNotFoundError:
            read[name] = None
        except (OSError, ValueError) as error:
            return _damaged(path, f"{file} is damaged ({error}); the run is left out, and the folder as it is", warn)
    settings, result, failure = read["settings"] or {}, read["result"], read.get("failure")
    status: Status = "unfinished" if failure is None else "failed"
    if result is not None:
        status = result.get("status", "damaged")
        if status not in ("finished", "diverged"):
            return _damaged(
                path, f"{path / 'result.json'} has no status; the run is left out, and the folder as it is", warn
            )
    return Found(path, status, settings, result, failure)


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

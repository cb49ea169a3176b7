"""Read the run folders of a recipe without changing them."""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.store import contents, folder

Status = Literal["finished", "diverged", "failed", "unfinished", "damaged", "outdated"]
Record = dict[str, Any]
Read = TypeVar("Read")


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
    recorded_environment: Mapping[str, Any] = field(default_factory=dict)

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

    @property
    def remedy(self) -> str:
        """The command that removes it."""
        return f"`ghostnoise runs remove {shlex.quote(str(self.path))}` removes it"

    @property
    def damage(self) -> str:
        """A line about a damaged folder, with the command that removes it."""
        return f"{self.path} is damaged ({self.reason}); {self.remedy}"

    def environment(self) -> Record:
        """The environment metadata; empty if there are none."""
        return dict(self.recorded_environment)

    @property
    def numerics(self) -> int:
        """The numerics number that it was made with; 1 for runs that recorded none."""
        return folder.numerics(self.environment())

    def metrics(self) -> list[Record]:
        """The metrics of each epoch; empty if they cannot be read."""
        try:
            return contents.read_lines(self.path / "metrics.jsonl")
        except (OSError, ValueError):
            return []


def scan(runs: Path, warn: Callable[[str], object], numerics: int | None = None) -> dict[str, Found]:
    """Read the folders in `runs`, which is `runs/<recipe>`, by identity. Damaged ones are included, with a warning.

    With `numerics`, runs that ended with another numerics number are "outdated" and have no result.
    """
    try:
        with os.scandir(runs) as entries:  # one system call per folder less than Path.is_dir
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError:
        return {}
    return {name: look(runs / name, warn, numerics) for name in names}


def look(path: Path, warn: Callable[[str], object], numerics: int | None = None) -> Found:
    """Read one run folder and check the contents of its files; see `scan`."""
    name = "settings.json"
    try:
        settings = _read(path / name, contents.read_settings) or {}
        name = "result.json"
        result = _read(path / name, lambda file: contents.read(file, contents.Result))
        if result and result["status"] == "finished" and result.get("accuracy", 0) is None:
            raise ValueError("accuracy: must be a number, since the run finished")
        name = "failure.json"  # if there is a result too, the run was repeated and ended
        failure = None if result else _read(path / name, lambda file: contents.parse_json(read_bytes(file)))
        name = "environment.json"
        environment = _read(path / name, lambda file: contents.read(file, contents.Environment)) or {}
        name = "metrics.jsonl"
        _read(path / name, contents.read_lines)
    except (OSError, ValueError) as error:
        found = Found(path, "damaged", reason=f"{name}: {contents.one_line(error)}")
        warn(found.damage)
        return found
    status: Status = result["status"] if result else "unfinished" if failure is None else "failed"
    found = Found(path, status, settings, result, failure, recorded_environment=environment)
    if numerics is not None and result is not None and (made := found.numerics) != numerics:
        reason = f"made with numerics {made}, not {numerics}"
        return Found(path, "outdated", settings, reason=reason, recorded_environment=environment)
    return found


def _read(file: Path, read: Callable[[Path], Read]) -> Read | None:
    """Read a file; None if it does not exist."""
    try:
        return read(file)
    except FileNotFoundError:
        return None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a loop of symbolic links
        return False

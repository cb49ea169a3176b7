"""Read the run folders of a recipe without changing them."""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from ghostnoise.lab.garbage import uncollected
from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.store import contents, folder
from ghostnoise.lab.store.index import Index

INDEXED = 200  # run folders from which on an index is used; fewer are read in less than a second

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
        return contents.recorded_numerics(self.recorded_environment)

    def metrics(self) -> list[Record]:
        """The metrics of each epoch; empty if they cannot be read."""
        try:
            return contents.read_lines(self.path / "metrics.jsonl")
        except (OSError, ValueError):
            return []


@uncollected()
def scan(
    runs: Path, warn: Callable[[str], object], current: bool = False, on_read: Callable[[], object] = lambda: None
) -> dict[str, Found]:
    """Read the folders in `runs`, which is `runs/<recipe>`, by identity. Damaged ones are included, with a warning.

    With `current`, runs that ended with another numerics number than their method has now are "outdated" and have no
    result. If there are many folders, those that have not changed since an earlier scan are not read again. `on_read`
    is called before the first folder is read.
    """
    try:
        with os.scandir(runs) as entries:  # one system call per folder less than Path.is_dir
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError:
        return {}
    index = Index(runs) if len(names) >= INDEXED else None
    founds = {}
    for name in names:
        signature, entry = index.get(name) if index else ("", None)
        if entry is None:
            on_read()
            on_read = _nothing
            found = _look(runs / name)
            if index:
                index.put(name, signature, _entry(found))
        else:
            found = Found(runs / name, **entry)
        founds[name] = _checked(found, warn, current)
    if index:
        index.save()
    return founds


def look(path: Path, warn: Callable[[str], object], current: bool = False) -> Found:
    """Read one run folder and check the contents of its files; see `scan`."""
    return _checked(_look(path), warn, current)


def _look(path: Path) -> Found:
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
        return Found(path, "damaged", reason=f"{name}: {contents.one_line(error)}")
    status: Status = result["status"] if result else "unfinished" if failure is None else "failed"
    return Found(path, status, settings, result, failure, recorded_environment=environment)


def _checked(found: Found, warn: Callable[[str], object], current: bool) -> Found:
    """Warn if a run is damaged; replace it if it is outdated."""
    if found.status == "damaged":
        warn(found.damage)
    elif (
        current and found.result is not None and (made := found.numerics) != (now := contents.numerics(found.settings))
    ):
        reason = f"made with numerics {made}, not {now}"
        environment = found.recorded_environment
        return Found(found.path, "outdated", found.settings, reason=reason, recorded_environment=environment)
    return found


def _entry(found: Found) -> Record:
    """Return the fields of a run for the index: all but its path."""
    return {each.name: getattr(found, each.name) for each in fields(found) if each.name != "path"}


def _nothing() -> None:
    pass


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

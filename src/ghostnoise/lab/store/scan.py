"""Read the run folders of a recipe without changing them, with an index of those that were read before.

An index saves time and nothing else. It has a signature of the files of each run (inode, size and times), and an entry
counts only if they still have it; everything else is read from the folders. It is in the user's cache
($XDG_CACHE_HOME/ghostnoise, or ~/.cache/ghostnoise), never among the runs: those may be read-only, or come from others.
An index that is missing, damaged, of another version or of another user is rebuilt without a message.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ghostnoise
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.garbage import uncollected
from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.run import ENDED, Run
from ghostnoise.lab.store import atomic
from ghostnoise.lab.store.folder import PARTS, RUN, locked, read

INDEXED = 200  # run folders from which on an index is used; fewer are read in less than a second
STORED = ("status", "environments", "result", "failure", "reason")  # fields of an entry besides the settings
FORMAT = 2
MAX_BYTES = 2**30
MAX_INDEXES = 32  # in the cache
RACY = 2.0  # seconds in which a file may change twice without a change of its times
CODE = ("limits.py", "run.py", "store", "config")  # of the lab: what decides whether a file is valid

Entry = dict[str, Any]


@uncollected()
def scan(runs: Path, warn: Callable[[str], object], on_read: Callable[[], object] = lambda: None) -> dict[str, Run]:
    """Read the folders in `runs`, which is `runs/<recipe>`, by identity. Damaged ones are included, with a warning.

    If there are many folders, those that have not changed since an earlier scan are not read again. `on_read` is called
    before the first folder is read.
    """
    try:
        with os.scandir(runs) as entries:  # one system call per folder less than Path.is_dir
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError:
        return {}
    index = Index(runs) if len(names) >= INDEXED else None
    found = {}
    for name in names:
        signature, entry = index.get(name) if index else ("", None)
        if entry is None:
            on_read()
            on_read = _nothing
            run = replace(read(runs / name), curve=None, noise=())  # curves are read again where they are needed
            if index:
                index.put(name, signature, {"given": dict(run.tree)} | {each: getattr(run, each) for each in STORED})
        else:
            run = Run(runs.name, name, folder=runs / name, **entry)
        found[name] = _checked(run, warn)
    if index:
        index.save()
    return found


def look(path: Path, warn: Callable[[str], object]) -> Run:
    """Read one run folder and check the contents of its files; see `scan`."""
    return _checked(read(path), warn)


def _checked(run: Run, warn: Callable[[str], object]) -> Run:
    """Warn if a run is damaged; find out whether one that has not ended is running."""
    if run.status == "damaged":
        warn(run.damage)
    elif run.status not in ENDED and run.folder is not None and locked(run.folder):
        return replace(run, status="running")
    return run


def _nothing() -> None:
    pass


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a loop of symbolic links
        return False


class Index:
    """The entries of earlier scans, and those of this one, which `save` writes."""

    def __init__(self, runs: Path) -> None:
        self.file = _location(runs)
        self.began = time.time()
        self.runs = os.fspath(runs)
        self.before = _load(self.file)
        self.entries: dict[str, tuple[str, Entry]] = {}

    def get(self, name: str) -> tuple[str, Entry | None]:
        """Return the signature of a run's files, and its entry if they are unchanged."""
        signature, changed = _signature(os.path.join(self.runs, name))
        found = self.before.get(name)
        if found is not None and found[0] == signature:
            self.entries[name] = signature, found[1]
            return signature, found[1]
        return (signature if changed < self.began - RACY else ""), None

    def put(self, name: str, signature: str, entry: Entry) -> None:
        """Add an entry; `signature` is what `get` returned before the files were read."""
        if signature:
            self.entries[name] = signature, entry

    def save(self) -> None:
        """Write the index if many entries are new; nothing happens if that is not possible."""
        new = len(self.entries.keys() - self.before.keys()) + sum(
            self.before[name][0] != signature for name, (signature, _) in self.entries.items() if name in self.before
        )
        if self.file is None or new <= len(self.entries) // 20:
            return
        body = json.dumps(self.entries, separators=(",", ":")).encode()
        header = {"format": FORMAT, "code": _code(), "sha256": hashlib.sha256(body).hexdigest()}
        with suppress(OSError, UserError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.write(self.file, json.dumps(header).encode() + b"\n" + body)
            _prune(self.file.parent)


def _location(runs: Path) -> Path | None:
    """Return the path of the index of a folder; None if the cache is not this user's own."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ghostnoise" / "index"
        found = os.stat(runs)
        place = f"{os.path.realpath(runs)} {found.st_dev} {found.st_ino}"
        if folder.exists() and hasattr(os, "getuid"):
            own = folder.lstat()
            if own.st_uid != os.getuid() or own.st_mode & 0o022:
                return None
    except (OSError, RuntimeError):  # there is no home folder
        return None
    return folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"


def _load(file: Path | None) -> Mapping[str, tuple[str, Entry]]:
    """Read an index; empty if it is missing, damaged or of another version."""
    if file is None:
        return {}
    try:
        header, _, body = read_bytes(file, MAX_BYTES).partition(b"\n")
        known = json.loads(header)
        if known != {"format": FORMAT, "code": _code(), "sha256": hashlib.sha256(body).hexdigest()}:
            return {}
        found = json.loads(body)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(run: str) -> tuple[str, float]:
    """Return a digest of the state of a run's files, and when one of them last changed."""
    states: list[tuple[int, ...] | None] = []
    latest = 0
    for name in (RUN, *PARTS):
        try:
            found = os.lstat(f"{run}{os.sep}{name}")
        except OSError:
            states.append(None)
        else:
            states.append((found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            latest = max(latest, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(repr(states).encode()).hexdigest()[:32], latest / 1e9


@cache
def _code() -> str:
    """Return a digest of the version, and of the state of the code that reads runs."""
    package = Path(ghostnoise.__file__).parent
    seen = hashlib.sha256(ghostnoise.__version__.encode())
    for place in (*(package / "lab" / name for name in CODE), package / "methods"):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            with suppress(OSError):
                state = file.stat()
                seen.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return seen.hexdigest()[:32]


def _prune(folder: Path) -> None:
    """Remove the indexes that were not written for the longest time, and what killed processes left."""

    def written(file: Path) -> float:
        with suppress(OSError):
            return file.stat().st_mtime
        return 0.0

    atomic.remove_abandoned_parts(folder)
    for file in sorted(folder.glob("*.json"), key=written, reverse=True)[MAX_INDEXES:]:
        with suppress(OSError):
            file.unlink()

"""A run's folder: `runs/<recipe>/<identity>/`.

settings.json       all settings of the run, its identity and the recipe's name
environment.json    the commit, the numerics number, and the machine that it ran on
metrics.jsonl       one line per epoch
noise/              measurements of the noise, one file per measured epoch
checkpoints/        the last two checkpoints
result.json         the result; present once the run has finished or diverged
failure.json        why a run of a sweep failed; removed when it runs again
imported.json       the file that the run was imported from; such a run has no checkpoints
measured.json       of an imported run: the measured noise, without its distributions
earlier/            files of the same run made with another numerics number
"""

import itertools
import json
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic, checkpoints, contents

Record = dict[str, Any]
NOISE = "noise"
EARLIER = "earlier"
IMPORTED, MEASURED = "imported.json", "measured.json"
DIFFERENCES_THAT_MATTER = ("torch", "machine", "device_name", "threads", "backend")
# In the order in which they are moved: a result without the environment that it was made in would look current.
MADE_BY_A_RUN = (
    "result.json", "checkpoints", NOISE, MEASURED, "metrics.jsonl", "failure.json", IMPORTED, "environment.json",
)  # fmt: skip


class Busy(UserError):
    """Another process holds the lock of the run."""


class Deleted(UserError):
    """The folder was deleted while its run was trained."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: was deleted while its run was trained; repeat the command to train it from the beginning"
        )


class RunFolder:
    """The files of one run. Call `own()` before writing any of them."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self.path, self.warn = path, warn
        self._lock: FileLock | None = None
        self._handle: int | None = None  # of the folder while it is locked: its inode is not used for another one

    def own(self) -> None:
        """Create the folder and lock it until `release()` or the end of this process, even if that is killed."""
        atomic.make_folder(self.path)
        lock = self._free_lock()
        if lock is None:
            raise Busy(f"{self.path}: another process is training this run; wait for it, or stop it")
        self._lock = lock
        if os.name == "posix":
            with atomic.writing(self.path):
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        atomic.remove_parts(self.path)
        atomic.remove_parts(self.path / "checkpoints")
        atomic.remove_parts(self.path / NOISE)

    def own_and_read(self) -> checkpoints.Checkpoint | None:
        """Own the folder and return its last readable checkpoint; raise `Busy` if the run has ended in the meantime."""
        self.own()
        if self.result() is not None:
            self.release()
            raise Busy(f"{self.path}: another process has just finished this run; repeat the command to see its result")
        return self.latest()

    def release(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def owned(self) -> bool:
        """Whether any process, this one included, holds the lock; changes nothing."""
        if not (self.path / ".lock").exists():
            return False
        lock = self._free_lock()
        if lock is not None:
            lock.release()
        return lock is None

    def _free_lock(self) -> FileLock | None:
        """Acquire the lock; None if another process holds it."""
        with atomic.writing(self.path):
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return None
        return lock

    def check(self) -> None:
        """Raise `Deleted` if the locked folder was deleted, even if there is another one with its name now."""
        if self._handle is None:
            return
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            there = False
        if not there:
            raise Deleted(self.path)

    def begin(self, settings: Record, environment: Record) -> None:
        """Write settings and environment; warn if a resumed run now has another environment."""
        self._write("settings.json", settings)
        before = self._read("environment.json")
        differing = [
            f"{name} {before[name]} -> {environment.get(name)}"
            for name in DIFFERENCES_THAT_MATTER
            if before and name in before and before[name] != environment.get(name)
        ]
        if differing and checkpoints.saved(self.path / "checkpoints"):
            self.warn(
                f"resumed in another environment ({', '.join(differing)}): the result may differ in its last digits"
            )
        self._write("environment.json", environment)
        self._forget_failure()

    def result(self) -> Record | None:
        """The result, or None if there is none with the numerics number that the method has in this version."""
        return None if outdated(self.path) else self._read("result.json")

    def finish(self, result: Record) -> None:
        """Write the result; more than two checkpoints are left if the run was killed after it wrote the last one."""
        checkpoints.prune(self.path / "checkpoints")
        self._write("result.json", result)
        self._forget_failure()

    def fail(self, settings: Record, message: str, trace: str = "") -> None:
        """Write why the run failed, and `settings` if they were not written yet."""
        atomic.make_folder(self.path)
        if not (self.path / "settings.json").exists():
            self._write("settings.json", settings)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write("failure.json", {"message": message, "traceback": trace, "time": now})

    def save(self, step: int, state: checkpoints.State) -> None:
        """Write a checkpoint."""
        self.check()
        checkpoints.save(self.path / "checkpoints", step, state)

    def latest(self) -> checkpoints.Checkpoint | None:
        """Return the last checkpoint that can be read, or None if the run starts from the beginning.

        Others are set aside with a warning.

        Files that were made with another numerics number are moved to `earlier/` first, with a warning.
        """
        self._move_outdated()
        return checkpoints.latest(self.path / "checkpoints", self.warn)

    def reject(self, checkpoint: checkpoints.Checkpoint, reason: str) -> None:
        """Set a checkpoint aside that was read but cannot be restored, with a warning."""
        checkpoints.reject(checkpoint.path, reason, self.warn, rename=True)

    def record(self, metrics: Record) -> None:
        """Append a line to the metrics."""
        self.check()
        atomic.append(self.path / "metrics.jsonl", _line(metrics))

    def cut_back(self, history: list[Record]) -> None:
        """Replace the metrics by these lines, those of the checkpoint that the run resumes from."""
        self.check()
        atomic.write(self.path / "metrics.jsonl", b"".join(map(_line, history)))

    def record_noise(self, epoch: int, content: bytes) -> None:
        """Write the noise that was measured after an epoch."""
        self.check()
        atomic.make_folder(self.path / NOISE)
        atomic.write(self.path / NOISE / f"epoch-{epoch:04d}.npz", content)

    def _move_outdated(self) -> None:
        number = outdated(self.path)
        made = [name for name in MADE_BY_A_RUN if (self.path / name).exists()]
        if number is None or not made:
            return
        names = (f"numerics-{number}" + (f"-{again}" if again > 1 else "") for again in itertools.count(1))
        folders = (self.path / EARLIER / name for name in names)
        folder = next(folder for folder in folders if not any((folder / name).exists() for name in made))
        atomic.make_folder(folder)
        with atomic.writing(folder):
            for name in made:
                (self.path / name).rename(folder / name)
        self.warn(
            f"{self.path} was trained with numerics {number}, and this version has numerics {_numerics(self.path)}: "
            f"the run starts again, and its earlier files are in {folder}"
        )

    def _forget_failure(self) -> None:
        with atomic.writing(self.path / "failure.json"):
            (self.path / "failure.json").unlink(missing_ok=True)

    def _write(self, name: str, record: Record) -> None:
        self.check()
        atomic.write(self.path / name, (json.dumps(finite(record), indent=2) + "\n").encode())

    def _read(self, name: str) -> Record | None:
        try:
            return contents.read(self.path / name, contents.Result if name == "result.json" else contents.Environment)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.warn(f"{self.path / name} cannot be read ({contents.one_line(error)}) and will be written again")
            return None


def outdated(path: Path) -> int | None:
    """The numerics number of the files in a run folder, if it is not that of its method now; None if it is.

    A folder with neither an environment nor a result is current.
    """
    try:
        number = contents.recorded_numerics(contents.read(path / "environment.json", contents.Environment))
    except (OSError, ValueError):
        number = 1 if os.path.lexists(path / "result.json") else _numerics(path)
    return None if number == _numerics(path) else number


def _numerics(path: Path) -> int:
    """The numerics number that the method of a run folder has in this version."""
    try:
        return contents.numerics(contents.read_settings(path / "settings.json"))
    except (OSError, ValueError):
        return contents.numerics({})


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line(metrics: Record) -> bytes:
    return (json.dumps(finite(metrics)) + "\n").encode()

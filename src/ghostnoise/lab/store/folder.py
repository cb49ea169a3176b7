"""A run's folder: `runs/<recipe>/<identity>/`.

settings.json       what the run computes, and the recipe's name
environment.json    what it ran on
metrics.jsonl       a line for each epoch
noise/              what the meter read, a file for each epoch that has one
checkpoints/        the last two states
result.json         there when the run is over
failure.json        why a run of a sweep ended before that, until it runs again
"""

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic, checkpoints

Record = dict[str, Any]
NOISE = "noise"
DIFFERENCES_THAT_MATTER = ("torch", "machine", "device_name", "threads", "backend")


class Busy(UserError):
    """Another process has the run."""


class RunFolder:
    """The files of one run; `own()` before writing."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self.path, self.warn = path, warn
        self._lock: FileLock | None = None

    def own(self) -> None:
        """Make the folder, and lock it until this process ends; a killed one's lock is free."""
        atomic.make_folder(self.path)
        lock = self._free_lock()
        if lock is None:
            raise Busy(f"{self.path}: another process trains this run; wait for it, or stop it")
        self._lock = lock
        atomic.remove_parts(self.path)
        atomic.remove_parts(self.path / "checkpoints")
        atomic.remove_parts(self.path / NOISE)

    def own_and_read(self) -> bytes | None:
        """Own it, unless its run has just ended; the last good checkpoint."""
        self.own()
        if self.result() is not None:
            self.release()
            raise Busy(f"{self.path}: another process has just ended this run; the same command shows how")
        return self.latest()

    def release(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def owned(self) -> bool:
        """Whether any process has it now, this one included; changes nothing."""
        if not (self.path / ".lock").exists():
            return False
        lock = self._free_lock()
        if lock is not None:
            lock.release()
        return lock is None

    def _free_lock(self) -> FileLock | None:
        """The lock, taken; None if it is not free."""
        with atomic.writing(self.path):
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return None
        return lock

    def begin(self, settings: Record, environment: Record) -> None:
        """Write what the run is and where it runs; say where that differs from the last time."""
        self._write("settings.json", settings)
        before = self._read("environment.json")
        differing = [
            f"{name} {before[name]} -> {environment.get(name)}"
            for name in DIFFERENCES_THAT_MATTER
            if before and name in before and before[name] != environment.get(name)
        ]
        if differing and checkpoints.saved(self.path / "checkpoints"):
            self.warn(f"resumed on something else ({', '.join(differing)}): the result may differ in its last digits")
        self._write("environment.json", environment)
        self._forget_failure()

    def result(self) -> Record | None:
        """How the run ended, or None."""
        return self._read("result.json")

    def finish(self, result: Record) -> None:
        """Write how the run ended."""
        self._write("result.json", result)
        self._forget_failure()

    def fail(self, settings: Record, message: str, trace: str = "") -> None:
        """Write why the run came to no end; `settings` too, if it had not come that far."""
        atomic.make_folder(self.path)
        if not (self.path / "settings.json").exists():
            self._write("settings.json", settings)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write("failure.json", {"message": message, "traceback": trace, "time": now})

    def save(self, step: int, state: checkpoints.State) -> None:
        """Write a checkpoint."""
        checkpoints.save(self.path / "checkpoints", step, state)

    def latest(self) -> bytes | None:
        """The last good checkpoint."""
        return checkpoints.latest(self.path / "checkpoints", self.warn)

    def record(self, metrics: Record) -> None:
        """Add a line to the metrics."""
        atomic.append(self.path / "metrics.jsonl", _line(metrics))

    def cut_back(self, history: list[Record]) -> None:
        """Have exactly these lines in the metrics."""
        atomic.write(self.path / "metrics.jsonl", b"".join(map(_line, history)))

    def record_noise(self, epoch: int, content: bytes) -> None:
        """Write what the meter read after an epoch."""
        atomic.make_folder(self.path / NOISE)
        atomic.write(self.path / NOISE / f"epoch-{epoch:04d}.npz", content)

    def _forget_failure(self) -> None:
        with atomic.writing(self.path / "failure.json"):
            (self.path / "failure.json").unlink(missing_ok=True)

    def _write(self, name: str, record: Record) -> None:
        atomic.write(self.path / name, (json.dumps(finite(record), indent=2) + "\n").encode())

    def _read(self, name: str) -> Record | None:
        try:
            record = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.warn(f"{self.path / name} cannot be read ({error}) and is made again")
            return None
        return record if isinstance(record, dict) else None


def finite(value: Any) -> Any:
    """`value` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line(metrics: Record) -> bytes:
    return (json.dumps(finite(metrics)) + "\n").encode()

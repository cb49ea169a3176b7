"""The folder of a run: `runs/<recipe>/<identity>/`.

run.json            the record of the run, once it has ended: all files below but the weights and the noise in one line
checkpoints/        in training, the last two checkpoints; then the final weights
noise/              measurements of the noise, one file per measured epoch

Only while it trains, or after it failed:

settings.json       all settings of the run, its identity and the recipe's name
environments.json   metadata of the environment of each segment of the training: commit, numerics number, machine
metrics.jsonl       one line per epoch
failure.json        why a run of a sweep failed; removed when it runs again

imported.json       the file that the run was imported from; such a run has no checkpoints
earlier/            files of the same run made with another numerics number

Folders of version 0.1, with result.json and environment.json, are read too.
"""

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.run import ENDED, IMPORTED, Run, Status
from ghostnoise.lab.store import atomic, checkpoints, record

RUN, NOISE, EARLIER, LOCK = "run.json", "noise", "earlier", ".lock"
SETTINGS, ENVIRONMENTS, METRICS, FAILURE = "settings.json", "environments.json", "metrics.jsonl", "failure.json"
OLD_RESULT, OLD_ENVIRONMENT, OLD_NOISE = "result.json", "environment.json", "measured.json"
PARTS = (SETTINGS, ENVIRONMENTS, METRICS, FAILURE, OLD_RESULT, OLD_ENVIRONMENT)  # read if there is no run.json
READERS: dict[str, Callable[[Path], Any]] = {
    SETTINGS: record.read_settings,
    OLD_RESULT: partial(record.read, kind=record.RESULT),
    FAILURE: record.read_json,
    OLD_ENVIRONMENT: partial(record.read, kind=record.ENVIRONMENT),
    ENVIRONMENTS: partial(record.read, kind=record.ENVIRONMENTS),
    METRICS: record.read_lines,
}
ASKED_WITHIN = 1.0  # seconds to wait for the lock, which `locked` holds for an instant
DIFFERENCES_THAT_MATTER = ("torch", "machine", "device_name", "threads", "backend")
# In the order in which they are moved: a result without the environment that it was made in would look current.
MADE_BY_A_RUN = (
    RUN, OLD_RESULT, "checkpoints", NOISE, OLD_NOISE, METRICS, FAILURE, IMPORTED, ENVIRONMENTS, OLD_ENVIRONMENT,
)  # fmt: skip

Record = dict[str, Any]


class Busy(UserError):
    """Another process holds the lock of the run."""


class RunFolder:
    """The files of one run. Call `own()` before writing any of them."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self.path, self.warn = path, warn
        self._lock: FileLock | None = None
        self._handle: int | None = None  # of the folder while it is locked: its inode is not used for another one

    def own(self) -> None:
        """Create the folder and lock it until `release()` or the end of this process, even if that is killed."""
        atomic.make_folder(self.path)
        with atomic.writing(self.path):
            lock = FileLock(self.path / LOCK)
            try:
                lock.acquire(timeout=ASKED_WITHIN, poll_interval=0.01)
            except Timeout:
                raise Busy(f"{self.path}: another process is training this run; wait for it, or stop it") from None
            self._lock = lock
            if os.name == "posix":
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        for folder in (self.path, self.path / "checkpoints", self.path / NOISE):
            atomic.remove_parts(folder)

    def release(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check(self) -> None:
        """Raise a UserError if the locked folder was deleted, even if there is another one with its name now."""
        try:
            gone = self._handle is not None and not os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            gone = True
        if gone:
            raise UserError(
                f"{self.path}: was deleted while its run was trained; repeat the command to train it from the beginning"
            )

    def ended(self) -> Run | None:
        """Return the run if it has ended, and this version would compute the same result."""
        run = read(self.path)
        if run.status == "damaged" and not run.reason.startswith(SETTINGS):
            name = run.reason.partition(":")[0]
            self.warn(f"{self.path / name} cannot be read ({run.reason}) and will be written again")
        return run if run.ended else None

    def start(self) -> checkpoints.Checkpoint | None:
        """Own the folder and return its last readable checkpoint; raise `Busy` if the run has ended in the meantime.

        Files that were made with another numerics number are moved to `earlier/`, with a warning.
        """
        self.own()
        run = read(self.path)
        if run.ended:
            self.release()
            raise Busy(f"{self.path}: another process has just finished this run; repeat the command to see its result")
        if (run.environments or run.result) and run.numerics.behind:
            self._move_outdated(run)
        return checkpoints.latest(self.path / "checkpoints", self.warn)

    def begin(self, settings: Mapping[str, Any], environments: Sequence[Record], history: Sequence[Record]) -> None:
        """Write settings, environments and metrics, which are those of the checkpoint that the run resumes from.

        Warn if the environment of the segment that begins differs from that of the previous one.
        """
        self._remove(RUN, OLD_RESULT, OLD_ENVIRONMENT, FAILURE)  # records that cannot be read
        header = {"recipe": self.path.parent.name, "identity": self.path.name}
        self._write(SETTINGS, header | dict(settings))
        for before, now in itertools.pairwise(environments[-2:]):
            names = (name for name in DIFFERENCES_THAT_MATTER if name in before and before[name] != now.get(name))
            if differing := [f"{name} {before[name]} -> {now.get(name)}" for name in names]:
                self.warn(
                    f"resumed in another environment ({', '.join(differing)}): the result may differ in its last digits"
                )
        self._write(ENVIRONMENTS, list(environments))
        self.check()
        atomic.write(self.path / METRICS, "".join(f"{json.dumps(line)}\n" for line in history).encode())

    def record(self, metrics: Record) -> None:
        """Append a line to the metrics."""
        self.check()
        atomic.append(self.path / METRICS, f"{json.dumps(metrics, allow_nan=False)}\n".encode())

    def record_noise(self, epoch: int, content: bytes) -> None:
        """Write the noise that was measured after an epoch."""
        self.check()
        atomic.make_folder(self.path / NOISE)
        atomic.write(self.path / NOISE / f"epoch-{epoch:04d}.npz", content)

    def save(self, step: int, state: checkpoints.State) -> Path:
        """Write a checkpoint, and return its path."""
        self.check()
        return checkpoints.save(self.path / "checkpoints", step, state)

    def finish(self, run: Run, state: checkpoints.State, step: int, keep_all: bool) -> Run:
        """Write the final weights and the record of the run, and return the run as it is stored.

        The record replaces the other files, and the final weights the checkpoints, unless `keep_all`.
        """
        self.check()
        measured = noise(self.path, self.warn) if (self.path / NOISE).exists() else ()
        run = replace(run, folder=self.path, noise=measured)
        checkpoints.save(self.path / "checkpoints", step, checkpoints.weights(state), "final")
        atomic.write(self.path / RUN, (record.line(run) + "\n").encode())
        self.tidy(keep_all)
        return run

    def tidy(self, keep_all: bool) -> None:
        """Remove what the record has replaced; the last checkpoints come first, so that this can be completed later."""
        checkpoints.prune(self.path / "checkpoints", checkpoints.KEPT if keep_all else 0)
        self._remove(*PARTS)

    def untidy(self) -> bool:
        """Return whether the process that wrote the record was killed before it removed what the record replaces."""
        return any((self.path / name).exists() for name in PARTS) and (self.path / RUN).exists()

    def fail(self, settings: Mapping[str, Any], message: str, trace: str = "") -> None:
        """Write why the run failed, and `settings` if they were not written yet."""
        atomic.make_folder(self.path)
        if not (self.path / SETTINGS).exists():
            self._write(SETTINGS, {"recipe": self.path.parent.name, "identity": self.path.name} | dict(settings))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(FAILURE, {"message": message, "traceback": trace, "time": now})

    def _move_outdated(self, run: Run) -> None:
        made = [name for name in MADE_BY_A_RUN if (self.path / name).exists()]
        number, current = run.numerics
        names = (f"numerics-{number}" + (f"-{again}" if again > 1 else "") for again in itertools.count(1))
        folders = (self.path / EARLIER / name for name in names)
        folder = next(folder for folder in folders if not any((folder / name).exists() for name in made))
        atomic.make_folder(folder)
        with atomic.writing(folder):
            for name in made:
                (self.path / name).rename(folder / name)
        self.warn(
            f"{self.path} was trained with numerics {number}, and this version has numerics {current}: the run starts "
            f"again, and its earlier files are in {folder}"
        )

    def _remove(self, *names: str) -> None:
        with atomic.writing(self.path):
            for name in names:
                (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, content: Record | list[Record]) -> None:
        self.check()
        atomic.write(self.path / name, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read(path: Path) -> Run:
    """Read the folder of a run and check the contents of its files; nothing is changed."""
    run = Run(path.parent.name, path.name, {}, folder=path)
    try:
        names = set(os.listdir(path))
    except OSError:
        names = set()
    if RUN in names:
        try:
            return _own_identity(record.parse(read_bytes(path / RUN), run.recipe, path), path)
        except (OSError, ValueError) as error:
            return replace(run, status="damaged", reason=f"{RUN}: {record.one_line(error)}")
    return _read_parts(run, path, names) if names.intersection(PARTS) else replace(run, status="interrupted")


def _read_parts(run: Run, path: Path, names: set[str]) -> Run:
    """Read the files of a run that has no record: it has not ended, or version 0.1 has written it."""
    found: dict[str, Any] = {}
    for name, how in READERS.items():
        try:
            found[name] = how(path / name) if name in names else None
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and (path / RUN).exists():
                return read(path)  # the record has just replaced it
            return replace(run, status="damaged", reason=f"{name}: {record.one_line(error)}")
    result, single = found[OLD_RESULT], found[OLD_ENVIRONMENT]
    failure = None if result else found[FAILURE]  # if there is a result too, the run was repeated and ended
    status: Status = result["status"] if result else "interrupted" if failure is None else "failed"
    if result:
        result = {key: value for key, value in result.items() if key not in record.HEADER}
    return replace(
        run, given=found[SETTINGS] or {}, status=status, result=result, failure=failure,
        environments=found[ENVIRONMENTS] or ([single] if single else ()),
    )  # fmt: skip


def _own_identity(run: Run, path: Path) -> Run:
    if run.identity != path.name:
        raise ValueError(f"it is the record of run {run.identity}")
    return run


def whole(run: Run) -> Run:
    """Return a run of version 0.1 that has ended as its record; raises a ValueError if its files do not fit."""
    if run.curve is not None or run.folder is None or run.status not in ENDED:
        return run
    curve = record.curve_of(record.read_lines(run.folder / METRICS))
    made = replace(run, curve=curve, noise=noise(run.folder, None))
    return record.parse(record.line(made).encode(), run.recipe, run.folder)  # the same checks as for a file


def history(run: Run) -> list[Record]:
    """Return the metrics after each epoch; empty if there are none that can be read."""
    try:
        if run.curve is not None:
            return record.lines_of(run.curve)
        if run.folder is None:
            return []
        if (run.folder / RUN).exists():
            return record.lines_of(record.loads(read_bytes(run.folder / RUN))["curve"])
        return record.read_lines(run.folder / METRICS)
    except (OSError, ValueError, KeyError, TypeError):
        return []


def noise(path: Path, warn: Callable[[str], object] | None) -> list[Record]:
    """Return the noise that a run has measured, as its record has it.

    Readings that are damaged are left out with a warning, or raise a ValueError if `warn` is None.
    """
    if (path / OLD_NOISE).exists():
        found = json.loads(read_bytes(path / OLD_NOISE))
        return found if isinstance(found, list) else [found]
    made = []
    for file in sorted((path / NOISE).glob("epoch-*.npz")):
        from ghostnoise.meter.reading import Reading  # imports torch

        try:
            rows = Reading.load(file).rows()
            epoch = int(file.stem.removeprefix("epoch-"))
        except Exception as error:  # a damaged file can raise anything
            reason = f"{file.name} is damaged ({error})"
            if warn is None:
                raise ValueError(reason) from error
            warn(f"{path}: {reason}; it is left out")
            continue
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [record.finite(row.get(name)) for row in rows] for name in names}
        made.append({"epoch": epoch, "layers": columns})
    return made


def locked(path: Path) -> bool:
    """Return whether any process, this one included, trains the run in a folder; nothing is changed."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except ImportError:  # Windows, where a file that is locked cannot be read
        try:
            os.read(handle, 1)
        except OSError:
            return True
    except OSError:
        return True
    finally:
        os.close(handle)
    return False

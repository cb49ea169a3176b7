"""A node's side of a Ray cluster: one attempt at a run, whose events go to the driver with the files that it saved."""

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ghostnoise.lab.events import Ended, Event, Saved, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import atomic, checkpoints
from ghostnoise.lab.store.folder import ENVIRONMENTS, FAILURE, METRICS, NOISE, RUN, SETTINGS
from ghostnoise.lab.sweep.execute import Place, execute

REPORT_EVERY = 0.5  # seconds between two events of steps
ASK_EVERY = 1.0  # seconds between two questions whether to stop
CHANGING = (SETTINGS, ENVIRONMENTS, METRICS, FAILURE)
PREFIX = "ghostnoise-"

Files = dict[str, bytes]


class Flag:
    """A Ray actor that tells all attempts whether to stop."""

    def __init__(self) -> None:
        self.raised = False

    def set(self) -> None:
        """Tell them to stop."""
        self.raised = True

    def get(self) -> bool:
        """Return whether to stop."""
        return self.raised


def attempt(
    run: Run, number: int, place: Place, threads: int, files: Files | None, flag: Any
) -> Iterator[tuple[Event, Files]]:
    """Train a run on this node until it ends or must stop; yield its events, and the files that each one has saved.

    It starts from `files`, in a temporary folder; if None, `place` is a folder that all nodes can write.
    """
    from ghostnoise.lab.train.machine import Stop

    stop, sent = Stop(), set[str]()
    with _temporary_folder() as scratch, _asking(flag, stop):
        if files is not None:
            place = replace(place, runs=scratch)
            write(place.folder(run), files)
            sent.update(files)
        for event in execute(run, place, threads, stop=stop, step_seconds=REPORT_EVERY):
            if isinstance(event, Started):
                event = replace(event, where=_where(number))
            yield event, {} if files is None else saved_with(event, place.folder(run), sent)


def saved_with(event: Event, folder: Path, sent: set[str]) -> Files:
    """Read the files that a checkpoint or the end of a run has changed; add those that never change again to `sent`."""
    if not isinstance(event, Saved | Ended):
        return {}
    fixed = [*folder.glob(f"{NOISE}/*.npz"), *checkpoints.saved(folder / "checkpoints", "best")[:1]]
    if isinstance(event, Saved):
        fixed.append(event.path)
    else:  # the record is last: once it exists, the run has ended
        fixed += [path for kind in ("final", "step") for path in checkpoints.saved(folder / "checkpoints", kind)]
    names = {str(path.relative_to(folder)): path for path in sorted(fixed)}
    found = {name: path.read_bytes() for name, path in names.items() if name not in sent}
    sent.update(found)
    for name in (*CHANGING, RUN):
        with suppress(FileNotFoundError):
            found[name] = (folder / name).read_bytes()
    return found


def write(folder: Path, files: Files) -> None:
    """Write what `saved_with` read, each file atomically, and the record last.

    A checkpoint that does not match its checksum is left out: the previous one is still there.
    """
    for name, content in files.items():
        place, _, bare = name.rpartition("/")
        atomic.make_folder(folder / place)
        if place == "checkpoints":
            with suppress(ValueError):
                checkpoints.keep(folder / place, bare, content)
        else:
            atomic.write(folder / name, content)
    if RUN in files:  # what it replaces
        for name in CHANGING:
            (folder / name).unlink(missing_ok=True)
        if not any(name.startswith("checkpoints/step-") for name in files):
            for path in checkpoints.saved(folder / "checkpoints"):
                path.unlink(missing_ok=True)


def _where(number: int) -> str:
    import ray

    node = ray.get_runtime_context().get_node_id()
    return f"{socket.gethostname()}/{node[:8]}" + (f", attempt {number}" if number > 1 else "")


@contextmanager
def _asking(flag: Any, stop: Any) -> Iterator[None]:
    """Ask the driver from time to time whether to stop, in a thread: training steps never wait for the answer."""
    import ray

    over = threading.Event()

    def ask() -> None:
        while not over.wait(ASK_EVERY):
            with suppress(ray.exceptions.RayError):
                if ray.get(flag.get.remote(), timeout=60):
                    stop.signal = signal.SIGTERM
                    return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed afterwards; those of attempts that were killed are removed by the next one."""
    top = Path(tempfile.gettempdir())
    for left in top.glob(f"{PREFIX}*-*"):
        number = left.name.split("-")[1]
        if os.name == "posix" and number.isdecimal() and not atomic.is_running(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

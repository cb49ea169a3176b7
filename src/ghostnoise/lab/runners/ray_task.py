"""A node's side of a Ray cluster: one attempt at a job, and the messages that it sends to the driver."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ghostnoise.lab.runners.execution import execute
from ghostnoise.lab.runners.job import Job, Place, Status
from ghostnoise.lab.store import atomic, checkpoints
from ghostnoise.lab.store.folder import NOISE
from ghostnoise.lab.train.stop import Stop

REPORT_EVERY = 0.5  # seconds between two messages about progress
ARRIVE_WITHIN = 120.0  # seconds for a message to arrive; a checkpoint can be large
# The result is last: once it exists, the run has ended.
WRITTEN = ("settings.json", "environment.json", "metrics.jsonl", "failure.json", "result.json")

# Removes a folder when its standard input ends, that is, when the process that started it has ended. It has another
# parent then, because Ray kills the children of a worker that exits.
REMOVE = """
import os, shutil, sys
if os.fork() == 0:
    sys.stdin.buffer.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

Files = dict[str, bytes]


@dataclass(frozen=True)
class Assignment:
    """An attempt at a job, and the files that it starts from.

    `storage` is a folder that all nodes can write; if None, files are exchanged with the driver.
    """

    job: Job
    attempt: int
    files: Files
    data: Path | None
    threads: int
    checkpoint_seconds: float
    storage: Path | None


@dataclass(frozen=True)
class Message:
    """A message of an attempt: that it has started, its progress, or the files that it has saved."""

    key: tuple[str, str]
    attempt: int
    where: str
    progress: tuple[int, int, float, float] | None = None
    files: Files | None = None


@dataclass(frozen=True)
class Completion:
    """How an attempt ended, and the files of its run folder."""

    status: Status
    message: str = ""
    files: Files = field(default_factory=dict)


class Mailbox:
    """A Ray actor that holds the latest message of each kind for the driver, and tells attempts when to stop."""

    def __init__(self) -> None:
        self.messages: dict[tuple[object, ...], Message] = {}
        self.stopping = False

    def put(self, message: Message) -> bool:
        """Store a message, and return whether its sender must stop."""
        kind = (message.key, message.progress is None, message.files is None)
        before = self.messages.pop(kind, message)
        self.messages[kind] = message if message.attempt >= before.attempt else before
        return self.stopping

    def take(self, stopping: bool) -> list[Message]:
        """Remove and return the messages; `stopping` is what `put` returns from now on."""
        self.stopping = stopping
        messages, self.messages = list(self.messages.values()), {}
        return messages


class Sender:
    """Sends the messages of an attempt to the mailbox; one that does not arrive does not end the run.

    A thread waits for the answers: while the main thread of a task waits for Ray, Ray gives its CPU to another task.
    """

    def __init__(self, thread: Executor, mailbox: Any, assignment: Assignment, stop: Stop) -> None:
        import ray

        job, node = assignment.job, ray.get_runtime_context().get_node_id()
        again = f", attempt {assignment.attempt}" if assignment.attempt > 1 else ""
        self.where = f"{socket.gethostname()}/{node[:8]}{again}"
        self.thread, self.mailbox, self.stop = thread, mailbox, stop
        self.key, self.attempt = (job.recipe, job.identity), assignment.attempt
        self.pending: Future[None] | None = None

    def send(self, progress: tuple[int, int, float, float] | None = None, files: Files | None = None) -> None:
        """Send a message after the last one has arrived."""
        self.wait()
        message = Message(self.key, self.attempt, self.where, progress, files)
        self.pending = self.thread.submit(self._deliver, message)

    def progress(self, done: int, total: int, loss: float, accuracy: float) -> None:
        """Send the progress of a run."""
        self.send((done, total, loss, accuracy))

    def free(self) -> bool:
        """Return whether the last message has arrived."""
        return self.pending is None or self.pending.done()

    def wait(self) -> None:
        """Wait until the last message has arrived."""
        if self.pending is not None:
            self.pending.result()

    def _deliver(self, message: Message) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            if ray.get(self.mailbox.put.remote(message), timeout=ARRIVE_WITHIN):
                self.stop.signal = signal.SIGTERM

    def saved(self, folder: Path) -> None:
        """Send the files that a run has saved."""
        self.send(files=files_of(folder))


def attempt(assignment: Assignment, mailbox: Any) -> Completion:
    """Run a job on this node, from the checkpoint in its assignment, until it ends or must stop."""
    stop = Stop()
    with temporary_folder() as scratch, ThreadPoolExecutor(1) as thread:
        sender = Sender(thread, mailbox, assignment, stop)
        sender.send()
        sender.wait()
        if stop.signal:
            return Completion("stopped")
        # The executor waits for its thread: the last message arrives before this returns.
        return _trained(assignment, sender, stop, scratch)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed afterwards, and that another process removes if this one is killed."""
    folder = tempfile.mkdtemp(prefix="ghostnoise-")
    reading, writing = os.pipe()
    try:
        if hasattr(os, "fork"):
            command = [sys.executable, "-I", "-S", "-c", REMOVE, folder]
            subprocess.run(command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           start_new_session=True)  # fmt: skip
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(reading)
        os.close(writing)


def _trained(assignment: Assignment, sender: Sender, stop: Stop, scratch: Path) -> Completion:
    job, apart = assignment.job, assignment.storage is None
    place = Place(assignment.storage or scratch, assignment.data, assignment.checkpoint_seconds)
    folder = place.folder(job)
    write(folder, assignment.files)
    saved = sender.saved if apart else lambda folder: None
    ended = execute(
        job, place, sender.progress, assignment.threads, saved=saved, stop=stop, every=REPORT_EVERY, ready=sender.free
    )  # training steps never wait for a message
    return Completion(ended.status, ended.message, files_of(folder) if apart else {})


def files_of(folder: Path) -> Files:
    """Read the files of a run folder, with only the last checkpoint."""
    paths = [*sorted(folder.glob(f"{NOISE}/*.npz")), *(folder / name for name in WRITTEN)]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.exists()}
    return _last_checkpoint(folder) | files


def _last_checkpoint(folder: Path) -> Files:
    """Read the last checkpoint that matches its checksum; this process has written it, so its state is not checked."""
    for path in checkpoints.saved(folder / "checkpoints"):
        with suppress(OSError, ValueError):
            return {f"checkpoints/{path.name}": checkpoints.intact(path)}
    return {}


def write(folder: Path, files: Files) -> None:
    """Write what `files_of` read, each file atomically, and the result last.

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

"""What a node of a Ray cluster does: one attempt at a job, and the letters that it sends home on the way."""

import signal
import socket
import tempfile
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ghostnoise.lab.engines.job import Job, Place, Status
from ghostnoise.lab.engines.work import execute
from ghostnoise.lab.store import atomic, checkpoints
from ghostnoise.lab.store.folder import NOISE
from ghostnoise.lab.train.stop import Stop

TOLD_EVERY = 0.5  # seconds between two letters about progress
WAITED = 120.0  # seconds for a letter to arrive; a checkpoint can be large
# The result last: it ends a run.
WRITTEN = ("settings.json", "environment.json", "metrics.jsonl", "failure.json", "result.json")

Files = dict[str, bytes]


@dataclass(frozen=True)
class Errand:
    """An attempt at a job: what it starts from, and what it needs to know."""

    job: Job
    attempt: int
    files: Files
    data: Path | None
    threads: int
    checkpoint_seconds: float
    storage: Path | None
    """Runs that all nodes can write; otherwise files come from the driver, and go there."""


@dataclass(frozen=True)
class Letter:
    """What an attempt tells on its way: that it has started, how far it is, or what it has saved."""

    key: tuple[str, str]
    attempt: int
    where: str
    progress: tuple[int, int, float, float] | None = None
    files: Files | None = None


@dataclass(frozen=True)
class Report:
    """How an attempt ended, and the files of its folder."""

    status: Status
    message: str = ""
    files: Files = field(default_factory=dict)


class Mailbox:
    """An actor: holds the latest letter of each kind until the driver takes it, and passes on the word to stop."""

    def __init__(self) -> None:
        self.letters: dict[tuple[object, ...], Letter] = {}
        self.stopping = False

    def put(self, letter: Letter) -> bool:
        """Take in a letter; whether its sender is to stop."""
        kind = (letter.key, letter.progress is None, letter.files is None)
        before = self.letters.pop(kind, letter)
        self.letters[kind] = letter if letter.attempt >= before.attempt else before
        return self.stopping

    def take(self, stopping: bool) -> list[Letter]:
        """Hand out the letters; whether senders are to stop from now on."""
        self.stopping = stopping
        letters, self.letters = list(self.letters.values()), {}
        return letters


class Post:
    """An attempt's way to the mailbox. A letter that does not arrive is no reason to end a run.

    A thread waits for answers: while a task's main thread waits for Ray, its CPU is given to another task.
    """

    def __init__(self, thread: Executor, mailbox: Any, errand: Errand, stop: Stop) -> None:
        import ray

        job, node = errand.job, ray.get_runtime_context().get_node_id()
        again = f", attempt {errand.attempt}" if errand.attempt > 1 else ""
        self.where = f"{socket.gethostname()}/{node[:8]}{again}"
        self.thread, self.mailbox, self.stop = thread, mailbox, stop
        self.key, self.attempt = (job.recipe, job.identity), errand.attempt
        self.pending: Future[None] | None = None

    def send(self, progress: tuple[int, int, float, float] | None = None, files: Files | None = None) -> None:
        """Send a letter once the last one has arrived."""
        self.wait()
        letter = Letter(self.key, self.attempt, self.where, progress, files)
        self.pending = self.thread.submit(self._deliver, letter)

    def progress(self, done: int, total: int, loss: float, accuracy: float) -> None:
        """Send how far a run is."""
        self.send((done, total, loss, accuracy))

    def free(self) -> bool:
        """Whether the last letter has arrived."""
        return self.pending is None or self.pending.done()

    def wait(self) -> None:
        """Wait until the last letter has arrived."""
        if self.pending is not None:
            self.pending.result()

    def _deliver(self, letter: Letter) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            if ray.get(self.mailbox.put.remote(letter), timeout=WAITED):
                self.stop.signal = signal.SIGTERM

    def saved(self, folder: Path) -> None:
        """Send what a run has saved."""
        self.send(files=files_of(folder))


def attempt(errand: Errand, mailbox: Any) -> Report:
    """Run a job on this node, from the checkpoint that came with it, to its end or until it is told to stop."""
    stop = Stop()
    with tempfile.TemporaryDirectory(prefix="ghostnoise-") as scratch, ThreadPoolExecutor(1) as thread:
        post = Post(thread, mailbox, errand, stop)
        post.send()
        post.wait()
        if stop.signal:
            return Report("stopped")
        return _trained(errand, post, stop, Path(scratch))  # once the last letter has arrived: the thread ends first


def _trained(errand: Errand, post: Post, stop: Stop, scratch: Path) -> Report:
    job, apart = errand.job, errand.storage is None
    place = Place(errand.storage or scratch, errand.data, errand.checkpoint_seconds)
    folder = place.folder(job)
    write(folder, errand.files)
    saved = post.saved if apart else lambda folder: None
    ended = execute(
        job, place, post.progress, errand.threads, saved=saved, stop=stop, every=TOLD_EVERY, ready=post.free
    )  # steps never wait for a letter
    return Report(ended.status, ended.message, files_of(folder) if apart else {})


def files_of(folder: Path) -> Files:
    """A run folder's files, of the checkpoints the last one."""
    last = checkpoints.saved(folder / "checkpoints")[:1]
    paths = [*last, *sorted(folder.glob(f"{NOISE}/*.npz")), *(folder / name for name in WRITTEN)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.exists()}


def write(folder: Path, files: Files) -> None:
    """Write what `files_of` read, each file wholly or not at all; a result comes last, when all else is there."""
    for name, content in files.items():
        place, _, bare = name.rpartition("/")
        atomic.make_folder(folder / place)
        if place == "checkpoints":
            checkpoints.keep(folder / place, bare, content)
        else:
            atomic.write(folder / name, content)

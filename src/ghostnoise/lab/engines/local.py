"""Worker processes on this machine. They outlive jobs, not the sweep; one that dies is replaced."""

import atexit
import itertools
import multiprocessing
import os
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ghostnoise.lab.engines import worker
from ghostnoise.lab.engines.aside import Aside, result
from ghostnoise.lab.engines.job import Ended, Event, Job, Place, Progressed, Started

DEATHS = 3  # of workers with the same job, after which the job is at fault
ASKED_EVERY = 0.1  # seconds between two looks at whether to stop
PATIENCE = 5.0  # seconds for idle workers to go

Tell = Callable[[Event], object]


def gpus() -> list[str]:
    """The CUDA devices, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


@dataclass
class Slot:
    """A worker's place, and what it is at."""

    number: int
    share: worker.Share
    process: SpawnProcess | None = None
    connection: Connection | None = None
    job: Job | None = None

    @property
    def where(self) -> str:
        """What it is called."""
        return f"worker {self.number}" + (f" on GPU {self.share.gpu}" if self.share.gpu else "")


class LocalEngine:
    """Runs jobs in `workers` processes with `threads` threads each.

    By default there is a worker for each of `gpus`, or for each core, and the cores are shared fairly; worker k takes
    GPU k modulo their number. A job whose worker dies goes on in another one from its last checkpoint, up to three
    times. A run that another process has is waited for.
    """

    def __init__(
        self, place: Place, workers: int | None = None, threads: int | None = None, gpus: Sequence[str] = ()
    ) -> None:
        from ghostnoise import doctor  # imports torch, which workers do once their GPU is chosen

        workers = workers or len(gpus) or doctor.cores()
        threads = threads or max(1, doctor.cores() // workers)
        self.place = place
        self.logs = tempfile.TemporaryDirectory(prefix="ghostnoise-workers-")
        self.slots = [
            Slot(number, worker.Share(place, Path(self.logs.name, f"{number}.log"), threads, gpu))
            for number, gpu in zip(range(workers), itertools.cycle(gpus or [None]))  # endless
        ]
        self.context = multiprocessing.get_context("spawn")
        self.queue: deque[Job] = deque()
        self.aside = Aside(place)
        self.deaths: Counter[str] = Counter()
        atexit.register(self.kill)  # before multiprocessing's own, which would wait for them

    def run(self, jobs: Sequence[Job], tell: Tell, stop: Callable[[], bool]) -> None:
        """Run all jobs and tell what happens, from the calling thread; once `stop()` is true, have all saved."""
        self.queue.extend(jobs)
        stopping = False
        try:
            while self.queue or self.aside.jobs or any(slot.job for slot in self.slots):
                if not stopping and stop():
                    stopping = True
                    self._stop(tell)
                if not stopping:
                    self._hand_out(tell)
                self._listen(tell, stopping)
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Let workers go."""
        for slot in self.slots:
            if slot.connection is not None:
                slot.connection.close()
                slot.connection = None
        for slot in self.slots:
            if slot.process is not None:
                slot.process.join(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """End workers at once."""
        atexit.unregister(self.kill)
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.join()
            self._empty(slot)
        self.logs.cleanup()

    def _hand_out(self, tell: Tell) -> None:
        over, free = self.aside.look()
        for ended in over:
            tell(ended)
        self.queue.extend(free)
        for slot in self.slots:
            if slot.job is None and self.queue:
                self._give(slot, self.queue.popleft())

    def _give(self, slot: Slot, job: Job) -> None:
        if slot.connection is None:
            slot.connection, theirs = self.context.Pipe()
            slot.process = self.context.Process(target=worker.main, args=(theirs, slot.share), name=slot.where)
            slot.process.start()
            theirs.close()
        slot.job = job
        with suppress(OSError):  # it died while it had nothing to do; heard of below
            slot.connection.send(job)

    def _listen(self, tell: Tell, stopping: bool) -> None:
        """Wait a moment for what workers say."""
        open_ = {slot.connection: slot for slot in self.slots if slot.connection is not None}
        for connection in wait(list(open_), ASKED_EVERY):
            slot = open_[connection]  # type: ignore[index]
            try:
                message = slot.connection.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._bury(slot, tell, stopping)
            else:
                self._pass_on(slot, message, tell, stopping)

    def _pass_on(self, slot: Slot, message: tuple, tell: Tell, stopping: bool) -> None:  # type: ignore[type-arg]
        job = slot.job
        if job is None:
            return
        match message:
            case ("started",):
                tell(Started(job, slot.where))
            case ("progress", done, total, loss, accuracy):
                tell(Progressed(job, done, total, loss, accuracy))
            case ("ended", status, text):
                slot.job = None
                if status == "elsewhere" and not stopping:
                    self.aside.put(job)
                elif status == "stopped" and not stopping:
                    self.queue.append(job)  # somebody else's signal
                else:
                    tell(Ended(job, "stopped" if status == "elsewhere" else status, text))

    def _bury(self, slot: Slot, tell: Tell, stopping: bool) -> None:
        """A worker is dead: its job goes back, unless it is over, or has taken too many with it."""
        job, why = slot.job, _obituary(slot)
        self._empty(slot)
        if job is None:
            return
        self.deaths[job.identity] += 1
        if (over := result(job, self.place)) is not None:
            tell(over)
        elif stopping:
            tell(Ended(job, "stopped"))
        elif self.deaths[job.identity] >= DEATHS:
            from ghostnoise.lab.engines.work import failed

            tell(failed(job, self.place, f"its worker died {DEATHS} times; the last one {why}"))
        else:
            self.queue.appendleft(job)

    def _empty(self, slot: Slot) -> None:
        if slot.connection is not None:
            slot.connection.close()
        slot.process = slot.connection = slot.job = None

    def _stop(self, tell: Tell) -> None:
        """Nothing new; what runs saves and stops."""
        for job in [*self.queue, *self.aside.clear()]:
            tell(Ended(job, "stopped"))
        self.queue.clear()
        for slot in self.slots:
            if slot.job is not None and slot.process is not None:
                slot.process.terminate()


def _obituary(slot: Slot) -> str:
    """How a worker ended, and the last line it left."""
    assert slot.process is not None
    slot.process.join()
    code = slot.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        how += ", as the system does where memory is short"
    with suppress(OSError):
        lines = slot.share.log.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return f"{how}: {said[-1].strip()}" if said else how
    return how

"""Train runs in worker processes on this machine. Workers are reused for many runs; one that dies is replaced."""

import atexit
import itertools
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from ghostnoise import doctor
from ghostnoise.lab.events import Ended, Event, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.sweep.execute import Deferred, Emit, Place, failed, result
from ghostnoise.lab.sweep.worker import Log, WorkerOptions, main

DEATHS = 3  # a run fails after this many of its workers have died
POLL_EVERY = 0.1  # seconds between two checks whether to stop
EXIT_WITHIN = 5.0  # seconds for idle workers to exit


def gpus() -> list[str]:
    """Return the names of the CUDA devices, as in CUDA_VISIBLE_DEVICES."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


@dataclass
class Slot:
    """A worker process, if it runs, and its run, if it has one."""

    number: int
    options: WorkerOptions
    log: Log
    process: SpawnProcess | None = None
    connection: Connection | None = None
    run: Run | None = None

    @property
    def where(self) -> str:
        """Return the name of the worker."""
        return f"worker {self.number}" + (f" on GPU {self.options.gpu}" if self.options.gpu else "")


class LocalRunner:
    """Trains runs in `workers` processes with `threads` threads each.

    By default there is one worker per GPU in `gpus`, or one per core, and the cores are shared equally; worker k uses
    GPU k modulo the number of GPUs. A run whose worker dies is resumed by another worker from its last checkpoint; it
    fails when three workers have died. If another process owns a run, the runner waits for it.
    """

    def __init__(
        self, place: Place, workers: int | None = None, threads: int | None = None, gpus: Sequence[str] = ()
    ) -> None:
        workers = workers or len(gpus) or doctor.cores()
        threads = threads or max(1, doctor.cores() // workers)
        self.place = place
        self.slots = [
            Slot(number, WorkerOptions(place, log := Log(), threads, gpu), log)
            for number, gpu in zip(range(workers), itertools.cycle(gpus or [None]))  # cycle is infinite
        ]
        self.context = multiprocessing.get_context("spawn")
        self.queue: deque[Run] = deque()
        self.deferred = Deferred(place)
        self.deaths: Counter[str] = Counter()
        atexit.register(self.kill)  # runs before multiprocessing's own handler, which would wait for the workers

    def run(self, runs: Sequence[Run], emit: Emit, stop: Callable[[], bool]) -> None:
        """Train all runs and emit events from the calling thread; once `stop()` is true, save all and return."""
        self.queue.extend(runs)
        stopping = False
        try:
            while self.queue or self.deferred.runs or any(slot.run for slot in self.slots):
                if not stopping and stop():
                    stopping = True
                    self._stop(emit)
                if not stopping:
                    self._hand_out(emit)
                self._listen(emit, stopping)
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Let the workers exit."""
        for slot in self.slots:
            if slot.connection is not None:
                slot.connection.close()
                slot.connection = None
        for slot in self.slots:
            if slot.process is not None:
                slot.process.join(EXIT_WITHIN)
        self.kill()

    def kill(self) -> None:
        """Kill the workers."""
        atexit.unregister(self.kill)
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.join()
            self._empty(slot)
            slot.log.close()

    def _hand_out(self, emit: Emit) -> None:
        over, free = self.deferred.check()
        for run, ended in over:
            emit(run, ended)
        self.queue.extend(free)
        for slot in self.slots:
            if slot.run is None and self.queue:
                self._give(slot, self.queue.popleft())

    def _give(self, slot: Slot, run: Run) -> None:
        if slot.connection is None:
            slot.log.clear()
            slot.connection, theirs = self.context.Pipe()
            slot.process = self.context.Process(target=main, args=(theirs, slot.options), name=slot.where)
            with _interrupts_blocked():
                slot.process.start()
            theirs.close()
        slot.run = run
        with suppress(OSError):  # it died while idle; _listen notices
            slot.connection.send(run)

    def _listen(self, emit: Emit, stopping: bool) -> None:
        """Wait for messages from workers, for a moment."""
        open_ = {slot.connection: slot for slot in self.slots if slot.connection is not None}
        for connection in wait(list(open_), POLL_EVERY):
            slot = open_[connection]  # type: ignore[index]
            try:
                message = slot.connection.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._replace(slot, emit, stopping)
            else:
                self._handle(slot, message, emit, stopping)

    def _handle(self, slot: Slot, event: Event, emit: Emit, stopping: bool) -> None:
        run = slot.run
        if run is None:
            return
        if not isinstance(event, Ended):
            emit(run, replace(event, where=slot.where) if isinstance(event, Started) else event)
            return
        slot.run = None
        if event.status == "elsewhere" and not stopping:
            self.deferred.add(run)
        elif event.status == "stopped" and not stopping:
            self.queue.append(run)  # the signal did not come from this runner
        else:
            emit(run, replace(event, status="stopped") if event.status == "elsewhere" else event)

    def _replace(self, slot: Slot, emit: Emit, stopping: bool) -> None:
        """Return the run of a dead worker to the queue, unless it has ended or too many of its workers have died."""
        run, why = slot.run, _cause_of_death(slot)
        self._empty(slot)
        if run is None:
            return
        self.deaths[run.identity] += 1
        if (over := result(run, self.place)) is not None:
            emit(run, over)
        elif stopping:
            emit(run, Ended("stopped"))
        elif self.deaths[run.identity] >= DEATHS:
            emit(run, failed(run, self.place, f"its worker died {DEATHS} times; the last time it {why}"))
        else:
            self.queue.appendleft(run)

    def _empty(self, slot: Slot) -> None:
        if slot.connection is not None:
            slot.connection.close()
        slot.process = slot.connection = slot.run = None

    def _stop(self, emit: Emit) -> None:
        """Start no more runs; have running ones save a checkpoint and stop."""
        for run in [*self.queue, *self.deferred.clear()]:
            emit(run, Ended("stopped"))
        self.queue.clear()
        for slot in self.slots:
            if slot.run is not None and slot.process is not None:
                slot.process.terminate()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C for workers until they ignore it: they would end with a traceback while they are starting."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise it is started with the first worker, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cause_of_death(slot: Slot) -> str:
    """Return how a worker ended, and the last line of its output."""
    assert slot.process is not None
    slot.process.join()
    code = slot.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    if code == -signal.SIGKILL:
        how += ", possibly because the system ran out of memory"
    return ": ".join(filter(None, [how, slot.log.last_line()]))

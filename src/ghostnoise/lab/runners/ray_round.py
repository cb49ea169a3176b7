"""The driver's side of a Ray cluster: start jobs as tasks, receive what they save, and restart jobs that were lost.

The driver holds the lock of a job's run folder until the job has ended. A job whose node has vanished starts again on
another node, from the last checkpoint that the driver received.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.runners.execution import failed
from ghostnoise.lab.runners.job import Emit, Ended, Job, Place, Progressed, Started, Status
from ghostnoise.lab.runners.ray_task import Assignment, Completion, Files, Mailbox, Message, attempt, write
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.store.folder import Busy

if TYPE_CHECKING:
    from ghostnoise.lab.runners.ray import Connection

LOSSES = 5  # a job fails after it was lost this many times
POLL_EVERY = 0.2  # seconds
CHECK_EVERY = 5.0  # seconds between two checks of the nodes, and of runs that other processes own
STOP_WITHIN = 60.0  # seconds for running jobs to save a checkpoint and end
NODES_WITHIN = 300.0  # seconds to wait for a node that can hold a run

ELSEWHERE = "another process trains this run"


@dataclass(frozen=True)
class Terms:
    """The resources of a job, and where it reads and writes; if `shared`, nodes write `runs` themselves."""

    cpus: float
    gpus: float
    threads: int
    checkpoint_seconds: float
    data: Path | None
    runs: Path
    shared: bool


@dataclass(eq=False)
class _Held:
    """A job that has not ended."""

    job: Job
    folder: RunFolder
    owned: bool = False
    started: bool = False
    attempt: int = 0
    losses: int = 0
    again: float = 0.0  # when to check whether another process still owns it


class Round:
    """One call of `RayRunner.run`."""

    def __init__(
        self, connection: "Connection", terms: Terms, jobs: Sequence[Job], emit: Emit, stop: Callable[[], bool]
    ) -> None:
        self.connection, self.ray, self.terms, self.emit, self.stop = connection, connection.ray, terms, emit, stop
        runs = terms.runs
        self.waiting = deque(_Held(job, RunFolder(runs / job.recipe / job.identity, lambda text: None)) for job in jobs)
        self.elsewhere: list[_Held] = []
        self.running: dict[Any, _Held] = {}
        self.stopped_at: float | None = None
        self.slots, self.checked, self.seen = 1, 0.0, time.monotonic()

    def run(self) -> None:
        """Run until all jobs have ended."""
        self.mailbox = self.connection.actor(Mailbox)
        # On a GPU, one process for each attempt: its GPU memory is freed when it exits.
        task = self.ray.remote(max_calls=int(self.terms.gpus > 0), max_retries=0)(attempt)
        self.task = task.options(num_cpus=self.terms.cpus, num_gpus=self.terms.gpus)
        try:
            while self.waiting or self.elsewhere or self.running:
                self._check_stop()
                self._check_nodes()
                self._submit()
                ready = self._wait()
                self._receive()  # a task is ready only after its messages have arrived
                for ref in ready:
                    self._settle(ref, self.running.pop(ref))
        finally:
            self._cancel()
            self.ray.kill(self.mailbox)

    def _check_stop(self) -> None:
        now = time.monotonic()
        if self.stopped_at is None and self.stop():
            self.stopped_at = now
            for ref, held in self.running.items():
                if not held.started:
                    self.ray.cancel(ref)
        if self.stopped_at is None:
            return
        if now - self.stopped_at > STOP_WITHIN:
            self.waiting.extend(self._cancel())
        while self.waiting:
            self._end(self.waiting.popleft(), "stopped")
        while self.elsewhere:
            self._end(self.elsewhere.pop(), "elsewhere", ELSEWHERE)

    def _check_nodes(self) -> None:
        """Count the nodes, fail all jobs if there were none for long, and retry runs that other processes owned."""
        now = time.monotonic()
        if now - self.checked >= CHECK_EVERY:
            self.checked, self.slots = now, self.connection.slots(self.terms.cpus, self.terms.gpus)
            self.seen = now if self.slots else self.seen
        if now - self.seen > NODES_WITHIN:
            self.waiting.extend(self._cancel())
            while self.waiting:
                self._fail(self.waiting.popleft(), f"no node could hold a run for {NODES_WITHIN:.0f} s; add a node")
        due = [held for held in self.elsewhere if held.again <= now]
        self.elsewhere = [held for held in self.elsewhere if held.again > now]
        self.waiting.extendleft(due)

    def _submit(self) -> None:
        """Submit the jobs that can run, and as many again: pending tasks make an autoscaling cluster grow."""
        while self.waiting and len(self.running) < 2 * max(1, self.slots):
            held = self.waiting.popleft()
            try:
                self._begin(held)
            except Busy as error:
                self._defer(held, str(error))
            except UserError as error:
                self._fail(held, str(error))

    def _begin(self, held: _Held) -> None:
        terms, folder = self.terms, held.folder
        if not terms.shared and not held.owned:
            folder.own()
            held.owned = True
        result = folder.result()
        if result is not None:
            self._end(held, result["status"])
            return
        (folder.path / "failure.json").unlink(missing_ok=True)
        held.attempt += 1
        held.started = False
        assignment = Assignment(
            held.job, held.attempt, {} if terms.shared else _checkpoints(folder), terms.data, terms.threads,
            terms.checkpoint_seconds, terms.runs if terms.shared else None,
        )  # fmt: skip
        self.running[self.task.remote(assignment, self.mailbox)] = held

    def _wait(self) -> list[Any]:
        if not self.running:
            if self.elsewhere:
                time.sleep(POLL_EVERY)
            return []
        refs = list(self.running)
        ready: list[Any] = self.ray.wait(refs, num_returns=len(refs), timeout=POLL_EVERY)[0]
        return ready

    def _receive(self) -> None:
        try:
            messages: list[Message] = self.ray.get(self.mailbox.take.remote(self.stopped_at is not None), timeout=60)
        except self.ray.exceptions.RayError:
            return  # the mailbox restarts, and receives the next message of each job
        held_by = {(held.job.recipe, held.job.identity): held for held in self.running.values()}
        for message in messages:
            held = held_by.get(message.key)
            if held is None or held.attempt != message.attempt:
                continue  # from an attempt that was given up
            if not held.started:
                held.started = True
                self.emit(Started(held.job, message.where))
            if message.files is not None:
                with suppress(UserError):  # such as a full disk: the last write reports it, if it persists
                    write(held.folder.path, message.files)
            if message.progress is not None:
                self.emit(Progressed(held.job, *message.progress))

    def _settle(self, ref: Any, held: _Held) -> None:
        """End, restart or fail the job of an attempt that has ended."""
        errors = self.ray.exceptions
        try:
            completion: Completion = self.ray.get(ref)
            write(held.folder.path, completion.files)
        except errors.RayTaskError as error:
            self._fail(held, str(error).strip().splitlines()[-1], str(error))
        except errors.RayError as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self._lose(held, f"{type(error).__name__}: {reason}")
        except UserError as error:
            self._fail(held, str(error))
        else:
            if completion.status == "elsewhere":
                self._defer(held, ELSEWHERE)
            elif completion.status == "stopped":
                self._lose(held, "its process was stopped by a signal")
            elif completion.status == "failed" and not (held.folder.path / "failure.json").exists():
                self._fail(held, completion.message)  # its node could not write the reason
            else:
                self._end(held, completion.status, completion.message)

    def _lose(self, held: _Held, reason: str) -> None:
        """Start a lost job again, unless the round is stopping or it was lost too often."""
        held.losses += 1
        if self.stopped_at is not None:
            self._end(held, "stopped")
        elif held.losses >= LOSSES:
            self._fail(held, f"lost {LOSSES} times; the last time: {reason}")
        else:
            self.waiting.appendleft(held)

    def _defer(self, held: _Held, message: str) -> None:
        if self.stopped_at is not None:
            self._end(held, "elsewhere", message)
            return
        held.again = time.monotonic() + CHECK_EVERY
        self.elsewhere.append(held)

    def _fail(self, held: _Held, message: str, trace: str = "") -> None:
        ended = failed(held.job, Place(self.terms.runs), message, trace)
        held.folder.release()
        self.emit(ended)

    def _end(self, held: _Held, status: Status, message: str = "") -> None:
        held.folder.release()
        self.emit(Ended(held.job, status, message))

    def _cancel(self) -> list[_Held]:
        """Cancel all running attempts, and return their jobs."""
        taken = list(self.running.values())
        for ref in self.running:
            with suppress(Exception):
                self.ray.cancel(ref, force=True)
        self.running.clear()
        for held in [*taken, *self.waiting]:
            held.folder.release()
        return taken


def _checkpoints(folder: RunFolder) -> Files:
    """Return the checkpoints that can be read, the last one last; a node restores the last one that it can."""
    if folder.latest() is None:
        return {}
    found = checkpoints.readable(folder.path / "checkpoints", folder.warn, rename=True)
    return {f"checkpoints/{each.path.name}": each.content for each in reversed(list(found))}

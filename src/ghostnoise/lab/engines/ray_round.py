"""The driver's side of a Ray cluster: hands out jobs, takes in what they save, and starts those again that were lost.

The driver holds the lock of a job's folder for as long as the job is its own. A job whose node vanished starts again
elsewhere, from the last checkpoint that came back.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostnoise.lab.engines.job import Ended, Event, Job, Place, Progressed, Started, Status
from ghostnoise.lab.engines.ray_connection import Connection
from ghostnoise.lab.engines.ray_task import Errand, Files, Letter, Mailbox, Report, attempt, write
from ghostnoise.lab.engines.work import failed
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.store.folder import Busy

LOSSES = 5  # of one job, before it fails
POLLED_EVERY = 0.2  # seconds
LOOKED_EVERY = 5.0  # seconds between two looks at the nodes, and at runs that others have
STOPPED_WITHIN = 60.0  # seconds for running jobs to save and end
NODES_WITHIN = 300.0  # seconds without a node that can hold a run

ELSEWHERE = "another process trains this run"


@dataclass(frozen=True)
class Terms:
    """What a job gets, and where it reads and writes."""

    cpus: float
    gpus: float
    threads: int
    checkpoint_seconds: float
    data: Path | None
    runs: Path
    shared: bool
    """Whether nodes write `runs` themselves."""


@dataclass(eq=False)
class _Held:
    """A job on its way."""

    job: Job
    folder: RunFolder
    owned: bool = False
    started: bool = False
    attempt: int = 0
    losses: int = 0
    again: float = 0.0  # when to look whether others still have it


class Round:
    """One call of `run`."""

    def __init__(
        self, connection: Connection, terms: Terms, jobs: Sequence[Job], tell: Callable[[Event], object],
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.connection, self.ray, self.terms, self.tell, self.stop = connection, connection.ray, terms, tell, stop
        runs = terms.runs
        self.waiting = deque(_Held(job, RunFolder(runs / job.recipe / job.identity, lambda text: None)) for job in jobs)
        self.elsewhere: list[_Held] = []
        self.running: dict[Any, _Held] = {}
        self.stopped_at: float | None = None
        self.slots, self.looked, self.seen = 1, 0.0, time.monotonic()

    def run(self) -> None:
        """Until all jobs have ended."""
        self.mailbox = self.connection.actor(Mailbox)
        # On a GPU a process for each attempt, whose memory there ends with it.
        task = self.ray.remote(max_calls=int(self.terms.gpus > 0), max_retries=0)(attempt)
        self.task = task.options(num_cpus=self.terms.cpus, num_gpus=self.terms.gpus)
        try:
            while self.waiting or self.elsewhere or self.running:
                self._heed_stop()
                self._look_around()
                self._send_out()
                ready = self._wait()
                self._read_mail()  # all that a task sent is there before it is ready
                for ref in ready:
                    self._settle(ref, self.running.pop(ref))
        finally:
            self._abandon()
            self.ray.kill(self.mailbox)

    def _heed_stop(self) -> None:
        now = time.monotonic()
        if self.stopped_at is None and self.stop():
            self.stopped_at = now
            for ref, held in self.running.items():
                if not held.started:
                    self.ray.cancel(ref)
        if self.stopped_at is None:
            return
        if now - self.stopped_at > STOPPED_WITHIN:
            self.waiting.extend(self._abandon())
        while self.waiting:
            self._end(self.waiting.popleft(), "stopped")
        while self.elsewhere:
            self._end(self.elsewhere.pop(), "elsewhere", ELSEWHERE)

    def _look_around(self) -> None:
        """Count nodes, give up if there have been none for long, and see to runs that others had."""
        now = time.monotonic()
        if now - self.looked >= LOOKED_EVERY:
            self.looked, self.slots = now, self.connection.slots(self.terms.cpus, self.terms.gpus)
            self.seen = now if self.slots else self.seen
        if now - self.seen > NODES_WITHIN:
            self.waiting.extend(self._abandon())
            while self.waiting:
                self._fail(self.waiting.popleft(), f"no node can hold a run, for {NODES_WITHIN:.0f} s now; add one")
        due = [held for held in self.elsewhere if held.again <= now]
        self.elsewhere = [held for held in self.elsewhere if held.again > now]
        self.waiting.extendleft(due)

    def _send_out(self) -> None:
        """Have as many jobs with Ray as can run, and as many that wait there: a cluster that grows sees them."""
        while self.waiting and len(self.running) < 2 * max(1, self.slots):
            held = self.waiting.popleft()
            try:
                self._begin(held)
            except Busy as error:
                self._put_off(held, str(error))
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
        errand = Errand(
            held.job, held.attempt, {} if terms.shared else _checkpoint(folder), terms.data, terms.threads,
            terms.checkpoint_seconds, terms.runs if terms.shared else None,
        )  # fmt: skip
        self.running[self.task.remote(errand, self.mailbox)] = held

    def _wait(self) -> list[Any]:
        if not self.running:
            if self.elsewhere:
                time.sleep(POLLED_EVERY)
            return []
        refs = list(self.running)
        ready: list[Any] = self.ray.wait(refs, num_returns=len(refs), timeout=POLLED_EVERY)[0]
        return ready

    def _read_mail(self) -> None:
        try:
            letters: list[Letter] = self.ray.get(self.mailbox.take.remote(self.stopped_at is not None), timeout=60)
        except self.ray.exceptions.RayError:
            return  # it starts again; what a job tells next arrives
        held_by = {(held.job.recipe, held.job.identity): held for held in self.running.values()}
        for letter in letters:
            held = held_by.get(letter.key)
            if held is None or held.attempt != letter.attempt:
                continue  # from a node that was given up
            if not held.started:
                held.started = True
                self.tell(Started(held.job, letter.where))
            if letter.files is not None:
                with suppress(UserError):  # such as a full disk: said at the end, if it lasts
                    write(held.folder.path, letter.files)
            if letter.progress is not None:
                self.tell(Progressed(held.job, *letter.progress))

    def _settle(self, ref: Any, held: _Held) -> None:
        """What an attempt's end means for its job."""
        errors = self.ray.exceptions
        try:
            report: Report = self.ray.get(ref)
            write(held.folder.path, report.files)
        except errors.RayTaskError as error:
            self._fail(held, str(error).strip().splitlines()[-1], str(error))
        except errors.RayError as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self._lose(held, f"{type(error).__name__}: {reason}")
        except UserError as error:
            self._fail(held, str(error))
        else:
            if report.status == "elsewhere":
                self._put_off(held, ELSEWHERE)
            elif report.status == "stopped":
                self._lose(held, "stopped by a signal to its process")
            elif report.status == "failed" and not (held.folder.path / "failure.json").exists():
                self._fail(held, report.message)  # its node could not write
            else:
                self._end(held, report.status, report.message)

    def _lose(self, held: _Held, reason: str) -> None:
        """Start again elsewhere, unless all are to stop, or it was lost too often."""
        held.losses += 1
        if self.stopped_at is not None:
            self._end(held, "stopped")
        elif held.losses >= LOSSES:
            self._fail(held, f"lost {LOSSES} times, the last time by {reason}")
        else:
            self.waiting.appendleft(held)

    def _put_off(self, held: _Held, message: str) -> None:
        if self.stopped_at is not None:
            self._end(held, "elsewhere", message)
            return
        held.again = time.monotonic() + LOOKED_EVERY
        self.elsewhere.append(held)

    def _fail(self, held: _Held, message: str, trace: str = "") -> None:
        ended = failed(held.job, Place(self.terms.runs), message, trace)
        held.folder.release()
        self.tell(ended)

    def _end(self, held: _Held, status: Status, message: str = "") -> None:
        held.folder.release()
        self.tell(Ended(held.job, status, message))

    def _abandon(self) -> list[_Held]:
        """End the attempts that run, and take their jobs back."""
        taken = list(self.running.values())
        for ref in self.running:
            with suppress(Exception):
                self.ray.cancel(ref, force=True)
        self.running.clear()
        for held in [*taken, *self.waiting]:
            held.folder.release()
        return taken


def _checkpoint(folder: RunFolder) -> Files:
    """The last good checkpoint."""
    content = folder.latest()
    if content is None:
        return {}
    return {f"checkpoints/{checkpoints.saved(folder.path / 'checkpoints')[0].name}": content}

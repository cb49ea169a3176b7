"""Train runs on a Ray cluster that needs no shared file system: what runs save comes back with their events.

The driver is the process that started the sweep, on a node of the cluster. It holds the lock of a run's folder until
the run has ended. A run whose node has vanished starts again on another node, from the last checkpoint that came back.
`ray_node` is a node's side of the work.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Ended, Event, Started
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import Busy, RunFolder
from ghostnoise.lab.sweep.execute import Emit, Place, failed, result
from ghostnoise.lab.sweep.ray_node import Files, Flag, attempt, write
from ghostnoise.text import install_command

ANSWER_WITHIN = 20.0  # seconds for a cluster to answer
HEAD_WITHIN = 30.0  # seconds without its head after which a sweep ends; Ray ends the process after 60 seconds
LOSSES = 5  # a run fails after it was lost this many times
POLL_EVERY = 0.2  # seconds
CHECK_EVERY = 5.0  # seconds between two checks of the nodes, and of runs that other processes own
STOP_WITHIN = 60.0  # seconds for running attempts to save a checkpoint and end
NODES_WITHIN = 300.0  # seconds to wait for a node that can hold a run


class HeadLost(UserError):
    """The head of the cluster does not answer any more."""


@dataclass(eq=False)
class _Held:
    """A run that has not ended, and the state of its attempts."""

    run: Run
    folder: RunFolder
    owned: bool = False
    started: bool = False
    attempt: int = 0
    losses: int = 0
    again: float = 0.0  # when to check whether another process still owns it
    unwritten: Files = field(default_factory=dict)  # files that came back and could not be written, for the next time


class RayRunner:
    """Trains runs as tasks of a Ray cluster: the one at `address`, or one on this machine that `close()` shuts down."""

    def __init__(
        self, place: Place, *, address: str | None = None, cpus: float = 1, gpus: float = 0,
        storage: str | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        if not cpus > 0:
            raise UserError(f"--cpus-per-run {cpus:g}: must be more than 0; give for example 1")
        if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
            raise UserError(f"--gpus-per-run {gpus:g}: must be 0, a fraction of 1, or a whole number; round it")
        data = None if place.data is None else place.data.absolute()
        self.place = replace(place, data=data, runs=place.runs if storage is None else _folder(storage))
        self.shared, self.cpus, self.gpus, self.lost = storage is not None, cpus, gpus, False
        self.threads = max(1, int(cpus)) if threads is None else threads
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.ray: Any = _import(local=address == "local")
        self.opened = not self.ray.is_initialized()
        if self.opened:
            if address not in ("local", "auto"):
                _check_address(address)
            _init(self.ray, address)
        self.head = str(self.ray.get_runtime_context().gcs_address)
        if not self.slots():
            self.close()
            raise UserError(
                f"--cpus-per-run {cpus:g}, --gpus-per-run {gpus:g}: no node has that many; ask for less, or add a node"
            )

    def slots(self) -> int:
        """Return how many runs fit on the nodes of the cluster."""
        total = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = int(has.get("CPU", 0) / self.cpus + 1e-6)
                total += min(fits, int(has.get("GPU", 0) / self.gpus + 1e-6)) if self.gpus else fits
        return total

    def run(self, runs: Sequence[Run], emit: Emit, stop: Callable[[], bool]) -> None:
        """Train all runs and emit their events; once `stop()` is true, have them save a checkpoint, and return."""
        for run in runs:
            if run.settings.train.device == "cuda" and not self.gpus:
                raise UserError(
                    f"{run.name}: train.device=cuda needs a GPU, but --gpus-per-run is 0; give the number of GPUs per "
                    "run, which can be a fraction"
                )
        _Round(self, runs, emit, stop).run()

    def close(self) -> None:
        """Disconnect, and shut down a cluster that was started here."""
        if self.opened and not self.lost:
            self.ray.shutdown()
            self.opened = False


class _Round:
    """One call of `RayRunner.run`."""

    def __init__(self, runner: RayRunner, runs: Sequence[Run], emit: Emit, stop: Callable[[], bool]) -> None:
        self.runner, self.ray, self.place, self.emit, self.stop = runner, runner.ray, runner.place, emit, stop
        self.waiting = deque(_Held(run, RunFolder(self.place.folder(run), lambda text: None)) for run in runs)
        self.elsewhere: list[_Held] = []
        self.running: dict[Any, _Held] = {}
        self.stopped_at: float | None = None
        self.slots, self.checked = 1, 0.0
        self.seen = self.answered = time.monotonic()
        self.thread = ThreadPoolExecutor(1)
        self.counted: Future[None] | None = None

    def run(self) -> None:
        """Run until all runs have ended."""
        here = self.ray.get_runtime_context().get_node_id()
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self.flag = self.ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=affinity)(Flag).remote()
        # On a GPU, one process for each attempt: its GPU memory is freed when it exits.
        task = self.ray.remote(max_calls=int(self.runner.gpus > 0), max_retries=0)(attempt)
        self.task = task.options(num_cpus=self.runner.cpus, num_gpus=self.runner.gpus, num_returns="streaming")
        try:
            while self.waiting or self.elsewhere or self.running:
                self._check_stop()
                self._check_nodes()
                self._submit()
                for stream in self._wait():
                    self._receive(stream, self.running[stream])
        except HeadLost:
            self.runner.lost = True
            for held in [*self.running.values(), *self.waiting]:
                held.folder.release()
            raise  # every other call to Ray would wait for the head
        except BaseException:
            self._cancel()
            raise
        finally:
            self.thread.shutdown(wait=False)
        self.ray.kill(self.flag)

    def _check_stop(self) -> None:
        now = time.monotonic()
        if self.stopped_at is None and self.stop():
            self.stopped_at = now
            self.flag.set.remote()
            for stream, held in self.running.items():
                if not held.started:
                    self.ray.cancel(stream)
        if self.stopped_at is None:
            return
        if now - self.stopped_at > STOP_WITHIN:
            self.waiting.extend(self._cancel())
        while self.waiting:
            self._end(self.waiting.popleft(), Ended("stopped"))
        while self.elsewhere:
            self._end(self.elsewhere.pop(), Ended("elsewhere"))

    def _check_nodes(self) -> None:
        """Count the nodes, fail all runs if there were none for long, and retry runs that other processes owned."""
        now = time.monotonic()
        if now - self.checked >= CHECK_EVERY and (self.counted is None or self.counted.done()):
            self.checked = now
            self.counted = self.thread.submit(self._count)  # without its head, Ray does not answer
        if now - self.answered > HEAD_WITHIN:
            raise HeadLost(
                f"the head of the Ray cluster, {self.runner.head}, has not answered for {HEAD_WITHIN:.0f} s; what came "
                "back from the nodes is saved; start the cluster again, and repeat the command to resume"
            )
        if now - self.seen > NODES_WITHIN:
            self.waiting.extend(self._cancel())
            while self.waiting:
                self._fail(self.waiting.popleft(), f"no node could hold a run for {NODES_WITHIN:.0f} s; add a node")
        due = [held for held in self.elsewhere if held.again <= now]
        self.elsewhere = [held for held in self.elsewhere if held.again > now]
        self.waiting.extendleft(due)

    def _count(self) -> None:
        if _answers(self.runner.head):
            self.slots = self.runner.slots()
            self.answered = time.monotonic()
            self.seen = self.answered if self.slots else self.seen

    def _submit(self) -> None:
        """Submit the runs that fit, and as many again: pending tasks make an autoscaling cluster grow."""
        while self.waiting and len(self.running) < 2 * max(1, self.slots):
            held = self.waiting.popleft()
            try:
                self._begin(held)
            except Busy:
                self._defer(held)
            except UserError as error:
                self._fail(held, str(error))

    def _begin(self, held: _Held) -> None:
        if not self.runner.shared and not held.owned:
            if (over := result(held.run, self.place)) is not None:
                self._end(held, over)
                return
            found = held.folder.start()
            held.owned = True
        elif not self.runner.shared:
            found = checkpoints.latest(held.folder.path / "checkpoints", held.folder.warn)
        files: Files | None = None
        if not self.runner.shared:
            files = {} if found is None else _files(held.folder)
        (held.folder.path / "failure.json").unlink(missing_ok=True)
        held.attempt, held.started = held.attempt + 1, False
        stream = self.task.remote(held.run, held.attempt, self.place, self.runner.threads, files, self.flag)
        self.running[stream] = held

    def _wait(self) -> list[Any]:
        """Return the streams that have an event, or have ended."""
        if not self.running:
            time.sleep(POLL_EVERY if self.elsewhere else 0)
            return []
        ready: list[Any] = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_EVERY, fetch_local=False)[0]
        return ready

    def _receive(self, stream: Any, held: _Held) -> None:
        """Take an event from a stream, and write the files that came with it."""
        errors = self.ray.exceptions
        try:
            event: Event
            event, files = self.ray.get(next(stream))
        except StopIteration:
            self._lose(stream, held, "its process was stopped")
        except errors.RayTaskError as error:
            if self.stopped_at is not None:  # such as an attempt that was cancelled while it started
                self._lose(stream, held, "its process was stopped")
                return
            del self.running[stream]
            self._fail(held, str(error).strip().splitlines()[-1], str(error))
        except errors.RayError as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self._lose(stream, held, f"{type(error).__name__}: {reason}")
        else:
            self._take(stream, held, event, files)

    def _take(self, stream: Any, held: _Held, event: Event, files: Files) -> None:
        held.unwritten |= files
        try:
            write(held.folder.path, held.unwritten)
            held.unwritten = {}
        except UserError as error:  # such as a full disk: the last write reports it, if it persists
            if isinstance(event, Ended):
                event = Ended("failed", message=str(error))
        if isinstance(event, Ended):
            del self.running[stream]
            if event.status == "elsewhere":
                self._defer(held)
            elif event.status == "stopped" and self.stopped_at is None:
                self._lose(None, held, "its process was stopped by a signal")
            elif event.status == "failed" and not (held.folder.path / "failure.json").exists():
                self._fail(held, event.message)  # its node could not write the reason
            else:
                self._end(held, event)
            return
        held.started = True
        if isinstance(event, Started):
            event = replace(event, run=replace(event.run, folder=held.folder.path))
        self.emit(held.run, event)

    def _lose(self, stream: Any, held: _Held, reason: str) -> None:
        """Start a lost run again, unless the round is stopping or it was lost too often."""
        self.running.pop(stream, None)
        held.losses += 1
        if self.stopped_at is not None:
            self._end(held, Ended("stopped"))
        elif held.losses >= LOSSES:
            self._fail(held, f"lost {LOSSES} times; the last time: {reason}")
        else:
            self.waiting.appendleft(held)

    def _defer(self, held: _Held) -> None:
        if self.stopped_at is not None:
            self._end(held, Ended("elsewhere"))
            return
        held.again = time.monotonic() + CHECK_EVERY
        self.elsewhere.append(held)

    def _fail(self, held: _Held, message: str, trace: str = "") -> None:
        ended = failed(held.run, self.place, message, trace)
        held.folder.release()
        self.emit(held.run, ended)

    def _end(self, held: _Held, event: Ended) -> None:
        held.folder.release()
        if event.run is not None:
            event = replace(event, run=replace(event.run, folder=held.folder.path))
        self.emit(held.run, event)

    def _cancel(self) -> list[_Held]:
        """Cancel all running attempts, and return their runs."""
        taken = list(self.running.values())
        for stream in self.running:
            with suppress(Exception):
                self.ray.cancel(stream, force=True)
        self.running.clear()
        for held in [*taken, *self.waiting]:
            held.folder.release()
            held.owned = False
        return taken


def _files(folder: RunFolder) -> Files:
    """Return the checkpoints that can be read, the last one last; a node restores the last one that it can."""
    found = list(checkpoints.readable(folder.path / "checkpoints", folder.warn, rename=True))
    files = {f"checkpoints/{each.path.name}": each.content for each in reversed(found)}
    best = next(checkpoints.readable(folder.path / "checkpoints", folder.warn, rename=True, kinds=["best"]), None)
    return files if best is None else files | {f"checkpoints/{best.path.name}": best.content}


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_WITHIN / 4).close()
    except (OSError, ValueError):
        return False
    return True


def _import(local: bool) -> ModuleType:
    """Import Ray, without usage reports and without its own packaging of the working directory."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if local:  # read when Ray is imported: the node then uses the loopback address, and listens on no other
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError(f"--runner ray: needs the package ray ({error}); run {install_command('ray')}") from None
    return ray


def _check_address(address: str) -> None:
    """Raise if no cluster answers at an address: Ray itself would try for minutes."""
    remedy = "start the cluster (`ray start --head`), or give the address of its head, such as ray-head:6379"
    if address.startswith("ray://"):
        raise UserError(
            f"--address {address}: Ray clients cannot stream events; run the command on a node of the cluster, with "
            "--address auto"
        )
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or " " in address:
        raise UserError(f"--address {address}: must be HOST:PORT or auto; {remedy}")
    try:
        socket.create_connection((host, port), timeout=ANSWER_WITHIN).close()
    except OSError as error:
        raise UserError(f"--address {address}: cannot be reached ({error.strerror or error}); {remedy}") from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answers = subprocess.run(command, capture_output=True, timeout=ANSWER_WITHIN).returncode == 0
    except subprocess.TimeoutExpired:
        answers = False
    if not answers:
        raise UserError(f"--address {address}: the server at this address is not a Ray cluster; {remedy}")


def _init(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        options["include_dashboard"] = False
    try:
        with _same_signals():
            ray.init(address, **options)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--address {address}: Ray cannot connect ({reason}); this machine must be a node of the cluster "
            "(`ray start --address=HEAD:6379`)"
        ) from error


@contextmanager
def _same_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _folder(storage: str) -> Path:
    """Return the folder that a path or a file:// URL names."""
    parts = urlsplit(storage)
    if "://" in storage and parts.scheme != "file":
        raise UserError(
            f"--storage {storage}: must be a folder that every node can write; give a path, or file:///such/a/folder"
        )
    return Path(parts.path if "://" in storage else storage).absolute()

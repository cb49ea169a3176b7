"""The environment of a run: device, processes, memory, metadata, and when to save a checkpoint or to stop.

SIGTERM and Ctrl-C stop the run after the current step; a second signal ends the process immediately.
"""

import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import ghostnoise
from ghostnoise import doctor
from ghostnoise.lab.config import methods
from ghostnoise.lab.errors import UserError

# Constants of glibc's malloc.h. The values have the type int: at most 2 GiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
RAISED = {M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SYNCHRONIZED_EVERY = 2.0  # seconds between two synchronizations of the processes of a run
EXIT_TIMEOUT = timedelta(minutes=1)  # for processes that have not finished


@dataclass(frozen=True)
class Machine:
    """A device, and the rank of this process among those that train together."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder and prints."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process in all processes."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the first one, and an empty list in the others."""
        if self.world == 1:
            return [value]
        box: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, box, dst=0)
        return box or []

    def all_reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(totals)
        return totals

    def broadcast_buffers(self, buffers: Iterator[torch.Tensor]) -> None:
        """Copy the buffers of the first process to all processes."""
        if self.world > 1:
            for buffer in buffers:
                dist.broadcast(buffer, src=0)


@contextmanager
def machine(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[Machine]:
    """Select the device, and join the process group if torchrun started this process."""
    world, rank = int(environment.get("WORLD_SIZE", 1)), int(environment.get("RANK", 0))
    found = select_device(device, int(environment.get("LOCAL_RANK", 0)) if world > 1 else None)
    if world == 1:
        yield Machine(found)
        return
    if found.type == "cuda":
        torch.cuda.set_device(found)
    with _group("nccl" if found.type == "cuda" else "gloo", rank, world):
        yield Machine(found, rank, world)


@contextmanager
def _group(backend: str, rank: int, world: int) -> Iterator[None]:
    """Create torch's default process group, and end it with all of its threads afterwards.

    A thread of gloo that returns a tensor to Python while the interpreter exits aborts the process. The threads end
    with the last reference to the group, not when it is destroyed.
    """
    import torch.distributed.nn.functional  # noqa: F401 imported later, its default arguments would keep a reference to the group

    store, _, _ = next(rendezvous("env://", rank, world))
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world)
    try:
        yield
        _wait_for_all(store, world)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise UserError(
            f"process {rank} of {world}: lost the connection to another process of the run, which has ended; see its "
            "message, and run the same command again"
        ) from error
    finally:
        gc.collect()  # the trained network is in reference cycles and refers to the group
        dist.destroy_process_group()


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether an error of the process group means that another process has ended."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or ("by peer" in text and "connection" in text)


def _wait_for_all(store: Store, world: int) -> None:
    """Wait until all processes get here, so that none closes connections that another still uses."""
    with suppress(dist.DistError):  # the first process may have exited with the store, or a process has failed
        count = store.add("leaving", 1)
        key = f"left {(count - 1) // world}"  # numbered: the next group of this process may use the same store
        if count % world == 0:
            store.set(key, "")
        store.wait([key], EXIT_TIMEOUT)


def select_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device with this name; "auto" selects the best available one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = list(available)[list(available.values()).index(True)]
    if name not in available:
        raise UserError(f"train.device={name}: must be auto, cpu, cuda or mps; leave it out for auto")
    if not available[name]:
        usable = ", ".join(kind for kind, usable in available.items() if usable)
        raise UserError(f"train.device={name}: not available with torch {torch.__version__} here; use one of: {usable}")
    return torch.device(name, local_rank) if name == "cuda" and local_rank is not None else torch.device(name)


@cache
def raise_malloc_thresholds() -> bool:
    """Make glibc's malloc keep freed memory instead of returning it to the system; return whether it does.

    By default, the memory of a large tensor is mapped when it is created and unmapped when it is freed, and the page
    faults take half of the time of an elementwise operation. Values from the environment (MALLOC_…_) are not changed.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(name, value) for name, value in RAISED.items()] == [1, 1]


def set_deterministic(wanted: bool) -> None:
    """Use only deterministic algorithms, also on GPUs; if False, allow all, even after a deterministic run."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)


def environment(here: Machine, thresholds: bool, method: str) -> dict[str, Any]:
    """Environment metadata recorded with every result of a method."""
    return {
        "numerics": methods.numerics(method),
        **_software(here.device),
        "threads": torch.get_num_threads(),
        "processes": here.world,
        "malloc": "raised" if thresholds else "default",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def _software(device: torch.device) -> dict[str, Any]:
    """Metadata that do not change while this process runs."""
    return {
        "ghostnoise": ghostnoise.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "device": device.type,
        "device_name": doctor.device_name(device),
        "backend": doctor.operators(device.type),
    }


def peak_memory(device: torch.device) -> int:
    """Return the largest memory in bytes that was used so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@cache
def commit() -> str:
    """Return the commit of the source tree, with "+" for uncommitted changes; outside a checkout, the version.

    The result is cached, since later changes do not affect what this process has imported.
    """
    installed = f"v{ghostnoise.__version__}"
    here = Path(ghostnoise.__file__).parent
    command = ["git", "-C", str(here)]
    try:
        tracked = subprocess.run([*command, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True)
        if tracked.returncode:
            return installed
        found = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*command, "status", "--porcelain", "-uno", "."], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return installed
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


class Stop:
    """A request to stop: `signal` is the number of the signal that requested it, or 0."""

    def __init__(self) -> None:
        self.signal = 0

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Store the signal, and restore the default handlers, so that the next signal ends the process."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL if each != signal.SIGINT else signal.default_int_handler)


@contextmanager
def handle_signals(stop: Stop | None = None) -> Iterator[Stop]:
    """Turn SIGTERM and Ctrl-C into requests to stop inside the block."""
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may install signal handlers
        return
    before = list(map(signal.signal, SIGNALS, [stop.request] * len(SIGNALS)))
    try:
        yield stop
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


class Clock:
    """Decides after every step whether to save a checkpoint or to stop, in all processes after the same step."""

    def __init__(self, here: Machine, stop: Stop, interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self.here, self.stop, self.interval, self.now = here, stop, interval, now
        self.saved = self.synchronized = now()
        self.wait = self.waited = 0  # steps until and since the next and the last synchronization

    def tick(self) -> tuple[bool, int]:
        """Return whether to save now, and the signal that requested to stop, or 0."""
        if self.here.world == 1:
            return self.now() - self.saved >= self.interval, self.stop.signal
        self.waited += 1
        if self.waited <= self.wait:
            return False, 0
        return self._synchronize()

    def reset(self) -> None:
        """Restart the interval after a checkpoint was saved."""
        self.saved = self.now()

    def _synchronize(self) -> tuple[bool, int]:
        """Combine the signals of all processes with the clock of the first one."""
        now = self.now()
        step_time = max(now - self.synchronized, 1e-6) / self.waited
        save, wait = now - self.saved >= self.interval, min(SYNCHRONIZED_EVERY, self.interval / 4) / step_time
        first, number = float(self.here.first), self.stop.signal
        message = [first * save, first * wait, float(number == signal.SIGINT), float(number == signal.SIGTERM)]
        total = self.here.all_reduce(torch.tensor(message, device=self.here.device))
        saves, waits, interrupted, terminated = total.tolist()
        self.synchronized, self.waited, self.wait = now, 0, int(waits)
        return bool(saves), signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0

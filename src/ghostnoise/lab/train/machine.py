"""What a run runs on: device, processes, threads, memory."""

import ctypes
import gc
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import ghostnoise
from ghostnoise import doctor
from ghostnoise.lab.errors import UserError
from ghostnoise.version import NUMERICS

# Of glibc's malloc.h. The values are an int's: at most 2 GiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
RAISED = {M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1}
PATIENCE = timedelta(minutes=1)  # with processes that are not at their end


@dataclass(frozen=True)
class Machine:
    """A device, and this process's place among those that train together."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder and speaks."""
        return self.rank == 0

    def tell(self, value: Any) -> Any:
        """What the first process says, in all of them."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in the first one; elsewhere nothing."""
        if self.world == 1:
            return [value]
        box: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, box, dst=0)
        return box or []

    def add(self, totals: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(totals)
        return totals

    def share(self, buffers: Iterator[torch.Tensor]) -> None:
        """Give all processes the first one's buffers."""
        if self.world > 1:
            for buffer in buffers:
                dist.broadcast(buffer, src=0)


@contextmanager
def machine(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[Machine]:
    """The device by its name, with the other processes if torchrun started this one."""
    world, rank = int(environment.get("WORLD_SIZE", 1)), int(environment.get("RANK", 0))
    found = choose(device, int(environment.get("LOCAL_RANK", 0)) if world > 1 else None)
    if world == 1:
        yield Machine(found)
        return
    if found.type == "cuda":
        torch.cuda.set_device(found)
    with _group("nccl" if found.type == "cuda" else "gloo", rank, world):
        yield Machine(found, rank, world)


@contextmanager
def _group(backend: str, rank: int, world: int) -> Iterator[None]:
    """The processes as torch's default group, which is gone with all of its threads when this ends.

    Threads of gloo give tensors back to Python: one that does it while the interpreter ends aborts the process. They
    end with the last reference to the group, not when it is destroyed.
    """
    import torch.distributed.nn.functional  # noqa: F401 its defaults would hold the group that is there when it comes

    store, _, _ = next(rendezvous("env://", rank, world))
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world)
    try:
        yield
        _meet(store, world)
    finally:
        gc.collect()  # the network that was trained: it is in cycles, and holds the group
        dist.destroy_process_group()


def _meet(store: Store, world: int) -> None:
    """Wait until all processes are here, so that none closes what another still reads from."""
    with suppress(dist.DistError):  # the store may go with the first process, or one has failed: all is done anyway
        here = store.add("leaving", 1)
        meeting = f"left {(here - 1) // world}"  # a number: the next group of this process may have the same store
        if here % world == 0:
            store.set(meeting, "")
        store.wait([meeting], PATIENCE)


def choose(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this name; "auto" is the best that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, usable in there.items() if usable)
    if name not in there:
        raise UserError(f"train.device={name}: must be auto, cpu, cuda or mps")
    if not there[name]:
        usable = ", ".join(kind for kind, usable in there.items() if usable)
        raise UserError(f"train.device={name}: torch {torch.__version__} sees none here; usable: {usable}")
    return torch.device(name, local_rank) if name == "cuda" and local_rank is not None else torch.device(name)


def raise_thresholds() -> bool:
    """Have glibc's malloc keep freed memory instead of returning it at once; whether it does now.

    A large tensor's memory is otherwise mapped when it is made and unmapped when it is freed, and its page faults are
    half of the time of an elementwise operation. Values that the environment gives (MALLOC_…_) are left alone.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(name, value) for name, value in RAISED.items()] == [1, 1]


def be_deterministic(wanted: bool) -> None:
    """Take only algorithms that give the same result every time, on GPUs too; or any, whatever ran here before."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)


def environment(here: Machine, thresholds: bool) -> dict[str, Any]:
    """Environment metadata recorded with every result."""
    return {
        "ghostnoise": ghostnoise.__version__,
        "numerics": NUMERICS,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "device": here.device.type,
        "device_name": doctor.device_name(here.device),
        "threads": torch.get_num_threads(),
        "processes": here.world,
        "backend": doctor.automatic() if here.device.type == "cpu" else here.device.type,
        "malloc": "raised" if thresholds else "default",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def commit() -> str:
    """The commit of the source tree, with "+" if its files have uncommitted changes; outside a checkout, the version.

    Cached: later changes of the tree do not affect what this process has imported.
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

"""Run jobs on a Ray cluster that needs no shared file system: what runs save is sent back to the driver.

The driver is the process that started the sweep. `ray_round` is its side of the work, `ray_task` that of a node.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.runners.job import Emit, Job, Place
from ghostnoise.lab.runners.ray_round import Round, Terms
from ghostnoise.text import install_command

ANSWER_WITHIN = 20.0  # seconds for a cluster to answer
CLIENT = "ray://"


class RayRunner:
    """Runs jobs as tasks of a Ray cluster: the one at `address`, or one on this machine that `close()` shuts down."""

    def __init__(
        self, place: Place, *, address: str | None = None, cpus: float = 1, gpus: float = 0,
        storage: str | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        if not cpus > 0:
            raise UserError(f"--cpus-per-run {cpus:g}: must be more than 0; give for example 1")
        if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
            raise UserError(f"--gpus-per-run {gpus:g}: must be 0, a fraction of 1, or a whole number; round it")
        self.terms = Terms(
            cpus, gpus, max(1, int(cpus)) if threads is None else threads, place.checkpoint_seconds,
            None if place.data is None else place.data.absolute(),
            place.runs if storage is None else _folder(storage), storage is not None,
        )  # fmt: skip
        self.connection = Connection(address)
        if not self.connection.slots(cpus, gpus):
            self.close()
            raise UserError(
                f"--cpus-per-run {cpus:g}, --gpus-per-run {gpus:g}: no node has that many; ask for less, or add a node"
            )

    def run(self, jobs: Sequence[Job], emit: Emit, stop: Callable[[], bool]) -> None:
        """Run all jobs and emit events; once `stop()` is true, have them save a checkpoint, and return."""
        for job in jobs:
            if job.settings.train.device == "cuda" and not self.terms.gpus:
                raise UserError(
                    f"{job.name}: train.device=cuda needs a GPU, but --gpus-per-run is 0; give the number of GPUs per "
                    "run, which can be a fraction"
                )
        Round(self.connection, self.terms, jobs, emit, stop).run()

    def close(self) -> None:
        """Disconnect, and shut down a cluster that this runner started."""
        self.connection.close()


class Connection:
    """A connection to a Ray cluster, or to one that is started on this machine."""

    def __init__(self, address: str | None = None) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.ray: Any = _import(local=address == "local")
        self.client = address.startswith(CLIENT)
        self.opened = not self.ray.is_initialized()
        if self.opened:
            if address not in ("local", "auto"):
                _check_address(address)
            _init(self.ray, address)

    def slots(self, cpus: float, gpus: float) -> int:
        """Return how many runs with this many CPUs and GPUs each fit on the nodes of the cluster."""
        total = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = int(has.get("CPU", 0) / cpus + 1e-6)
                total += min(fits, int(has.get("GPU", 0) / gpus + 1e-6)) if gpus else fits
        return total

    def actor(self, kind: type) -> Any:
        """Start an actor on the node of this process, or on the head node if this process is outside of the cluster."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
        if self.client:
            options["resources"] = {"node:__internal_head__": 0.001}
        else:
            here = self.ray.get_runtime_context().get_node_id()
            affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(here, soft=False)
        return self.ray.remote(**options)(kind).remote()

    def close(self) -> None:
        """Disconnect, and shut down a cluster that was started here."""
        if self.opened:
            self.ray.shutdown()
            self.opened = False


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
    client = address.startswith(CLIENT)
    try:
        parts = urlsplit(address if client else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or " " in address:
        raise UserError(f"--address {address}: must be HOST:PORT, ray://HOST:PORT or auto; {remedy}")
    try:
        socket.create_connection((host, port), timeout=ANSWER_WITHIN).close()
    except OSError as error:
        raise UserError(f"--address {address}: cannot be reached ({error.strerror or error}); {remedy}") from None
    if not client:
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
            "(`ray start --address=HEAD:6379`), or the address must be ray://HEAD:10001"
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

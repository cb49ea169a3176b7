"""A connection to a Ray cluster, or to one of this process's own on this machine alone."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from ghostnoise.lab.errors import UserError

PATIENCE = 20.0  # seconds for a cluster to answer
CLIENT = "ray://"


class Connection:
    """Ray, connected; `close()` ends what this began."""

    def __init__(self, address: str | None = None) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.ray: Any = _import(own=address == "local")
        self.client = address.startswith(CLIENT)
        self.ours = not self.ray.is_initialized()
        if self.ours:
            if address not in ("local", "auto"):
                _reach(address)
            _init(self.ray, address)

    def slots(self, cpus: float, gpus: float) -> int:
        """How many runs with so many CPUs and GPUs each the nodes that are there can hold."""
        total = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = int(has.get("CPU", 0) / cpus + 1e-6)
                total += min(fits, int(has.get("GPU", 0) / gpus + 1e-6)) if gpus else fits
        return total

    def actor(self, kind: type) -> Any:
        """An actor next to this process, or at the head of the cluster if this process is outside of it."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
        if self.client:
            options["resources"] = {"node:__internal_head__": 0.001}
        else:
            here = self.ray.get_runtime_context().get_node_id()
            affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(here, soft=False)
        return self.ray.remote(**options)(kind).remote()

    def close(self) -> None:
        """Disconnect, and end a cluster of our own."""
        if self.ours:
            self.ray.shutdown()
            self.ours = False


def _import(own: bool) -> ModuleType:
    """Ray, without its reports about usage and its own idea of what to send to nodes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if own:  # read when Ray is imported: the node's address is then the loopback's, and nothing listens on others
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError(
            f"--engine ray: needs the package ray ({error}); install it with `pip install 'ghostnoise[ray]'`"
        ) from None
    return ray


def _reach(address: str) -> None:
    """Refuse an address where no cluster answers: Ray itself would try for minutes."""
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
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        raise UserError(f"--address {address}: cannot be reached ({error.strerror or error}); {remedy}") from None
    if not client:
        command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
        try:
            answers = subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
        except subprocess.TimeoutExpired:
            answers = False
        if not answers:
            raise UserError(f"--address {address}: what listens there is no Ray cluster; {remedy}")


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
            f"--address {address}: Ray does not connect ({reason}); this machine must be a node of the cluster "
            "(`ray start --address=HEAD:6379`) or use ray://HEAD:10001"
        ) from error


@contextmanager
def _same_signals() -> Iterator[None]:
    """Ray puts a handler of its own in the place of SIGTERM's; put that back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

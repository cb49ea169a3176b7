"""Runs jobs on a Ray cluster, without a file system that its nodes share: what runs save comes back to the driver."""

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ghostnoise.lab.engines.job import Event, Job, Place
from ghostnoise.lab.engines.ray_connection import Connection
from ghostnoise.lab.engines.ray_round import Round, Terms
from ghostnoise.lab.errors import UserError


class RayEngine:
    """Runs jobs as tasks of a Ray cluster: at `address`, or one on this machine that ends with `close()`."""

    def __init__(
        self, place: Place, *, address: str | None = None, cpus: float = 1, gpus: float = 0,
        storage: str | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        if not cpus > 0:
            raise UserError(f"--cpus-per-run {cpus:g}: must be more than 0")
        if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
            raise UserError(f"--gpus-per-run {gpus:g}: must be 0, a part of 1, or a whole number")
        self.terms = Terms(
            cpus, gpus, max(1, int(cpus)) if threads is None else threads, place.checkpoint_seconds,
            None if place.data is None else place.data.absolute(),
            place.runs if storage is None else _folder(storage), storage is not None,
        )  # fmt: skip
        self.connection = Connection(address)
        if not self.connection.slots(cpus, gpus):
            self.close()
            raise UserError(
                f"--cpus-per-run {cpus:g}, --gpus-per-run {gpus:g}: no node has as many; ask for less, or add a node"
            )

    def run(self, jobs: Sequence[Job], tell: Callable[[Event], object], stop: Callable[[], bool]) -> None:
        """Run all jobs and tell what happens; once `stop()` is true, have them save, and come back."""
        for job in jobs:
            if job.settings.train.device == "cuda" and not self.terms.gpus:
                raise UserError(
                    f"{job.name}: train.device=cuda, but --gpus-per-run is 0; give the part of a GPU that a run gets"
                )
        Round(self.connection, self.terms, jobs, tell, stop).run()

    def close(self) -> None:
        """Disconnect, and end a cluster of our own."""
        self.connection.close()


def _folder(storage: str) -> Path:
    """A path, or the one of a file:// URL."""
    parts = urlsplit(storage)
    if "://" in storage and parts.scheme != "file":
        raise UserError(f"--storage {storage}: must be a folder that every node can write, or file:///such/a/folder")
    return Path(parts.path if "://" in storage else storage).absolute()

"""A worker process of the local engine: runs jobs one after another, and ends with the process that started it."""

import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ghostnoise.lab.engines.job import Job, Place

GRACE = 30.0  # seconds for a last checkpoint, once the parent is gone


@dataclass(frozen=True)
class Share:
    """What a worker has of the machine, and where its output goes."""

    place: Place
    log: Path
    threads: int
    gpu: str | None = None
    """For CUDA_VISIBLE_DEVICES; None leaves it as it is."""


def main(connection: Connection, share: Share) -> None:
    """Take jobs from the connection until it closes; send ("started",), ("progress", …) and ("ended", …) for each."""
    _be_alone(share)
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    from ghostnoise.lab.engines.work import execute  # imports torch: only now, with the GPU chosen

    def send(*message: object) -> None:
        with suppress(OSError):  # the parent is gone, and the run is asked to stop
            connection.send(message)

    while (job := jobs.get()) is not None:
        ended = execute(
            job, share.place, lambda *numbers: send("progress", *numbers), share.threads, share.threads,
            begun=lambda: send("started"),
        )  # fmt: skip
        send("ended", ended.status, ended.message)


def _be_alone(share: Share) -> None:
    """Out of the terminal's reach: the parent alone hears Ctrl-C, and passes it on as SIGTERM, once."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull) as nothing, open(share.log, "wb") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if share.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = share.gpu


def _receive(connection: Connection, jobs: "queue.SimpleQueue[Job | None]") -> None:
    """Pass jobs on; when the parent is gone, ask the run to stop, and do not wait for long."""
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        jobs.put(None)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os._exit(1)

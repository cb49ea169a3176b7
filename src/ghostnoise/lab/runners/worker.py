"""A worker process of the local runner: runs jobs one after another, and exits with the process that started it.

This module does not import torch: a worker chooses its GPU first.
"""

import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ghostnoise.lab.runners.job import Job, Place

GRACE = 30.0  # seconds for a last checkpoint after the parent has exited


@dataclass(frozen=True)
class WorkerOptions:
    """The threads and the GPU of a worker, and the file that gets its output.

    `gpu` is a value of CUDA_VISIBLE_DEVICES; None leaves that variable unchanged.
    """

    place: Place
    log: Path
    threads: int
    gpu: str | None = None


def main(connection: Connection, options: WorkerOptions) -> None:
    """Take jobs from the connection until it closes; send ("started",), ("progress", …) and ("ended", …) for each."""
    _detach(options)
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    from ghostnoise.lab.runners.execution import execute  # imports torch, after the GPU has been chosen

    def send(*message: object) -> None:
        with suppress(OSError):  # the parent has exited, and _receive stops the run
            connection.send(message)

    while (job := jobs.get()) is not None:
        ended = execute(
            job, options.place, lambda *numbers: send("progress", *numbers), options.threads, options.threads,
            on_start=lambda: send("started"),
        )  # fmt: skip
        send("ended", ended.status, ended.message)


def _detach(options: WorkerOptions) -> None:
    """Detach from the terminal: only the parent receives Ctrl-C, and passes it on as one SIGTERM."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the runner blocks it while a worker starts
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull) as nothing, open(options.log, "wb") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu


def _receive(connection: Connection, jobs: "queue.SimpleQueue[Job | None]") -> None:
    """Put received jobs into the queue; when the parent has exited, stop the run, and exit after a grace period."""
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        jobs.put(None)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os._exit(1)

"""A worker process of the local runner: trains runs one after another, and exits with the process that started it.

This module does not import torch: a worker chooses its GPU first.
"""

import os
import queue
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ghostnoise.lab.run import Run
from ghostnoise.lab.sweep.execute import Place, execute

GRACE = 30.0  # seconds for a last checkpoint after the parent has exited


class Log:
    """The output of a worker. Its file has no name, so that nothing is left behind if all processes are killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 it outlives this function

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the open file to a worker; elsewhere than on POSIX, its output is discarded."""
        return _output, (reduction.DupFd(self.file.fileno()) if os.name == "posix" else None,)

    def clear(self) -> None:
        """Remove the output of an earlier worker."""
        self.file.seek(0)
        self.file.truncate()

    def last_line(self) -> str:
        """Return the last line of the output that is not blank, or an empty text."""
        size = os.fstat(self.file.fileno()).st_size
        self.file.seek(max(0, size - 10_000))
        lines = self.file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Close the file, which removes it."""
        self.file.close()


def _output(passed: Any) -> int:
    """Return the descriptor of the log in the process of the worker."""
    return int(passed.detach()) if passed is not None else os.open(os.devnull, os.O_WRONLY)


@dataclass(frozen=True)
class WorkerOptions:
    """The threads and the GPU of a worker, and the file that gets its output; in the worker, its descriptor.

    `gpu` is a value of CUDA_VISIBLE_DEVICES; None leaves that variable unchanged.
    """

    place: Place
    log: Log | int
    threads: int
    gpu: str | None = None


def main(connection: Connection, options: WorkerOptions) -> None:
    """Take runs from the connection until it closes, and send the events of each."""
    _detach(options)
    runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, runs), daemon=True).start()
    import torch  # noqa: F401 now that the GPU has been chosen, and before the first run

    while (run := runs.get()) is not None:
        for event in execute(run, options.place, options.threads, options.threads):
            with suppress(OSError):  # the parent has exited, and _receive stops the run
                connection.send(event)


def _detach(options: WorkerOptions) -> None:
    """Detach from the terminal: only the parent receives Ctrl-C, and passes it on as one SIGTERM."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the runner blocks it while a worker starts
    sys.stdout.flush()
    sys.stderr.flush()
    assert isinstance(options.log, int)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(options.log, 1)
    os.dup2(options.log, 2)
    os.close(options.log)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu


def _receive(connection: Connection, runs: "queue.SimpleQueue[Run | None]") -> None:
    """Put received runs into the queue; when the parent has exited, stop the run, and exit after a grace period."""
    try:
        while True:
            runs.put(connection.recv())
    except (EOFError, OSError):
        runs.put(None)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os._exit(1)

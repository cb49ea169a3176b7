"""When to save a checkpoint and when to stop: signals, and a clock on which all processes of a run agree.

SIGTERM and Ctrl-C stop the run after the current step; a second signal ends the process immediately.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from ghostnoise.lab.train.machine import Machine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SYNCHRONIZED_EVERY = 2.0  # seconds between two synchronizations of the processes of a run


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
    before = {number: signal.signal(number, stop.request) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
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

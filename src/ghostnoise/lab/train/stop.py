"""SIGTERM and Ctrl-C ask the loop to stop at the next step; a second time ends the process at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Which signal asked to stop, if one did."""

    def __init__(self) -> None:
        self.signal = 0

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """Remember the signal, and let the next one act as always."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL if each != signal.SIGINT else signal.default_int_handler)


@contextmanager
def listening(stop: Stop | None = None) -> Iterator[Stop]:
    """Take the signals for as long as this lasts."""
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may take signals
        return
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""When to save a checkpoint and when to stop, so that all processes do it after the same step."""

import time
from collections.abc import Callable
from signal import SIGINT, SIGTERM

import torch

from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.stop import Stop

ASKED_EVERY = 2.0  # seconds between two talks of processes that train together


class Clock:
    """Asked after every step."""

    def __init__(self, here: Machine, stop: Stop, interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self.here, self.stop, self.interval, self.now = here, stop, interval, now
        self.saved = self.asked = now()
        self.wait = self.waited = 0

    def tick(self) -> tuple[bool, int]:
        """Whether to save now, and the signal that asked to stop, or 0."""
        if self.here.world == 1:
            return self.now() - self.saved >= self.interval, self.stop.signal
        self.waited += 1
        if self.waited <= self.wait:
            return False, 0
        return self._agree()

    def reset(self) -> None:
        """A checkpoint was saved."""
        self.saved = self.now()

    def _agree(self) -> tuple[bool, int]:
        """Any process's signal counts, and the first one's clock."""
        now = self.now()
        a_step = max(now - self.asked, 1e-6) / self.waited
        save, wait = now - self.saved >= self.interval, min(ASKED_EVERY, self.interval / 4) / a_step
        first = float(self.here.first)
        talk = [first * save, first * wait, float(self.stop.signal == SIGINT), float(self.stop.signal == SIGTERM)]
        saves, waits, interrupted, terminated = self.here.add(torch.tensor(talk, device=self.here.device)).tolist()
        self.asked, self.waited, self.wait = now, 0, int(waits)
        return bool(saves), SIGTERM if terminated else SIGINT if interrupted else 0

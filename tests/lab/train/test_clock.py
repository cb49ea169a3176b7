import signal

import torch

from ghostnoise.lab.train.clock import Clock
from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.stop import Stop

CPU = torch.device("cpu")


class Watch:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def test_alone_it_saves_when_the_interval_is_over():
    watch = Watch()
    clock = Clock(Machine(CPU), Stop(), 60, watch)
    saves = []
    for _ in range(200):
        watch.time += 1
        save, signalled = clock.tick()
        assert signalled == 0
        if save:
            saves.append(watch.time)
            clock.reset()
    assert saves == [60, 120, 180]


def test_alone_a_signal_is_seen_after_the_next_step():
    clock = Clock(Machine(CPU), Stop(), 60, Watch())
    clock.stop.ask(signal.SIGTERM)
    assert clock.tick() == (False, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Together(Machine):
    """Processes in one: each hands in its talk, and gets the sum when all have."""

    def add(self, totals):
        talks.append(totals)
        return totals


talks: list[torch.Tensor] = []


def test_together_they_talk_seldom_and_still_save_every_interval():
    watch, talks[:] = Watch(), []
    clock = Clock(Together(CPU, 0, 2), Stop(), 60, watch)
    saves = []
    for _ in range(30_000):
        watch.time += 0.01
        save, _ = clock.tick()
        if save:
            saves.append(watch.time)
            clock.reset()
    assert len(talks) < 200, "300 seconds, a talk about every 2 of them"
    gaps = [later - earlier for earlier, later in zip([0, *saves], saves, strict=False)]
    assert len(saves) == 4
    assert all(60 <= gap < 63 for gap in gaps)


def test_only_the_first_ones_clock_counts_but_anyones_signal():
    watch, talks[:] = Watch(), []
    other = Clock(Together(CPU, 1, 2), Stop(), 60, watch)
    watch.time = 1000
    other.stop.ask(signal.SIGINT)
    assert other.tick() == (False, signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

import os
import signal
import threading

import pytest
import torch

from ghostnoise.lab.train.machine import Machine
from ghostnoise.lab.train.stop import Clock, Stop, handle_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_stored_and_the_handlers_are_restored(number):
    before = signal.getsignal(number)
    with handle_signals() as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_raises_immediately():
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with handle_signals(), pytest.raises(KeyboardInterrupt):
        twice()


def test_other_threads_do_not_handle_signals():
    seen = []

    def work():
        with handle_signals() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


CPU = torch.device("cpu")


class Watch:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def test_one_process_saves_after_every_interval():
    watch = Watch()
    clock = Clock(Machine(CPU), Stop(), 60, watch)
    saves = []
    for _ in range(200):
        watch.time += 1
        save, number = clock.tick()
        assert number == 0
        if save:
            saves.append(watch.time)
            clock.reset()
    assert saves == [60, 120, 180]


def test_one_process_stops_after_the_next_step():
    clock = Clock(Machine(CPU), Stop(), 60, Watch())
    clock.stop.request(signal.SIGTERM)
    assert clock.tick() == (False, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Synchronized(Machine):
    """A process whose peers contribute zeros to every sum; it records its messages."""

    def all_reduce(self, totals):
        messages.append(totals)
        return totals


messages: list[torch.Tensor] = []


def test_processes_synchronize_rarely_and_save_after_every_interval():
    watch, messages[:] = Watch(), []
    clock = Clock(Synchronized(CPU, 0, 2), Stop(), 60, watch)
    saves = []
    for _ in range(30_000):
        watch.time += 0.01
        save, _ = clock.tick()
        if save:
            saves.append(watch.time)
            clock.reset()
    assert len(messages) < 200, "about every 2 of 300 seconds"
    gaps = [later - earlier for earlier, later in zip([0, *saves], saves, strict=False)]
    assert len(saves) == 4
    assert all(60 <= gap < 63 for gap in gaps)


def test_the_clock_is_that_of_the_first_process_and_signals_of_any():
    watch, messages[:] = Watch(), []
    other = Clock(Synchronized(CPU, 1, 2), Stop(), 60, watch)
    watch.time = 1000
    other.stop.request(signal.SIGINT)
    assert other.tick() == (False, signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

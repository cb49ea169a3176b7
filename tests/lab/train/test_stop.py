import os
import signal
import threading

import pytest

from ghostnoise.lab.train.stop import listening


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with listening() as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_acts_at_once():
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with listening(), pytest.raises(KeyboardInterrupt):
        twice()


def test_other_threads_take_no_signals():
    seen = []

    def work():
        with listening() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]

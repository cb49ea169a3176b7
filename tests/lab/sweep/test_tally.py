import pytest

from ghostnoise.lab.engines import Ended, Job, Progressed, Started
from ghostnoise.lab.sweep.tally import Tally


def job(name):
    return Job("digits", name, name, None)


def test_counts_follow_the_events_and_the_rest_takes_as_long_as_before():
    clock = [100.0]
    tally = Tally(waiting=4, now=lambda: clock[0])
    assert tally.left is None
    tally.take(Started(job("a"), "worker 0"))
    assert (tally.waiting, len(tally.running)) == (3, 1)
    clock[0] = 110.0
    tally.take(Ended(job("a"), "finished"))
    tally.over("finished")
    assert (tally.waiting, tally.finished) == (3, 1)
    assert tally.left == pytest.approx(30)
    tally.take(Started(job("b"), "worker 0"))
    tally.take(Progressed(job("b"), 50, 100, 1.0, 10.0))  # goes on from its middle
    assert tally.left == pytest.approx(25)
    tally.take(Progressed(job("b"), 100, 100, 1.0, 10.0))
    assert tally.left == pytest.approx(2 * 10 / 1.5)
    tally.take(Ended(job("b"), "diverged"))
    tally.over("diverged")
    tally.take(Ended(job("c"), "finished"))  # by another sweep: it never started here
    tally.over("finished")
    assert tally.line() == "2 finished, 1 diverged, 1 waiting"
    assert tally.total == 4


def test_a_worker_that_is_replaced_starts_its_run_again():
    tally = Tally(waiting=1)
    for _ in range(2):
        tally.take(Started(job("a"), "worker 0"))
    assert (tally.waiting, len(tally.running)) == (0, 1)
    tally.put_back(job("a"))
    assert (tally.waiting, len(tally.running)) == (1, 0)

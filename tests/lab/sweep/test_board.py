import io
from dataclasses import replace

import pytest
from rich.console import Console

from ghostnoise.lab.events import Ended, Started, Step
from ghostnoise.lab.run import Run
from ghostnoise.lab.sweep.board import Board, Running, Tally


def job(name):
    return Run("digits", name, {}, name)


def started(run):
    return Started(run, "", 0, 10, "worker 0")


def step(done, total):
    return Step(1, done, total, 1.0, 10.0, 100.0, 0.1)


def ended(run, status):
    return Ended(status, replace(run, status=status))


def test_counts_follow_the_events_and_the_rest_is_estimated_from_the_speed_so_far():
    clock = [100.0]
    tally, a, b, c = Tally(waiting=4, now=lambda: clock[0]), *map(job, "abc")
    assert tally.left is None
    tally.take(a, started(a))
    assert (tally.waiting, len(tally.running)) == (3, 1)
    clock[0] = 110.0
    tally.take(a, ended(a, "finished"))
    assert (tally.waiting, tally.finished) == (3, 1)
    assert tally.left == pytest.approx(30)
    tally.take(b, started(b))
    tally.take(b, step(50, 100))  # resumed from its middle
    assert tally.left == pytest.approx(25)
    tally.take(b, step(100, 100))
    assert tally.left == pytest.approx(2 * 10 / 1.5)
    tally.take(b, ended(b, "diverged"))
    tally.take(c, ended(c, "finished"))  # by another sweep: it never started here
    assert tally.line() == "2 finished, 1 diverged, 1 waiting"


@pytest.mark.parametrize("status", ["stopped", "elsewhere"])
def test_a_worker_that_is_replaced_starts_its_run_again(status):
    tally, run = Tally(waiting=1), job("a")
    for _ in range(2):
        tally.take(run, started(run))
    assert (tally.waiting, len(tally.running)) == (0, 1)
    tally.take(run, Ended(status))
    assert (tally.waiting, len(tally.running)) == (1, 0)


def test_the_table_has_the_counts_and_a_bar_for_each_run():
    tally = Tally(finished=3, waiting=2, worked=3, now=lambda: 30.0, since=0.0)
    tally.running["a"] = Running("GNI seed 0", "worker 1", done=5, total=10, loss=1.5, accuracy=42.0, begun=5)
    console = Console(file=io.StringIO(), width=100)
    console.print(Board(tally, console, quiet=False).render())
    first, second = console.file.getvalue().splitlines()
    assert first == "3 finished, 1 running, 2 waiting; 25 s left"  # 2 and a half, at 10 s each
    assert second.split()[:3] == ["GNI", "seed", "0"]
    assert "loss 1.500 accuracy 42.0 % worker 1" in second


def test_a_narrow_terminal_shows_a_run_in_one_line():
    tally = Tally(waiting=2)
    tally.running["a"] = Running("GNI-16 seed 10", "worker 1", done=5, total=10, loss=1.5, accuracy=42.0)
    console = Console(file=io.StringIO(), width=50)
    console.print(Board(tally, console, quiet=False).render())
    _, line = console.file.getvalue().splitlines()
    assert line.startswith("GNI-16 seed 10 ")
    assert line.rstrip().endswith(" accuracy 42.0 %")

import math
from collections import Counter
from itertools import pairwise

import pytest

from ghostnoise.bench.timing import LEAST_ROUNDS, Length, interleave, summary


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def step(self, name, *seconds):
        """A step that takes the given times in turn, and the last one from then on."""
        left = list(seconds)

        def run():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_percentiles_are_interpolated():
    timing = summary([0.001, 0.002, 0.003, 0.004, 0.005, 0.006])
    assert (timing.p20, timing.p50, timing.p80) == pytest.approx((2.0, 3.5, 5.0))
    assert timing.best == pytest.approx(1.0)
    assert timing.n == 6


def test_one_time_is_all_percentiles():
    timing = summary([0.002])
    assert (timing.p20, timing.p50, timing.p80, timing.best, timing.n) == (2.0, 2.0, 2.0, 2.0, 1)


def test_every_step_runs_once_in_each_round_and_follows_each_other_step_equally_often():
    clock, rounds = Clock(), 2000
    steps = {name: clock.step(name, 1.0) for name in "abc"}
    assert list(interleave(steps, Length(rounds=rounds, warmup=0), clock=clock)) == ["a", "b", "c"]
    assert all(sorted(clock.order[at : at + 3]) == ["a", "b", "c"] for at in range(0, 3 * rounds, 3))
    pairs = Counter(pairwise(clock.order))
    assert set(pairs) == {(first, second) for first in "abc" for second in "abc" if first != second}
    # 6 pairs of probability 1/6: within 5 standard errors
    assert all(abs(count - rounds / 2) < 5 * math.sqrt(rounds / 2) for count in pairs.values())


def test_warm_up_is_not_timed():
    clock = Clock()
    timings = interleave({"a": clock.step("a", 100.0, 50.0, 1.0, 3.0)}, Length(rounds=2, warmup=2), clock=clock)
    assert len(clock.order) == 4
    assert timings["a"].n == 2
    assert (timings["a"].best, timings["a"].p50) == (1000.0, 2000.0)


def test_rounds_go_on_until_the_seconds_are_over():
    clock = Clock()
    timings = interleave(
        {"a": clock.step("a", 1.0), "b": clock.step("b", 2.0)}, Length(seconds=13, warmup=0), clock=clock
    )
    assert timings["a"].n == timings["b"].n == 5  # 12 s after 4 rounds of 3 s


def test_there_is_a_least_number_of_rounds():
    clock = Clock()
    assert interleave({"a": clock.step("a", 100.0)}, Length(seconds=1, warmup=0), clock=clock)["a"].n == LEAST_ROUNDS


def test_a_slow_step_sits_out_later_rounds_and_does_not_take_the_time_of_others():
    clock = Clock()
    steps = {"fast": clock.step("fast", 1.0), "slow": clock.step("slow", 1000.0)}
    timings = interleave(steps, Length(seconds=10, warmup=2), most_rounds={"slow": 2}, clock=clock)
    assert timings["slow"].n == clock.order.count("slow") == 2
    assert timings["fast"].n == 10


def test_progress_ends_at_1_and_the_device_is_waited_for():
    clock, shares, waits = Clock(), [], []
    interleave(
        {"a": clock.step("a", 1.0), "b": clock.step("b", 1.0)},
        Length(rounds=4, warmup=1),
        synchronize=lambda: waits.append(len(clock.order)),
        on_progress=shares.append,
        clock=clock,
    )
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert waits == [2, 3, 4, 5, 6, 7, 8, 9, 10]  # after the warm-up, and after each step

"""Time contenders in interleaved rounds, so that a slow moment of the machine affects all of them."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Percentiles of n times, in milliseconds."""

    p20: float
    p50: float
    p80: float
    best: float
    n: int


@dataclass(frozen=True)
class Length:
    """How long to measure: `rounds`, or if None `seconds` and at least `LEAST_ROUNDS`; after `warmup` rounds."""

    seconds: float = 15.0
    rounds: int | None = None
    warmup: int = 2

    def progress(self, rounds_done: int, spent: float) -> float:
        """Return the fraction that is done, 1 at the end."""
        if self.rounds is not None:
            return rounds_done / self.rounds
        return min(rounds_done / LEAST_ROUNDS, spent / self.seconds, 1.0)


def summary(seconds: list[float]) -> Timing:
    """Return the percentiles, linearly interpolated."""
    p20, p50, p80 = (float(value) * 1e3 for value in np.percentile(seconds, (20, 50, 80)))
    return Timing(p20, p50, p80, min(seconds) * 1e3, len(seconds))


def interleave(
    steps: Mapping[str, Callable[[], object]],
    length: Length,
    most_rounds: Mapping[str, int] | None = None,
    synchronize: Callable[[], object] = lambda: None,
    on_progress: Callable[[float], object] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run and time every step once in each round.

    The order is random, and no step follows itself: the step before it decides what is in the caches and how memory is
    allocated, and no step may have an advantage from it. A step with an entry in `most_rounds` takes part in that many
    rounds only, without warm-up, and its time does not count towards the length: a very slow step must not use up the
    time of all others.
    """
    most_rounds = most_rounds or {}
    names = list(steps)
    for _ in range(length.warmup):
        for name in names:
            if name not in most_rounds:
                steps[name]()
    synchronize()
    times: dict[str, list[float]] = {name: [] for name in names}
    spent, done, order = 0.0, 0, random.Random(0)
    while True:
        last = names[-1]
        order.shuffle(names)
        while names[0] == last and len(names) > 1:
            order.shuffle(names)
        for name in names:
            if done < most_rounds.get(name, done + 1):
                before = clock()
                steps[name]()
                synchronize()
                taken = clock() - before
                times[name].append(taken)
                spent += 0 if name in most_rounds else taken
        done += 1
        share = length.progress(done, spent)
        on_progress(share)
        if share >= 1:
            return {name: summary(seconds) for name, seconds in times.items()}

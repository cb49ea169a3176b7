"""Ghost sizes that change while training."""

import math
from typing import Any, ClassVar
from weakref import WeakSet

from torch import nn

from ghostnoise import checks


class Schedule:
    """Change the ghost size of the layers that `convert` gave this schedule, one `step()` at a time.

    A subclass says the size `at` each step; it moves from the first to the last of them without leaving their range.
    Whether a step is a batch or an epoch is up to the caller.
    """

    _all: ClassVar["WeakSet[Schedule]"] = WeakSet()

    def __init__(self, steps: int) -> None:
        self.steps, self.steps_taken = checks.steps(steps), 0
        self._layers: WeakSet[Any] = WeakSet()
        Schedule._all.add(self)

    def at(self, step: int) -> int | None:
        """The ghost size after `step` steps, None being no ghosts; `step` is at most `steps`."""
        raise NotImplementedError

    @property
    def ghost_size(self) -> int | None:
        """The ghost size now."""
        return self.at(min(self.steps_taken, self.steps))

    def step(self) -> None:
        """Take a step, and set the ghost size on the layers."""
        self.steps_taken += 1
        self._set()

    def state_dict(self) -> dict[str, int]:
        """How far this has gone."""
        return {"steps_taken": self.steps_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, and set the ghost size on the layers."""
        self.steps_taken = checks.steps(state["steps_taken"], least=0)
        self._set()

    def attach(self, layer: nn.Module) -> None:
        """Set the ghost size of `layer` from now on, and no other schedule its."""
        release(layer)
        self._layers.add(layer)

    def _set(self) -> None:
        for layer in self._layers:
            layer.ghost_size = self.ghost_size

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"


def schedule_of(layer: nn.Module) -> Schedule | None:
    """The schedule that sets the ghost size of `layer`."""
    return next((schedule for schedule in Schedule._all if layer in schedule._layers), None)


def release(layer: nn.Module) -> None:
    """Leave the ghost size of `layer` as it is."""
    schedule = schedule_of(layer)
    if schedule is not None:
        schedule._layers.discard(layer)


class ConstantSchedule(Schedule):
    """The same ghost size at every step.

    >>> ConstantSchedule(32).ghost_size
    32
    """

    def __init__(self, ghost_size: int | None) -> None:
        self.size = checks.ghost_size_or_none(ghost_size)
        super().__init__(steps=1)

    def at(self, step: int) -> int | None:
        """The ghost size."""
        return self.size


class LinearSchedule(Schedule):
    """From `start` to `end` in a straight line over `steps` steps, rounded.

    >>> schedule = LinearSchedule(8, 32, steps=3)
    >>> [schedule.at(step) for step in range(4)]
    [8, 16, 24, 32]
    """

    def __init__(self, start: int, end: int, steps: int) -> None:
        self.start, self.end = checks.ghost_size(start), checks.ghost_size(end)
        super().__init__(steps)

    def at(self, step: int) -> int:
        """The ghost size after `step` steps."""
        return round(self.start + (self.end - self.start) * self.progress(step / self.steps))

    def progress(self, share: float) -> float:
        """How much of the way is gone, after that share of the steps."""
        return share


class CosineSchedule(LinearSchedule):
    """From `start` to `end` over `steps` steps along half a cosine, rounded.

    >>> schedule = CosineSchedule(8, 32, steps=4)
    >>> [schedule.at(step) for step in range(5)]
    [8, 12, 20, 28, 32]
    """

    def progress(self, share: float) -> float:
        """How much of the way is gone: slowly first and last."""
        return (1 - math.cos(math.pi * share)) / 2


class OffAfter(Schedule):
    """`ghost_size` for `steps` steps, then no ghosts.

    >>> schedule = OffAfter(16, steps=2)
    >>> [schedule.at(step) for step in range(3)]
    [16, 16, None]
    """

    def __init__(self, ghost_size: int, steps: int) -> None:
        self.size = checks.ghost_size(ghost_size)
        super().__init__(steps)

    def at(self, step: int) -> int | None:
        """The ghost size, or None once the steps are over."""
        return self.size if step < self.steps else None

"""Ghost sizes that change during training."""

import math
from typing import Any, Self
from weakref import WeakSet, ref

from torch import nn

from ghostnoise import checks
from ghostnoise.conversion.variants import Lazy
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer

LINK = "_ghostnoise_schedule"


class Schedule:
    """Change the ghost size of the layers that `convert` gave this schedule, one `step()` at a time.

    A subclass defines the size `at` each step, which must stay between the first and the last size. The caller decides
    whether a step is a batch or an epoch.

    Each layer refers to its schedule, so a deep copy or a pickle of a model contains a copy of the schedule. Copy or
    save the two together, as in `copy.deepcopy((model, schedule))`, to get both: the copied schedule then steps the
    copied layers and no others. A schedule that is copied or saved alone does not include the layers.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.steps_taken = checks.steps(steps), 0

    def at(self, step: int) -> int | None:
        """Return the ghost size after `step` steps, at most `steps`; None disables ghost batches."""
        raise NotImplementedError

    @property
    def ghost_size(self) -> int | None:
        """Return the current ghost size."""
        return self.at(min(self.steps_taken, self.steps))

    def step(self) -> None:
        """Take one step, and set the ghost size of the layers."""
        self.steps_taken += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps taken."""
        return {"steps_taken": self.steps_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the saved number of steps, and set the ghost size of the layers."""
        self.steps_taken = checks.steps(state["steps_taken"], least=0, name="steps_taken")
        self._apply()

    def attach(self, layer: nn.Module) -> None:
        """Set the ghost size of `layer` at every step from now on, instead of any other schedule.

        The layer must be one of this library that has a ghost size.
        """
        if not has_ghost_size(layer):
            raise ValueError(
                f"{self!r} for a {type(layer).__module__}.{type(layer).__qualname__}: must be a layer of this library "
                'that has a ghost size; convert it first, as in ghostnoise.convert(model, "gbn", schedule)'
            )
        release(layer)
        vars(layer)[LINK] = Link(self, layer)

    @property
    def layers(self) -> "WeakSet[Any]":
        """Return the layers whose ghost size this schedule sets; it does not keep them alive."""
        layers: WeakSet[Any] = vars(self).setdefault("_layers", WeakSet())
        return layers

    def _apply(self) -> None:
        for layer in self.layers:
            layer.ghost_size = self.ghost_size

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_layers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # links of a model that is part of the state may have added layers already

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"


def has_ghost_size(layer: nn.Module | None) -> bool:
    """Return whether a layer is one of this library with a ghost size, whatever attributes other layers have."""
    if isinstance(layer, (NormLayer, Lazy)):
        becomes = layer.cls_to_become if isinstance(layer, Lazy) else type(layer)
        return "ghost_size" in becomes.options
    return isinstance(layer, registry.noises())


class Link:
    """The reference from a layer to its schedule. A copy of it connects the copies of both."""

    def __init__(self, schedule: Schedule, layer: nn.Module) -> None:
        self.schedule, self._layer = schedule, ref(layer)
        schedule.layers.add(layer)

    def __reduce__(self) -> tuple[type[Self], tuple[Schedule, nn.Module | None]]:
        return type(self), (self.schedule, self._layer())


def schedule_of(layer: nn.Module) -> Schedule | None:
    """Return the schedule that sets the ghost size of `layer`, if any."""
    link: Link | None = vars(layer).get(LINK)
    return None if link is None else link.schedule


def release(layer: nn.Module) -> None:
    """Detach `layer` from its schedule, if any; its ghost size stays as it is."""
    link: Link | None = vars(layer).pop(LINK, None)
    if link is not None:
        link.schedule.layers.discard(layer)


class ConstantSchedule(Schedule):
    """The same ghost size at every step.

    Examples:
        >>> ConstantSchedule(32).ghost_size
        32
    """

    def __init__(self, ghost_size: int | None) -> None:
        self.size = checks.ghost_size_or_none(ghost_size)
        super().__init__(steps=1)

    def at(self, step: int) -> int | None:
        """Return the ghost size."""
        return self.size


class LinearSchedule(Schedule):
    """Interpolate linearly from `start` to `end` over `steps` steps, rounded to integers.

    Examples:
        >>> schedule = LinearSchedule(8, 32, steps=3)
        >>> [schedule.at(step) for step in range(4)]
        [8, 16, 24, 32]
    """

    def __init__(self, start: int, end: int, steps: int) -> None:
        self.start, self.end = checks.ghost_size(start), checks.ghost_size(end)
        super().__init__(steps)

    def at(self, step: int) -> int:
        """Return the ghost size after `step` steps."""
        return round(self.start + (self.end - self.start) * self.progress(step / self.steps))

    def progress(self, fraction: float) -> float:
        """Return the progress from `start` (0) to `end` (1) after this fraction of the steps."""
        return fraction


class CosineSchedule(LinearSchedule):
    """Interpolate from `start` to `end` over `steps` steps along half a cosine, rounded to integers.

    Examples:
        >>> schedule = CosineSchedule(8, 32, steps=4)
        >>> [schedule.at(step) for step in range(5)]
        [8, 12, 20, 28, 32]
    """

    def progress(self, fraction: float) -> float:
        """Return the progress from `start` (0) to `end` (1), which is slow at both ends."""
        return (1 - math.cos(math.pi * fraction)) / 2


class OffAfter(Schedule):
    """Use `ghost_size` for `steps` steps, then disable ghost batches.

    Examples:
        >>> schedule = OffAfter(16, steps=2)
        >>> [schedule.at(step) for step in range(3)]
        [16, 16, None]
    """

    def __init__(self, ghost_size: int, steps: int) -> None:
        self.size = checks.ghost_size(ghost_size)
        super().__init__(steps)

    def at(self, step: int) -> int | None:
        """Return the ghost size, or None after the last step."""
        return self.size if step < self.steps else None

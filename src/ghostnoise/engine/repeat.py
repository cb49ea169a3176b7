"""Calls of a layer that repeat an earlier one: the same settings, and tensors with the same metadata.

With small inputs, the checks of a call and the choice of a backend take longer than the computation. The first call of
a layer runs as calls of functions do, and is recorded. Later calls compare the settings of the layer, and the metadata
of all tensors in one call, draw noise anew, and go to the backend. A call that differs in anything runs like the first
one.
"""

import threading
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ghostnoise.engine import op
from ghostnoise.engine.backends.base import Prepared, State
from ghostnoise.engine.backends.select import chosen, select
from ghostnoise.engine.plan import Noise, Plan, Reference
from ghostnoise.statistics.moments import Moments
from ghostnoise.torch_private import is_plain_eager

After: TypeAlias = Callable[[Moments, Reference | None], object]


class Recorded(NamedTuple):
    """A training pass that is nothing but `op.normalize`: its plan, how its noise was drawn, and its result."""

    plan: Plan
    draw: Callable[[], Noise] | None
    after: After | None
    y: Tensor


class _Recorder(threading.local):
    active = False
    recorded: Recorded | None = None


_recorder = _Recorder()


def record(plan: Plan, draw: Callable[[], Noise] | None, after: After | None, y: Tensor) -> None:
    """Record a pass for the layer that runs it, if there is one."""
    if _recorder.active:
        _recorder.recorded = Recorded(plan, draw, after, y)


def _key(x: Tensor) -> Hashable:
    return x.shape, x.dtype, x.requires_grad, torch.is_grad_enabled()


def _equal(one: object, other: object) -> bool:
    """Compare settings that are not the same object, such as large integers; other objects may have changed inside."""
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


class Repeatable(NamedTuple):
    """What a call must have in common with the recorded one, and what is then run."""

    settings: tuple[Any, ...]
    threads: int
    prepared: Prepared
    draw: Callable[[], Noise] | None
    after: After | None


class Repeats:
    """The recorded calls of a layer, by the kind of the input. A copied or unpickled layer starts without them.

    `names` are the attributes of the layer that its calls depend on, beside its tensors.
    """

    KINDS, PATIENCE = 64, 32  # the most that are kept; the most that are recorded in a row without being repeated

    __slots__ = ("found", "names", "patience")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.patience = names, self.PATIENCE
        self.found: dict[Hashable, Repeatable] = {}

    def __reduce__(self) -> tuple[type["Repeats"], tuple[tuple[str, ...]]]:
        return Repeats, (self.names,)

    def run(self, layer: nn.Module, x: Tensor, state: State) -> Tensor | None:
        """Repeat the recorded call; None if there is none like this one."""
        if type(x) is not Tensor or (found := self.found.get(_key(x))) is None or not is_plain_eager():
            return None
        settings, threads, prepared, draw, after = found
        if (
            (
                not all(map(is_, map(layer.__dict__.get, self.names), settings))
                and not all(map(_equal, map(layer.__dict__.get, self.names), settings))
            )
            or torch.get_num_threads() != threads
            or chosen() not in ("auto", prepared.backend.name)
        ):
            return None
        folded = x.unsqueeze(2) if x.ndim == 2 else x
        at = prepared.admitted(folded, state)
        if at is None:
            return None
        self.patience = self.PATIENCE
        y, made = op.repeat(prepared, folded, state, at, None if draw is None else draw())
        if after is not None:
            after(made.pooled, made.reference)
        return y.squeeze(2) if x.ndim == 2 else y

    def record(self, layer: nn.Module, x: Tensor, state: State, run: Callable[[Tensor, State], Tensor]) -> Tensor:
        """Run a call of a layer, and record it if it can be repeated."""
        if self.patience <= 0 or not is_plain_eager():
            return run(x, state)
        _recorder.active = True
        try:
            y = run(x, state)
            recorded = _recorder.recorded
        finally:
            _recorder.active, _recorder.recorded = False, None
        if recorded is not None and recorded.y is y and type(x) is Tensor:
            self._add(layer, x, state, recorded)
        return y

    def _add(self, layer: nn.Module, x: Tensor, state: State, recorded: Recorded) -> None:
        folded = x.unsqueeze(2) if x.ndim == 2 else x
        prepared = select(folded).prepare(folded, state, recorded.plan)
        self.patience -= 1
        if prepared is None:
            return
        if len(self.found) >= self.KINDS:
            self.found.clear()
        settings, threads = tuple(map(layer.__dict__.get, self.names)), torch.get_num_threads()
        self.found[_key(x)] = Repeatable(settings, threads, prepared, recorded.draw, recorded.after)

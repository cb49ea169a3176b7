"""Recomputed forward passes: what a pass depends on beside its inputs is that of the first pass.

Activation checkpointing runs a forward pass again inside the backward pass, when the running statistics, a history, the
masks of a block or an explicit generator may have moved on. `remembered` returns what the first pass computed. Passes
are identified by the checkpoint that they belong to and their order in it, never by values:

- A checkpoint without reentrant autograd has an object, its frame, which the hooks for saved tensors hold while the
  region runs for the first time, and while it runs again. The results of the first pass are kept with the frame, as
  long as its graph lives.
- A reentrant checkpoint is an autograd function: its region runs without gradients first, after its node was created,
  and again when that node runs backward. Nothing tells when such a region was the last one, so the results of the
  latest passes without gradients are kept, with the number of the node that was created last.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ghostnoise.torch_private import (
    checkpoint_frames,
    current_backward,
    current_node,
    in_backward,
    may_run_again,
    next_node_number,
)

T = TypeVar("T")

KEPT = 1024  # passes without gradients whose results are kept, for reentrant checkpoints


class _Result(NamedTuple):
    thread: int
    node: int  # the number of the node that was created last
    value: Any


class _Frame:
    """The results of the first pass of a checkpoint, and how many of them each recomputation has taken."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.taken: dict[int, int] = {}


_frames: "WeakKeyDictionary[Any, _Frame]" = WeakKeyDictionary()
_without_gradients: deque[_Result] = deque(maxlen=KEPT)
_reentrant: dict[tuple[int, int], int] = {}  # how many results the recomputation of a node has taken
_changing = threading.Lock()


def remembered(compute: Callable[[], T]) -> T:
    """Return the result of `compute` in the first pass of this checkpointed region, or compute it.

    A pass must call this as often, and in the same order, when it runs again.
    """
    if not may_run_again():
        return compute()
    recording, replayed = checkpoint_frames()
    with _changing:
        found = _replay(replayed)
    value: T = compute() if found is None else found[0]
    with _changing:
        for frame in recording:
            _frames.setdefault(frame, _Frame()).values.append(value)
        if not torch.is_grad_enabled():
            _without_gradients.append(_Result(threading.get_ident(), next_node_number() - 1, value))
    return value


def _replay(frame: Any) -> tuple[Any] | None:
    """Return the next result of the first pass, in a tuple; None if this is not a recomputed pass."""
    if not in_backward():
        return None
    if frame is not None:
        known, backward = _frames.get(frame), current_backward()
        if known is None:  # the first pass of this region was compiled, or did not call `remembered`
            return None
        position = known.taken.get(backward, 0)
        if position == len(known.values):
            position = 0  # the region runs once more, for the same backward pass
        known.taken[backward] = position + 1
        return (known.values[position],)
    name, number = current_node()
    if not name.startswith("CheckpointFunction"):
        return None
    after = [each for each in _without_gradients if each.node >= number]
    own = [each for each in after if each.thread == threading.get_ident()] or after
    key = (current_backward(), number)
    position = _reentrant.get(key, 0)
    if position == 0:
        _reentrant.clear()  # of backward passes that have ended
    if position >= len(own):
        raise RuntimeError(
            f"a forward pass is recomputed by a reentrant checkpoint, and its first pass is not among the last {KEPT} "
            "passes without gradients; run the backward pass earlier, or use checkpoint(..., use_reentrant=False)"
        )
    _reentrant[key] = position + 1
    return (own[position].value,)

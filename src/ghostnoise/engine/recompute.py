"""Recomputed forward passes: what a pass depends on besides its inputs is that of the first pass.

Activation checkpointing runs a forward pass again inside the backward pass, when the running statistics, a history, the
masks of a block or an explicit generator may have moved on. `remembered` returns what the first pass computed. Passes
are identified by the checkpoint that they belong to and their order in it, never by values. The results of a first pass
live as long as the graph of its checkpoint.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Generator

from ghostnoise.torch_private import (
    break_graph,
    checkpoints,
    current_backward,
    is_compiled_checkpoint,
    may_run_again,
)

T = TypeVar("T")


class _Results:
    """The results of the first pass of a checkpoint, and how many of them each recomputation has taken."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.taken: dict[int, int] = {}


_results: "WeakKeyDictionary[Any, _Results]" = WeakKeyDictionary()
_changing = threading.Lock()


def remembered(compute: Callable[[], T]) -> T:
    """Return the result of `compute` in the first pass of this checkpointed region, or compute it.

    A pass must call this as often, and in the same order, when it runs again.
    """
    if torch.compiler.is_compiling():
        if is_compiled_checkpoint():  # what a graph computes again reads buffers that the first pass has updated
            break_graph(
                "batch renormalization or a history inside of a checkpoint under torch.compile: the graph would "
                "compute the pass again from state that has changed; compile without fullgraph=True, which runs the "
                "checkpoint in eager mode, or take the layer out of the checkpoint"
            )
        return compute()
    if not may_run_again():
        return compute()
    first, again = checkpoints()
    with _changing:
        found = None if again is None else _next(again)
    value: T = compute() if found is None else found[0]
    with _changing:
        for each in first:
            _results.setdefault(each, _Results()).values.append(value)
    return value


def _next(checkpoint: Any) -> tuple[Any] | None:
    """Return the next result of the first pass, in a tuple; None if this pass was compiled, or had no results."""
    known, backward = _results.get(checkpoint), current_backward()
    if known is None:
        return None
    position = known.taken.get(backward, 0)
    if position == len(known.values):
        position = 0  # the region runs once more, for the same backward pass
    known.taken[backward] = position + 1
    return (known.values[position],)


def drawing(generator: Generator | None) -> Generator | None:
    """Return a generator that draws what this pass drew when it ran first: checkpoints do not restore explicit ones."""
    if generator is None or not may_run_again():
        return generator
    state = remembered(generator.get_state)
    if torch.equal(state, generator.get_state()):
        return generator
    return torch.Generator(generator.device).set_state(state)

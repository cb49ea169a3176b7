"""The choice of a backend: automatic for each tensor, or by name for a block of code."""

import functools
import importlib
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, get_args

from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import Backend

Name = Literal["auto", "aten", "native", "triton"]
NAMES: tuple[Name, ...] = get_args(Name)
CLASSES = {"native": "Native", "triton": "Triton"}


class backend:
    """Choose the backend of all layers and functions in this thread or task; with `with`, until the end of the block.

    "auto" takes the fastest backend that can run a tensor: "native" on CPUs, "triton" on GPUs, else "aten", which runs
    anywhere. A backend that is chosen by name and cannot run raises an error that gives the reason.

    The choice is local to the current context (`contextvars`), so other threads are not affected. Blocks may end in any
    order: the latest choice whose block has not ended counts.

    Examples:
        >>> import ghostnoise
        >>> with ghostnoise.backend("aten"):
        ...     pass
    """

    def __init__(self, name: Name) -> None:
        checks.choice("backend", name, NAMES)
        if name != "auto" and (reason := load(name).unavailable()):
            raise RuntimeError(f"backend={name!r} cannot run here: {reason}")
        self.name, self.is_block = name, False
        before = _choices.get()
        # Only the latest choice without a block can count again, unless this one turns out to be without a block too.
        last = next((choice for choice in reversed(before) if not choice.is_block), None)
        _choices.set((*(choice for choice in before if choice.is_block or choice is last), self))

    def __enter__(self) -> None:
        self.is_block = True
        _choices.set((*(choice for choice in _choices.get() if choice is not self), self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _choices.set(tuple(choice for choice in _choices.get() if choice is not self))


_choices: ContextVar[tuple[backend, ...]] = ContextVar("ghostnoise.backend", default=())


def chosen() -> Name:
    """Return the name of the backend that is chosen in this context."""
    choices = _choices.get()
    return choices[-1].name if choices else "auto"


def select(x: Tensor) -> Backend:
    """Return the backend that runs on `x`."""
    name = chosen()
    if name == "auto":
        found = load("native" if x.is_cpu else "triton")
        return ATEN if found.unavailable() or found.refuses(x) else found
    if name == "aten":
        return ATEN
    found = load(name)
    reason = found.refuses(x)
    if reason and x.numel() > 0:  # an empty part of a batch that is spread over ranks: there is nothing to run
        raise RuntimeError(f"backend={name!r} cannot run this tensor: {reason}; use ghostnoise.backend('auto')")
    return ATEN if reason else found


@functools.cache
def load(name: Name) -> Backend:
    """Return the backend with this name."""
    if name == "aten":
        return ATEN
    module = importlib.import_module(f"ghostnoise.engine.backends.{name}.backend")
    made: Backend = getattr(module, CLASSES[name])()
    return made

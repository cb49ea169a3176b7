"""Which backend runs the passes: chosen for each tensor, or asked for by name.

A backend is a module with the passes and pools of `engine.aten`, and with `missing()` and `refuses(x)`: why it cannot
run here, or not on this tensor. It may have the steps of `engine.steps` at once, too.
"""

import functools
import importlib
from types import ModuleType, TracebackType
from typing import Literal

import torch
from torch import Tensor

from ghostnoise import checks
from ghostnoise.engine.backends import aten

Name = Literal["auto", "aten", "native", "triton"]
NAMES: tuple[Name, ...] = ("auto", "aten", "native", "triton")

_chosen: Name = "auto"


class backend:
    """Set the backend of all layers and functions, or with `with` until the end of the block.

    "auto" takes the fastest one that can run a tensor: "native" on CPUs, "triton" on GPUs, else "aten", which runs
    anywhere. One that is asked for by name and cannot run raises, and says why.

    >>> import ghostnoise
    >>> with ghostnoise.backend("aten"):
    ...     pass
    """

    def __init__(self, name: Name) -> None:
        checks.choice("backend", name, NAMES)
        if name not in ("auto", "aten") and (reason := _module(name).missing()):
            raise RuntimeError(f"backend={name!r} cannot run here: {reason}")
        global _chosen
        self.before, _chosen = _chosen, name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _chosen
        _chosen = self.before


def chosen() -> Name:
    """The backend that is set."""
    return _chosen


def serving(x: Tensor) -> ModuleType:
    """The backend that runs the passes on `x`."""
    name = _chosen
    if name == "aten":
        return aten
    if name == "auto":
        name = "native" if x.device.type == "cpu" else "triton"
        module = _module(name)
        return aten if module.missing() or module.refuses(x) or _unseen() else module
    module = _module(name)
    reason = module.refuses(x) or _unseen()
    if reason and x.numel() > 0:  # an empty part of a batch that ranks share leaves nothing to run
        raise RuntimeError(f"backend={name!r} cannot run this tensor: {reason}; use ghostnoise.backend('auto')")
    return aten if reason else module


def _unseen() -> str | None:
    """Why passes that torch does not dispatch would be missed, if so."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return "a dispatch mode or a tracer watches the operators of torch, and would not see what it does"
    return None


@functools.cache
def _module(name: Name) -> ModuleType:
    return importlib.import_module(f"ghostnoise.engine.backends.{name}.passes")

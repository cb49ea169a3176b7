"""Over which processes a layer's statistics and draws go."""

from typing import Any

import torch
from torch import nn

from ghostnoise import checks

WORLD = "world"  # the default process group, whichever it is when the layer runs


def check(scope: str | None, process_group: object) -> None:
    """`scope` is known, and a process group is given for global scope only."""
    if scope is not None:
        checks.choice("scope", scope, ("local", "global"))
    if process_group is not None and scope != "global":
        raise ValueError(f"process_group with scope={scope!r}: it is for statistics over ranks; give scope='global'")


def group(scope: str | None, process_group: object, was: type[nn.Module], own_group: object) -> Any:
    """The `process_group` of a converted layer that was a `was` with `own_group`: None is this process alone."""
    synchronized = issubclass(was, nn.SyncBatchNorm)
    if scope == "local" or (scope is None and not synchronized):
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        given = "scope='global'" if scope else "nn.SyncBatchNorm, which becomes a layer of global scope,"
        raise ValueError(
            f"{given} without a process group: call torch.distributed.init_process_group first, or give scope='local'"
        )
    return process_group or own_group or WORLD


def name_of(layer: nn.Module) -> str:
    """The scope of a layer."""
    return "local" if getattr(layer, "process_group", None) is None else "global"

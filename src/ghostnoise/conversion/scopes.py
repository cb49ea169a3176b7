"""Over which processes a layer's statistics and draws go."""

from typing import Any

from torch import nn

from ghostnoise import checks
from ghostnoise.distributed import WORLD, initialized, named, resolve


def check(scope: str | None, process_group: object) -> None:
    """`scope` is known, and a process group is given for global scope only."""
    if scope is not None:
        checks.choice("scope", scope, ("local", "global"))
    if process_group is not None and scope != "global":
        raise ValueError(f"process_group with scope={scope!r}: it is for statistics over ranks; give scope='global'")


def group(scope: str | None, process_group: Any, was: type[nn.Module], own_group: Any) -> str | None:
    """The `process_group` of a converted layer that was a `was` with `own_group`: None is this process alone."""
    synchronized = issubclass(was, nn.SyncBatchNorm)
    if scope == "local" or (scope is None and not synchronized):
        return None
    if not initialized():
        given = "scope='global'" if scope else "nn.SyncBatchNorm, which becomes a layer of global scope,"
        raise ValueError(
            f"{given} without a process group: call torch.distributed.init_process_group first, or give scope='local'"
        )
    return named(process_group or own_group or WORLD)


def found_again(group: Any) -> Any:
    """The process group that a name stands for; None, the default one, where there are no ranks to be found."""
    if not isinstance(group, str):
        return group
    return resolve(group) if initialized() else None


def name_of(layer: nn.Module) -> str:
    """The scope of a layer."""
    return "local" if getattr(layer, "process_group", None) is None else "global"

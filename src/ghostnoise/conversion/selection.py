"""Which modules of a model a conversion is for."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostnoise.conversion.table import NOISES

Types: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...]
Where: TypeAlias = Callable[[str, nn.Module], bool]


class Found(NamedTuple):
    """A module, and all the names that it has in the model."""

    module: nn.Module
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.names[0]!r} ({type(self.module).__name__})" if self.names[0] else "the model itself"


class Selection(NamedTuple):
    """Batch norms to convert in place, and modules to inject noise at."""

    norms: list[Found]
    hosts: list[Found]


def everything(model: nn.Module) -> list[Found]:
    """Each module of `model` once."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [Found(module, tuple(known)) for module, known in names.items()]


def select(model: nn.Module, noisy: bool, types: Types | None, where: Where | None) -> Selection:
    """The modules of these `types`, or else the batch norms, for which `where` is true.

    With `where` alone, noise may also come after modules that are no batch norms.
    """
    found = [each for each in everything(model) if not isinstance(each.module, NOISES)]
    if where is not None:
        found = [each for each in found if any(where(name, each.module) for name in each.names)]
    norms = [each for each in found if types is None and is_batch_norm(each.module)]
    hosts = [each for each in found if types is not None and isinstance(each.module, types)]
    if types is None and where is not None and noisy:
        hosts = [each for each in found if not is_batch_norm(each.module)]
    if not norms and not hosts:
        raise ValueError(_nothing(model, types, where))
    return Selection(norms, hosts)


def is_batch_norm(module: nn.Module) -> bool:
    """It is a batch norm, or was one before it was compiled to TorchScript."""
    scripted = isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", "")
    return isinstance(module, _BatchNorm) or scripted


def check_model(model: object, name: str) -> None:
    """`model` is a module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} got a {type(model).__name__}: model must be an nn.Module; give the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"{name} got a ScriptModule, whose layers are fixed: give the model before torch.jit")


def check_places(after: Any, before: Any, where: Any) -> Types | None:
    """`after` or `before` name module types, not both; `where` is a function. Returns the types."""
    if after is not None and before is not None:
        raise ValueError("after= and before= are both given: noise has one place in a conversion; convert twice")
    types: Any = before if after is None else after
    each = types if isinstance(types, tuple) else (types,)
    if types is not None and not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in each):
        name = "before" if after is None else "after"
        raise ValueError(f"{name}={types!r}: must be a module type, such as nn.LayerNorm, or a tuple of them")
    if where is not None and not callable(where):
        raise ValueError(f"where={where!r}: must be a function of a module's name and the module; returns a bool")
    return types  # type: ignore[no-any-return]


def check_untouched(found: Sequence[Found]) -> None:
    """Nobody has replaced the `forward` of these modules, or compiled them to TorchScript."""
    for each in found:
        if isinstance(each.module, torch.jit.ScriptModule):
            raise ValueError(f"{each} is a ScriptModule, whose layers are fixed: convert before torch.jit")
        if "forward" in vars(each.module):
            raise ValueError(
                f"{each} has a forward of its own, set on the instance: converting would undo or bypass it; convert "
                "before it is set, or leave the module out with where="
            )


def listing(names: Sequence[object], most: int = 3) -> str:
    """The first few of them."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_norm_layer(module: nn.Module) -> bool:
    """It is called so, and is no network or block with layers of its own, such as a NormFreeBlock."""
    named = "Norm" in type(module).__name__
    return named and not any(True for child in module.children() for _ in child.parameters())


def _nothing(model: nn.Module, types: Types | None, where: Where | None) -> str:
    found = everything(model)
    kinds = Counter(type(each.module) for each in found if is_norm_layer(each.module))
    norms = [
        f"{kind.__name__} x {count} ({listing([repr(e.names[0]) for e in found if type(e.module) is kind])})"
        for kind, count in kinds.items()
    ]
    asked = "batch norm"
    if types is not None:
        asked = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
    chosen = " for which where= is true" if where is not None else ""
    return (
        f"no {asked}{chosen} in this {type(model).__name__}, whose norm layers are: {'; '.join(norms) or 'none'}; to "
        "inject noise without batch norm, give after= or before= the type of a layer that it has"
    )

"""A batch norm becomes ours in place: its class changes, and everything that refers to it stays valid."""

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from ghostnoise.conversion import scopes
from ghostnoise.conversion.schedules import Schedule, release
from ghostnoise.conversion.selection import Found
from ghostnoise.conversion.sizes import Size, range_of
from ghostnoise.conversion.table import Method
from ghostnoise.conversion.variants import Activated, Lazy, LazyNorm1d, LazyNorm2d, LazyNorm3d
from ghostnoise.layers.batch_norm import BatchNorm

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAZY = ((nn.LazyBatchNorm1d, LazyNorm1d), (nn.LazyBatchNorm2d, LazyNorm2d), (nn.LazyBatchNorm3d, LazyNorm3d))
FORWARDS = [kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, BatchNorm, Activated, Lazy)]
ORIGIN = "_ghostnoise_origin"


class Origin(NamedTuple):
    """What a layer was, to be that again: its class, and the process group of an `nn.SyncBatchNorm`, by its name."""

    layer: Any
    process_group: Any


class Swap(NamedTuple):
    """A change of class, ready to be made."""

    module: nn.Module
    layer: type[nn.Module]
    attributes: dict[str, Any]
    schedule: Schedule | None

    def commit(self) -> None:
        """Change the class, and the attributes that came with the former one."""
        for name in own_names(self.module) & vars(self.module).keys():
            delattr(self.module, name)
        self.module.__class__ = self.layer
        for name, value in self.attributes.items():
            setattr(self.module, name, value)
        release(self.module)
        if self.schedule is not None:
            self.schedule.attach(self.module)


def is_ours(module: nn.Module) -> bool:
    """It is one of our batch norms, or will be."""
    return isinstance(module, (BatchNorm, Lazy))


def origin(module: nn.Module) -> Origin:
    """What a layer was before conversion, or is; a layer of ours that was built by hand was the one it subclasses."""
    if ORIGIN in vars(module):
        known: Origin = vars(module)[ORIGIN]
        return known
    layer: Any = parametrize.type_before_parametrizations(module)
    if issubclass(layer, BatchNorm):
        layer = next((plain for plain in PLAIN if issubclass(layer, plain)), nn.SyncBatchNorm)
        return Origin(layer, None)
    group = getattr(module, "process_group", None)
    return Origin(layer, getattr(group, "group_name", group))


def current(module: nn.Module) -> type[nn.Module]:
    """The class of a layer of ours: what it becomes if it is lazy, and without its parametrizations."""
    layer: type[nn.Module] = getattr(module, "cls_to_become", None) or parametrize.type_before_parametrizations(module)
    return layer


def own_names(module: nn.Module) -> set[str]:
    """The attributes that a layer has as one of ours, or as an `nn.SyncBatchNorm`."""
    options = getattr(current(module), "options", ()) if is_ours(module) else ()
    return {*options, "process_group", "cls_to_become", ORIGIN}


def plan(
    found: Found, method: Method, size: Size, options: dict[str, Any], scope: str | None, process_group: object
) -> Swap:
    """Make a batch norm one of `method`'s layers; raises if it cannot be."""
    was = origin(found.module)
    layer = _fitting(found, method, was.layer)
    fixed = {"num_features": 1, "device": "meta", "process_group": scopes.group(scope, process_group, *was)}
    built, *_ = [method.build(layer, each, options, **fixed) for each in range_of(size)]
    attributes = {name: getattr(built, name) for name in layer.options}
    taken = [name for name in attributes.keys() - own_names(found.module) if hasattr(found.module, name)]
    if taken:
        raise ValueError(
            f"{found} has an attribute {taken[0]!r} of its own, which {layer.__name__} needs: rename it, or leave the "
            "layer out with where="
        )
    attributes[ORIGIN] = was
    becomes: type[nn.Module] = layer
    if isinstance(found.module, _LazyNormBase):
        attributes["cls_to_become"] = layer
        becomes = next(ours for lazy, ours in LAZY if issubclass(was.layer, lazy))
    schedule = size if isinstance(size, Schedule) else None
    return Swap(found.module, parametrized(found.module, becomes), attributes, schedule)


def plan_back(module: nn.Module) -> Swap:
    """Make a layer of ours what it was."""
    was = origin(module)
    layer = was.layer
    if issubclass(layer, _LazyNormBase) and not isinstance(module, _LazyNormBase):
        layer = layer.cls_to_become  # it has seen its first batch
    attributes = {"process_group": scopes.found_again(was.process_group)} if issubclass(layer, nn.SyncBatchNorm) else {}
    return Swap(module, parametrized(module, layer), attributes, None)


def parametrized(module: nn.Module, layer: type[Any]) -> type[Any]:
    """`layer`, with the properties that `torch.nn.utils.parametrize` gave to the class of `module`."""
    if not parametrize.is_parametrized(module):
        return layer
    of_the_class = ("__dict__", "__weakref__", "__module__", "__doc__")
    properties = {name: value for name, value in vars(type(module)).items() if name not in of_the_class}
    return type(f"Parametrized{layer.__name__}", (layer,), properties)


def _fitting(found: Found, method: Method, was: type[Any]) -> type[BatchNorm]:
    """The layer of `method` that takes what `was` takes."""
    now: type[Any] = parametrize.type_before_parametrizations(found.module)
    if _has_drop_and_act(was, found.module):
        return method.activated
    if now.forward not in FORWARDS:
        raise ValueError(
            f"{found} is a {now.__module__}.{now.__qualname__}, whose forward is its own: converting would lose it; "
            "leave it out with where=lambda name, module: type(module) in (nn.BatchNorm2d, ...)"
        )
    plain: Any = was.cls_to_become if issubclass(was, _LazyNormBase) else was
    for kind, layer in zip(PLAIN, method.ranked, strict=True):
        if plain._check_input_dim is kind._check_input_dim:
            return layer
    return method.norm


def _has_drop_and_act(was: type[Any], module: nn.Module) -> bool:
    """It is one of timm's layers that drop and activate after the batch norm."""
    from_timm: bool = was.forward.__module__.startswith("timm.layers")
    return from_timm and all(isinstance(getattr(module, name, None), nn.Module) for name in ("drop", "act"))

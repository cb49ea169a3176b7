"""The modules that a conversion changes, with the channel dimension, ghost size and process group of each."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from ghostnoise import checks
from ghostnoise.conversion.schedules import Schedule
from ghostnoise.engine import ranks
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from ghostnoise.methods.registry import MethodSpec
from ghostnoise.torch_private import AnyBatchNorm

Types: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...]
Where: TypeAlias = Callable[[str, nn.Module], bool]
Size: TypeAlias = int | Schedule | None
Sizes: TypeAlias = Size | EllipsisType | Mapping[str, Size]
Group: TypeAlias = "ranks.Group | EllipsisType"

# Types of modules whose output has its channels in the last dimension, or in dimension 1.
CHANNELS_LAST = {nn.LayerNorm, nn.RMSNorm, nn.Linear}
CHANNELS_FIRST = {
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
}  # fmt: skip
ACTIVATIONS = {
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
}  # fmt: skip


class Foreign(NamedTuple):
    """A batch norm of another library that does not derive from torch's, with the same parameters and buffers.

    Args:
        plain: the layer of torch with these parameters and buffers.
        attributes: the names of the attributes that only this layer has.
        method: the method that it computes.
        options: returns the options of that method for the values of the attributes.
    """

    plain: Any
    attributes: tuple[str, ...]
    method: str
    options: Callable[[dict[str, Any]], dict[str, Any]]


def _renorm_of_torchrl(given: dict[str, Any]) -> dict[str, Any]:
    steps, smooth = given["warmup_steps"], given["smooth"]
    schedule = {"warmup_steps": 0 if smooth else steps, "transition_steps": steps if smooth else 0}
    return {"r_max": given["max_r"], "d_max": given["max_d"], **schedule, "transition": "correction"}


# By the full name of the class, so that no library needs to be installed or imported.
FOREIGN = {
    "torchrl.modules.models.batchrenorm.BatchRenorm1d": Foreign(
        nn.BatchNorm1d, ("max_r", "max_d", "warmup_steps", "smooth"), "brn", _renorm_of_torchrl
    ),
}


def foreign(layer: type[Any]) -> Foreign | None:
    """Return the entry of a class in `FOREIGN`, if it has one and does not define its own `forward`."""
    for base in layer.__mro__:
        found = FOREIGN.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found if layer.forward is vars(base)["forward"] else None
    return None


class Found(NamedTuple):
    """A module, and all names that it has in the model."""

    module: nn.Module
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.names[0]!r} ({type(self.module).__name__})" if self.names[0] else "the model itself"


class Selection(NamedTuple):
    """Batch norms to convert in place, and modules at which to insert noise."""

    norms: list[Found]
    hosts: list[Found]


def everything(model: nn.Module) -> list[Found]:
    """Return each module of `model` once."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [Found(module, tuple(known)) for module, known in names.items()]


def select(model: nn.Module, spec: MethodSpec, types: Types | None, where: Where | None) -> Selection:
    """Return the modules of these `types`, or else the batch norms, for which `where` returns True.

    With `where` alone and a method that has noise, modules that are not batch norms are selected too, for insertion; if
    the method has no batch norm, so are batch norms.
    """
    found = [each for each in everything(model) if not isinstance(each.module, registry.inserted())]
    if where is not None:
        found = [each for each in found if any(where(name, each.module) for name in each.names)]
    norms = [each for each in found if types is None and spec.norm is not None and is_batch_norm(each.module)]
    hosts = [each for each in found if types is not None and isinstance(each.module, types)]
    if types is None and where is not None and spec.noise is not None:
        hosts = [each for each in found if spec.norm is None or not is_batch_norm(each.module)]
    if not norms and not hosts:
        raise ValueError(_nothing(model, types, where))
    return Selection(norms, hosts)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm, including one that was compiled to TorchScript."""
    scripted = isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", "")
    return isinstance(module, AnyBatchNorm) or scripted or foreign(type(module)) is not None


def is_norm_layer(module: nn.Module) -> bool:
    """Return whether a module has "Norm" in its name, and is not a block of other layers, such as a NormFreeBlock."""
    named = "Norm" in type(module).__name__
    return named and not any(True for child in module.children() for _ in child.parameters())


def listing(names: Sequence[object], most: int = 3) -> str:
    """Return the first few names, and the number of others."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _nothing(model: nn.Module, types: Types | None, where: Where | None) -> str:
    found = everything(model)
    kinds = Counter(type(each.module) for each in found if is_norm_layer(each.module))
    norms = [
        f"{kind.__name__} x {count} ({listing([repr(e.names[0]) for e in found if type(e.module) is kind])})"
        for kind, count in kinds.items()
    ]
    if not kinds and isinstance(model, fx.GraphModule):
        return (
            f"no layers in this {type(model).__name__}, a graph of operators such as torch.export makes: convert the "
            "model first, then export it"
        )
    wanted = "batch norm"
    if types is not None:
        wanted = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
    selected = " for which where= returns True" if where is not None else ""
    return (
        f"no {wanted}{selected} in this {type(model).__name__}, whose norm layers are: {'; '.join(norms) or 'none'}; "
        "to inject noise without batch norm, give after= or before= the type of a layer in this model"
        + "".join(f", such as after={_type_name(kind)}" for kind in list(kinds)[:1])
    )


def _type_name(kind: type[nn.Module]) -> str:
    """Return the name of a type, or of the type of `torch.nn` that it derives from, as it is written in code."""
    plain = next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn."))
    return kind.__name__ if plain is nn.Module else f"nn.{plain.__name__}"


# Checks of arguments and modules, before anything is changed.


def check_places(after: Any, before: Any, where: Any) -> Types | None:
    """Check that `after` or `before` is given, or neither, and that `where` is a function; return the module types."""
    if after is not None and before is not None:
        raise ValueError("after= and before= are both given: one call inserts noise on one side; call convert twice")
    types: Any = before if after is None else after
    each = types if isinstance(types, tuple) else (types,)
    if types is not None and not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in each):
        name = "before" if after is None else "after"
        raise ValueError(f"{name}={types!r}: must be a module type, such as nn.LayerNorm, or a tuple of them")
    if where is not None and not callable(where):
        raise ValueError(f"where={where!r}: must be a function of a module's name and the module that returns a bool")
    return types  # type: ignore[no-any-return]


def check_changeable(model: nn.Module, found: Sequence[Found]) -> None:
    """Check that modules are not compiled to TorchScript, sharded, or given another `forward` on the instance."""
    for each in everything(model):
        if is_fsdp(each.module):
            raise ValueError(
                f"{each} is managed by FSDP, which holds references to the layers inside: convert the model first, "
                "then call fully_shard or FullyShardedDataParallel"
            )
    for each in found:
        if isinstance(each.module, torch.jit.ScriptModule):
            raise ValueError(f"{each} is a ScriptModule, whose layers cannot be changed: convert before torch.jit")
        if _is_sharded(each.module):
            raise ValueError(f"{each} has DTensor parameters: convert the model before its parameters are sharded")
        if "forward" in vars(each.module):
            raise ValueError(
                f"{each} has a forward of its own, set on the instance, which conversion would override or bypass: "
                "convert before setting it, or exclude the module with where="
            )


def check_called(model: nn.Module, hosts: Sequence[Found]) -> None:
    """Check that each module is called: noise is inserted as a hook of these calls."""
    attentions = [each for each in everything(model) if isinstance(each.module, nn.MultiheadAttention)]
    plain = [each for each in attentions if type(each.module).forward is nn.MultiheadAttention.forward]
    uncalled = {each.module.out_proj: each for each in plain}
    for host in hosts:
        if host.module in uncalled:
            raise ValueError(
                f"{host} is never called: {uncalled[host.module]} uses its weight and bias alone, so noise there would "
                'have no effect; exclude it with where=lambda name, module: not name.endswith("out_proj"), and insert '
                "noise after a module that takes the output of the attention"
            )


def is_fsdp(module: nn.Module) -> bool:
    """Return whether a module is wrapped or managed by FSDP, version 1 or 2."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import, and without it nothing can be wrapped
    return fsdp is not None and isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


def _is_sharded(module: nn.Module) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in module.parameters(recurse=False))


# The channel dimension of inserted noise.


def channel_dims(hosts: Sequence[Found], given: int | None) -> list[int]:
    """Return the channel dimension of each module: the given one, or the one that is known for exactly its type."""
    known = [known_channel_dim(host.module) if given is None else given for host in hosts]
    unknown = [host for host, dim in zip(hosts, known, strict=True) if dim is None]
    if unknown:
        raise ValueError(
            f"channel_dim is not known for {listing(unknown, most=5)}: give channel_dim=1, or channel_dim=-1 if the "
            "channels come last, as in tokens (B, T, C)"
        )
    return [dim for dim in known if dim is not None]


def known_channel_dim(module: nn.Module) -> int | None:
    """Return the channel dimension, if it is known for exactly the type of `module`, or for the name of timm's type."""
    kind = parametrize.type_before_parametrizations(module)
    if kind.__module__.startswith("timm.layers."):
        if "2d" in kind.__name__ or kind.__name__.startswith("GroupNorm"):
            return 1
        return -1 if kind.__name__.startswith(("LayerNorm", "RmsNorm", "SimpleNorm")) else None
    if kind in CHANNELS_LAST:
        return -1 if len(getattr(module, "normalized_shape", (1,))) == 1 else None
    return 1 if kind in CHANNELS_FIRST or kind in ACTIVATIONS or issubclass(kind, NormLayer) else None


def channel_dim_of(layer: Any) -> int:
    """Return the channel dimension of the input of a batch norm, or of a noise layer of this library."""
    channel_dim: Any = layer.channel_dim if isinstance(layer, registry.inserted()) else 1
    return int(channel_dim)


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation, whose channels come first in images and last in tokens."""
    return parametrize.type_before_parametrizations(module) in ACTIVATIONS


# Ghost sizes: a number, a schedule, None, or a mapping from patterns of names to these.


def ghost_sizes(
    sizes: Sizes, found: Sequence[Found], spec: MethodSpec, name: str, wrapped: Mapping[nn.Module, Any]
) -> list[Any]:
    """Return the ghost size of each module; Ellipsis where the layer's default applies.

    `wrapped` has the wrappers of other libraries, whose own sizes apply if none is given.
    """
    if spec.ghost_size == "none" and sizes is not ...:
        why = "has no ghost batches; leave it out"
        if spec.norm is not None:
            why = "normalizes the whole batch; leave it out, or use 'gbn'"
        raise ValueError(f"ghost_size={sizes!r}: {name!r} {why}")
    if spec.ghost_size != "none" and sizes is ... and any(each.module in wrapped for each in found):
        own = [wrapped[each.module].size if each.module in wrapped else ... for each in found]
        if spec.ghost_size == "optional" or ... not in own:
            return own
    if spec.ghost_size == "required" and sizes is ...:
        raise ValueError(
            f"ghost_size is missing: {name!r} needs the number of samples in a ghost batch; use ghost_size=32 to start "
            "with, or None to disable ghost batches"
        )
    return _matched(sizes, found) if isinstance(sizes, Mapping) else [sizes] * len(found)


def range_of(size: Any) -> list[Any]:
    """Return the sizes that a layer must accept: the current one, and both ends of a schedule."""
    return [size.ghost_size, size.at(0), size.at(size.steps)] if isinstance(size, Schedule) else [size]


def _matched(sizes: Mapping[str, Size], found: Sequence[Found]) -> list[Size]:
    matches = [[pattern for pattern in sizes if _matches(pattern, each)] for each in found]
    without = [each for each, patterns in zip(found, matches, strict=True) if not patterns]
    if without:
        raise ValueError(
            f"ghost_size has no pattern for {listing(without)}: every layer to convert must match one of "
            f"{', '.join(map(repr, sizes)) or 'the patterns'}; add '*' as the last one, or exclude layers with where="
        )
    unused = [pattern for pattern in sizes if not any(pattern in patterns for patterns in matches)]
    if unused:
        raise ValueError(
            f"ghost_size has {', '.join(map(repr, unused))}, which no layer to convert matches: these are "
            f"{listing(found, most=5)}; correct the pattern or remove it"
        )
    return [sizes[patterns[0]] for patterns in matches]


def _matches(pattern: object, found: Found) -> bool:
    if not isinstance(pattern, str):
        raise ValueError(f"ghost_size has the key {pattern!r}: must be a pattern of module names, such as 'layer1.*'")
    return any(fnmatchcase(name, pattern) for name in found.names)


# Process groups.


def requested_group(scope: str | None, process_group: Group) -> str | EllipsisType | None:
    """Return the process group that `scope` or `process_group` asks for; Ellipsis if neither is given."""
    if scope is not None:
        checks.choice("scope", scope, ("local", "global"))
        if process_group is not ... and (process_group is None) != (scope == "local"):
            raise ValueError(
                f"scope={scope!r} with process_group={process_group!r}: scope='global' is process_group='world', and "
                "scope='local' is process_group=None; give one of the two"
            )
    if scope == "global":
        _check_initialized("scope='global'")
        process_group = ranks.WORLD if process_group is ... else process_group
    if scope == "local":
        return None
    return ... if isinstance(process_group, EllipsisType) else ranks.named(process_group)


def default_group(was: type[nn.Module], own_group: Any) -> str | None:
    """Return the group of a converted layer if none is requested: that of an `nn.SyncBatchNorm`, or else None."""
    if not issubclass(was, nn.SyncBatchNorm):
        return None
    _check_initialized("nn.SyncBatchNorm, which uses the statistics of all ranks,")
    return ranks.named(own_group or ranks.WORLD)


def restored_group(name: Any) -> Any:
    """Return the process group with this name; None, the default group, if torch.distributed is not initialized."""
    if not isinstance(name, str):
        return name
    return ranks.resolve(name) if ranks.initialized() else None


def _check_initialized(given: str) -> None:
    if not ranks.initialized():
        raise ValueError(
            f"{given} without torch.distributed: call torch.distributed.init_process_group first, or give scope='local'"
        )

"""Conversion of batch norms in place: the class of the layer changes, so every reference to the layer stays valid."""

import functools
import inspect
import math
import re
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from ghostnoise import checks
from ghostnoise.conversion import targets
from ghostnoise.conversion.schedules import Schedule, release
from ghostnoise.conversion.targets import Found
from ghostnoise.conversion.variants import Activated, Lazy, LazyNorm1d, LazyNorm2d, LazyNorm3d, activated
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from ghostnoise.methods.registry import MethodSpec
from ghostnoise.text import did_you_mean
from ghostnoise.torch_private import AnyBatchNorm, AnyLazyNorm, input_check

ORIGIN, PATH = "_ghostnoise_origin", "_ghostnoise_path"
KEPT, SAMPLER = "kept", "_sampling"  # of `Sampled`


class Method(NamedTuple):
    """A method and the options with which a name of `convert` selects it."""

    name: str
    spec: MethodSpec
    fixed: dict[str, Any]

    def options(self, layer: type[nn.Module]) -> list[str]:
        """Return the options that may be given for `layer`, a batch norm or a noise layer of this method."""
        shared = [name for name in ("generator", "uneven") if name in inspect.signature(layer).parameters]
        own = [option.name for option in registry.options_of(layer)]
        return [name for name in [*own, *shared] if name not in self.fixed]

    def build(self, layer: type[nn.Module], size: object, options: dict[str, Any], **more: Any) -> Any:
        """Build a layer, whose constructor checks the ghost size and the options."""
        sized = {} if size is ... else {"ghost_size": size}
        return layer(**sized, **self.fixed, **options, **more)


def find(given: object) -> tuple[Method, int | None]:
    """Return the method that a layer or a name in any spelling stands for, and the ghost size at the end of the name.

    >>> [find(name)[0].name for name in ("Ghost noise", "gni_shift", "EvalNorm")], find("GBN-16")[1]
    (['gni', 'gni-shift', 'en'], 16)
    """
    if isinstance(given, type):
        given = next((spec.name for spec in registry.specs().values() if given in _layers(spec)), given)
    known = _spellings()
    word = _letters(given) if isinstance(given, str) else ""
    stem = word if word in known else word.rstrip("0123456789")
    name = known.get(stem, given)
    digits = word[len(stem) :] if stem in known else ""
    return Method(str(name), *registry.find(name)), int(digits) if digits else None


@functools.cache
def _spellings() -> dict[str, str]:
    """Return the names of `convert` by everything that a method is called, in lower-case letters and digits."""
    found: dict[str, str] = {}
    for spec in registry.specs().values():
        if spec.name in registry.names():
            names = (spec.label, spec.title, *(layer.__name__ for layer in _layers(spec)))
            found |= dict.fromkeys(map(_letters, names), spec.name)
    return found | {_letters(name): name for name in registry.names()}


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def check_options(method: Method, layer: Any, options: dict[str, Any], arguments: list[str]) -> None:
    """Check the names of options; the error suggests the nearest option, or the nearest of `arguments`."""
    allowed = method.options(layer)
    for name, value in options.items():
        if name not in allowed:
            hint = did_you_mean(name, [*allowed, *arguments], cutoff=0.7, show=repr)
            if name in method.fixed:
                hint = f"{method.name!r} stands for {name}={method.fixed[name]!r}"
            elif name in inspect.signature(nn.BatchNorm2d).parameters:
                hint = f"a converted layer keeps its own {name}; set it on the layers"
            elif name == "inplace":
                hint = "the model is always changed in place; convert copy.deepcopy(model) to keep the original"
            raise ValueError(
                f"{name}={value!r}: neither an argument of convert nor an option of {layer.__name__}, which takes "
                f"{', '.join(allowed)}{hint and '; ' + hint}"
            )
    for option in registry.options_of(layer):
        if option.default is inspect.Parameter.empty and option.name not in {**options, **method.fixed}:
            raise ValueError(f"{option.name} is missing: {layer.__name__} has no default for it; give {option.name}=")


def spec_of(layer: type[nn.Module]) -> MethodSpec | None:
    """Return the method of a batch norm or a noise layer."""
    fitting = [spec for spec in registry.specs().values() if issubclass(layer, _layers(spec))]
    return max(fitting, key=lambda spec: len(spec.layer.__mro__), default=None)


def name_of(layer: type[nn.Module], options: dict[str, Any]) -> str:
    """Return the most specific name that `convert` has for a layer with these options."""
    spec = spec_of(layer)
    names = {name: fixed for name, (known, fixed) in registry.names().items() if known is spec}
    fitting = [name for name, fixed in names.items() if fixed.items() <= options.items()]
    return max(fitting, key=lambda name: len(names[name]), default=layer.__name__)


def _layers(spec: MethodSpec) -> tuple[type[nn.Module], ...]:
    return tuple(layer for layer in (spec.norm, *(spec.norms or ()), spec.noise) if layer is not None)


PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PLAIN_BY_NDIMS = {(2, 3): nn.BatchNorm1d, (4,): nn.BatchNorm2d, (5,): nn.BatchNorm3d}
OF_TORCH = {"affine": True, "track_running_stats": True}  # what a batch norm of torch has besides a foreign one
LAZY = ((nn.LazyBatchNorm1d, LazyNorm1d), (nn.LazyBatchNorm2d, LazyNorm2d), (nn.LazyBatchNorm3d, LazyNorm3d))
FORWARDS = [kind.forward for kind in (AnyBatchNorm, nn.SyncBatchNorm, NormLayer, Activated, Lazy)]


# The change of class.


class Origin(NamedTuple):
    """What `revert` restores: the class of a layer, and the process group of an `nn.SyncBatchNorm`, by its name.

    Also the attributes that a batch norm of another library has and torch's have not.
    """

    layer: Any
    process_group: Any
    attributes: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Swap(NamedTuple):
    """A change of class that was checked and can be made."""

    module: nn.Module
    layer: type[nn.Module]
    attributes: dict[str, Any]
    schedule: Schedule | None

    def commit(self) -> None:
        """Change the class, and replace the attributes of the former class by those of the new one."""
        for name in own_names(self.module) & vars(self.module).keys():
            delattr(self.module, name)
        self.module.__class__ = self.layer
        for name, value in self.attributes.items():
            setattr(self.module, name, value)
        release(self.module)
        if self.schedule is not None:
            self.schedule.attach(self.module)


def is_ours(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of this library, or will become one."""
    return isinstance(module, (NormLayer, Lazy))


def origin(module: nn.Module) -> Origin:
    """Return what a layer was before its conversion, or what `revert` makes of a layer that was not converted."""
    if ORIGIN in vars(module):
        known: Origin = vars(module)[ORIGIN]
        return known
    layer: Any = parametrize.type_before_parametrizations(module)
    if issubclass(layer, NormLayer):
        return Origin(
            PLAIN_BY_NDIMS.get(layer.ndims, nn.SyncBatchNorm), None
        )  # torch's only one for inputs of any rank
    group, theirs = getattr(module, "process_group", None), targets.foreign(layer)
    attributes = {name: getattr(module, name) for name in (theirs.attributes if theirs else ())}
    return Origin(layer, getattr(group, "group_name", group), attributes)


def current(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer of this library, without parametrizations; if lazy, the class that it will have."""
    layer: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return module.cls_to_become if isinstance(module, Lazy) else layer


def own_names(module: nn.Module) -> set[str]:
    """Return the names of the attributes that a layer has for its method, and not for its user.

    Every class has its own: an attribute of the same name of another library's layer belongs to that library.
    """
    if is_ours(module):
        options = getattr(current(module), "options", ())
        lazy = ["cls_to_become"] if issubclass(origin(module).layer, AnyLazyNorm) else []
        added = () if targets.foreign(origin(module).layer) is None else OF_TORCH
        return {*options, *lazy, *added, "process_group", KEPT, SAMPLER, ORIGIN, PATH}
    theirs = targets.foreign(parametrize.type_before_parametrizations(module))
    if theirs is not None:
        return set(theirs.attributes)
    return {"process_group"} if isinstance(module, nn.SyncBatchNorm) else set()


def plan(found: Found, method: Method, size: Any, options: dict[str, Any], process_group: Any) -> Swap:
    """Plan the conversion of a batch norm to a layer of `method`; raises if it is not possible."""
    module, was = found.module, origin(found.module)
    layer = _fitting(found, method.spec, was.layer)
    _check_numbers(found)
    group = targets.default_group(was.layer, was.process_group) if process_group is ... else process_group
    fixed = {"num_features": 1, "device": "meta", "process_group": group}
    theirs = targets.foreign(was.layer)
    fixed["track_running_stats"] = theirs is not None or module.track_running_stats
    if theirs is not None and theirs.method == method.spec.name:
        options = theirs.options(was.attributes) | options
    built, *_ = [method.build(layer, each, options, **fixed) for each in targets.range_of(size)]
    attributes = {name: getattr(built, name) for name in layer.options}
    taken = sorted(name for name in {*attributes, KEPT, SAMPLER} - own_names(module) if hasattr(module, name))
    if taken:
        raise ValueError(
            f"{found} has an attribute {taken[0]!r} of its own, which {layer.__name__} needs: rename it, or exclude "
            "the layer with where="
        )
    attributes |= {} if theirs is None else OF_TORCH
    attributes[ORIGIN], attributes[PATH] = was, found.names[0]
    if KEPT in vars(module):
        attributes[KEPT] = vars(module)[KEPT]  # the moments of the layer's input, which no method changes
    becomes: type[nn.Module] = layer
    if isinstance(module, AnyLazyNorm):
        attributes["cls_to_become"] = layer
        becomes = next(ours for lazy, ours in LAZY if issubclass(was.layer, lazy))
    becomes = parametrized(module, becomes)
    _check_assignable(found, becomes)
    return Swap(module, becomes, attributes, size if isinstance(size, Schedule) else None)


def plan_back(found: Found, plain: bool) -> Swap:
    """Plan to make a layer of this library what it was, or if `plain` the layer of torch with its parameters."""
    module, was = found.module, origin(found.module)
    if targets.is_fsdp(module):
        raise ValueError(
            f"{found} is managed by FSDP, which revert would undo: load the full state_dict into the plain network "
            "instead; its keys are the same"
        )
    layer = was.layer
    if issubclass(layer, AnyLazyNorm) and not isinstance(module, AnyLazyNorm):
        layer = layer.cls_to_become  # it has seen its first batch
    theirs = targets.foreign(layer)
    if plain:
        layer = _plain(layer)
    attributes = dict(was.attributes) if theirs is None or not plain else dict(OF_TORCH)
    if issubclass(layer, nn.SyncBatchNorm):
        attributes["process_group"] = targets.restored_group(was.process_group)
    return Swap(module, parametrized(module, layer), attributes, None)


def _plain(layer: type[Any]) -> type[Any]:
    """Return the layer of torch with the parameters and buffers of `layer`; timm's, which also activate, stay."""
    theirs = targets.foreign(layer)
    if theirs is not None:
        return theirs.plain  # type: ignore[no-any-return]
    if layer.__module__.startswith("torch.nn.") or layer.forward.__module__.startswith("timm.layers"):
        return layer
    kinds = [kind for kind in (*PLAIN, nn.SyncBatchNorm) if issubclass(layer, kind)]
    return kinds[0] if kinds else nn.SyncBatchNorm


def parametrized(module: nn.Module, layer: type[Any]) -> type[Any]:
    """Return `layer` with the properties that `torch.nn.utils.parametrize` gave to the class of `module`."""
    if not parametrize.is_parametrized(module):
        return layer
    of_the_class = ("__dict__", "__weakref__", "__module__", "__doc__")
    properties = {name: value for name, value in vars(type(module)).items() if name not in of_the_class}
    return type(f"Parametrized{layer.__name__}", (layer,), properties)


def _fitting(found: Found, spec: MethodSpec, was: type[Any]) -> type[Any]:
    """Return the layer of a method that accepts the inputs that `was` accepts."""
    now: type[Any] = parametrize.type_before_parametrizations(found.module)
    layers: Any = spec.norms
    if _has_drop_and_act(was, found.module):
        return activated(layers[1])
    if now.forward not in FORWARDS and targets.foreign(now) is None:
        raise ValueError(
            f"{found} is a {now.__module__}.{now.__qualname__}, which defines its own forward, and conversion would "
            "lose it: exclude it with where=lambda name, module: type(module) in (nn.BatchNorm2d, ...)"
        )
    theirs = targets.foreign(was)
    plain: Any = was.cls_to_become if issubclass(was, AnyLazyNorm) else was if theirs is None else theirs.plain
    for kind, layer in zip(PLAIN, layers, strict=True):
        if input_check(plain) is input_check(kind):
            return layer  # type: ignore[no-any-return]
    return spec.norm  # type: ignore[return-value]


def _has_drop_and_act(was: type[Any], module: nn.Module) -> bool:
    """Return whether this is one of timm's layers that drop and activate after the batch norm."""
    from_timm: bool = was.forward.__module__.startswith("timm.layers")
    return from_timm and all(isinstance(getattr(module, name, None), nn.Module) for name in ("drop", "act"))


def _check_numbers(found: Found) -> None:
    for name, high in (("eps", math.inf), ("momentum", 1)):
        value = getattr(found.module, name)
        try:
            if value is not None or name == "eps":
                checks.number(name, value, 0, high)
        except ValueError as error:
            raise ValueError(f"{found} has {error}; set its {name}, or exclude the layer with where=") from None


def _check_assignable(found: Found, layer: type[nn.Module]) -> None:
    """Check that Python can change the class, on an empty object: `__slots__` give objects another memory layout."""
    kind = type(found.module)
    try:
        object.__setattr__(object.__new__(kind), "__class__", layer)
    except TypeError:
        raise ValueError(
            f"{found} is a {kind.__module__}.{kind.__qualname__}, which defines __slots__, so its class cannot be "
            "changed in place: remove __slots__ from it, or exclude the layer with where="
        ) from None

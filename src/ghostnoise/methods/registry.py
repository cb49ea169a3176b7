"""The registry of methods: the only list of them. Everything that enumerates methods is derived from it.

Every module of this package is found automatically, so a new method is a new file that calls `register`. The public
names of a module, its `__all__`, become public names: layers of `ghostnoise`, and functions of
`ghostnoise.functional`.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from torch import nn

from ghostnoise import methods
from ghostnoise.text import did_you_mean

GhostSize = Literal["required", "optional", "none"]
Placement = Literal["inside", "after", "activation", "branch"]
# Arguments of layers that are not options of a method: those of the layer that it replaces, or of its place.
NOT_OPTIONS = {"bias", "ghost_size", "channel_dim", "process_group", "uneven", "generator"}


@dataclass(frozen=True)
class Option:
    """A keyword of a method: the same name, type and default in layers, functions, `convert` and recipes."""

    name: str
    type: Any
    default: Any


@dataclass(frozen=True)
class MeterSpec:
    """How the meter measures a method.

    Args:
        excludes_self: whether a sample does not contribute to its own statistics.
        bounded: whether the normalized output has an upper bound that follows from the number of values in a pool.
        sampling: how the meter draws ghost batches to measure the distribution of the method's noise: from the whole
            batch with "replacement", or as the "partition" of a shuffled batch; empty if it is not measured.
    """

    excludes_self: bool = False
    bounded: bool = True
    sampling: Literal["replacement", "partition", ""] = ""


@dataclass(frozen=True)
class MethodSpec:
    """All that other parts of the library know of a method.

    Args:
        name: the short name in `convert` and in recipes.
        label: the short name in tables.
        title: the full name.
        equation: the definition, in one line.
        card: the file of the card in docs/methods.
        norm: the batch-norm layer for inputs of any rank; None if the method is not a batch norm.
        noise: the layer that injects the method's noise on its own; None if it has no noise.
        partitions: whether the batch is divided into ghost batches.
        changes_inference: whether the eval output differs from that of `nn.BatchNorm*d`.
        inserts: whether `convert` inserts the noise of a method that has no batch norm.
        placements: where a network can have the noise: between normalization and affine ("inside"), after a norm
            ("after"), before activations ("activation"), or at the end of residual branches ("branch").
        shorthands: names for `convert` that stand for this method with some options.
        meter: how the meter measures the method; None if it does not.
        numerics: raise this whenever the method's results, and not those of all methods, change by more than rounding.
        example: options of an instance for tests and benchmarks, beyond the ghost size.
    """

    name: str
    label: str
    title: str
    equation: str
    card: str
    norm: type[Any] | None = None
    noise: type[nn.Module] | None = None
    partitions: bool = False
    changes_inference: bool = False
    inserts: bool = False
    placements: tuple[Placement, ...] = ()
    shorthands: dict[str, dict[str, Any]] = field(default_factory=dict)
    meter: MeterSpec | None = None
    numerics: int = 1
    example: dict[str, Any] = field(default_factory=dict)

    @property
    def norms(self) -> tuple[type[Any], type[Any], type[Any]] | None:
        """Return the batch-norm layers for 1, 2 and 3 spatial dimensions."""
        if self.norm is None:
            return None
        defined, name = _defined(self.norm), self.norm.__name__
        return defined[f"{name}1d"], defined[f"{name}2d"], defined[f"{name}3d"]

    @property
    def ghost_size(self) -> GhostSize:
        """Return whether a ghost size must, may or cannot be given."""
        parameter = _signature(self.layer).get("ghost_size")
        if parameter is None:
            return "none"
        return "required" if parameter.default is parameter.empty else "optional"

    @property
    def least_ghost_size(self) -> int:
        """Return the smallest ghost size."""
        return getattr(self.norm, "least_ghost_size", 1)

    @property
    def layer(self) -> type[nn.Module]:
        """Return the batch-norm layer, or else the noise layer."""
        layer = self.norm or self.noise
        assert layer is not None
        return layer

    @property
    def options(self) -> tuple[Option, ...]:
        """Return the options of the method."""
        return options_of(self.layer)


_SPECS: dict[str, MethodSpec] = {}


def register(spec: MethodSpec) -> None:
    """Add a method to the registry; raises if the specification and its layers do not fit."""
    if spec.name in _SPECS and _SPECS[spec.name].layer.__module__ != spec.layer.__module__:
        raise ValueError(f"method {spec.name!r} is registered twice, by {_SPECS[spec.name].layer} and {spec.layer}")
    if spec.norm is not None:
        keywords = {name for name, each in _signature(spec.norm).items() if each.kind is each.KEYWORD_ONLY} - {"bias"}
        missing = keywords.symmetric_difference(name for name in spec.norm.options if not name.startswith("_"))
        if missing:
            raise ValueError(
                f"method {spec.name!r}: {', '.join(sorted(missing))} must be both in {spec.norm.__name__}.options and "
                "a keyword-only argument of its constructor"
            )
        missing = {name for name in (f"{spec.norm.__name__}{n}d" for n in (1, 2, 3)) if name not in _defined(spec.norm)}
        if missing:
            raise ValueError(f"method {spec.name!r}: define {', '.join(sorted(missing))} beside {spec.norm.__name__}")
    _SPECS[spec.name] = spec


def _defined(layer: type[nn.Module]) -> dict[str, Any]:
    """Return the names that are defined in the module of a layer."""
    return vars(sys.modules[layer.__module__])


@functools.cache
def specs() -> dict[str, MethodSpec]:
    """Return all methods by name, batch norm first."""
    _modules()
    return dict(sorted(_SPECS.items(), key=lambda pair: (_ORDER.get(pair[0], len(_ORDER)), pair[0])))


_ORDER = {name: place for place, name in enumerate(("bn", "gbn", "xbn", "en", "gni", "agni"))}  # of the paper


def find(name: object) -> tuple[MethodSpec, dict[str, Any]]:
    """Return the method with this name, or with this shorthand, and the options that a shorthand stands for."""
    known = names()
    if isinstance(name, str) and name in known:
        return known[name]
    meant = did_you_mean(str(name), known, cutoff=0.4, show=repr)
    raise ValueError(f"method={name!r}: must be one of {', '.join(map(repr, known))}{meant and '; ' + meant}")


@functools.cache
def names() -> dict[str, tuple[MethodSpec, dict[str, Any]]]:
    """Return the names that `convert` accepts: of methods with a batch norm or inserted noise, and shorthands."""
    found: dict[str, tuple[MethodSpec, dict[str, Any]]] = {}
    for name, spec in specs().items():
        if spec.norm is not None or spec.inserts:
            found[name] = (spec, {})
            found |= {short: (spec, options) for short, options in spec.shorthands.items()}
    return found


@functools.cache
def noises() -> tuple[type[nn.Module], ...]:
    """Return the layers that inject ghost noise on their own: those of methods that also have a batch norm."""
    return tuple(spec.noise for spec in specs().values() if spec.norm is not None and spec.noise is not None)


@functools.cache
def inserted() -> tuple[type[nn.Module], ...]:
    """Return the layers that `convert` inserts: `noises`, and those of methods that inject other noise."""
    return (*noises(), *(spec.noise for spec in specs().values() if spec.noise is not None and spec.inserts))


def options_of(layer: type[nn.Module]) -> tuple[Option, ...]:
    """Return the options that are specific to a layer's method, from the signature of the layer."""
    parameters = _signature(layer)
    is_norm = "num_features" in parameters  # whose other arguments are those of `nn.BatchNorm*d`
    own = [each for each in parameters.values() if each.kind is each.KEYWORD_ONLY or not is_norm]
    return tuple(Option(each.name, each.annotation, each.default) for each in own if each.name not in NOT_OPTIONS)


@functools.cache
def exports() -> dict[str, Any]:
    """Return the public names of all methods."""
    return {name: getattr(module, name) for module in _modules() for name in module.__all__}


def layers() -> dict[str, type[nn.Module]]:
    """Return the public layers by name."""
    return {name: value for name, value in exports().items() if _is_layer(value)}


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by name, and the types that they return."""
    return {name: value for name, value in exports().items() if not _is_layer(value)}


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _signature(layer: type[nn.Module]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(layer).parameters)


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    found = (
        importlib.import_module(f"{methods.__name__}.{each.name}") for each in pkgutil.iter_modules(methods.__path__)
    )
    return tuple(module for module in found if hasattr(module, "__all__"))

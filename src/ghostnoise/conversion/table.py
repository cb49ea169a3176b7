"""The methods by name: the layers that each of them has, and the options that its name fixes."""

import difflib
import inspect
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from ghostnoise import layers
from ghostnoise.conversion import variants
from ghostnoise.layers.batch_norm import BatchNorm
from ghostnoise.layers.eval_norm import EvalNorm
from ghostnoise.layers.exclusive import ExclusiveBatchNorm
from ghostnoise.layers.ghost import GhostBatchNorm
from ghostnoise.layers.noisy_norm import AnalyticalGhostNoiseBatchNorm, GhostNoiseBatchNorm

Noise: TypeAlias = layers.GhostNoise | layers.AnalyticalGhostNoise
NOISES = (layers.GhostNoise, layers.AnalyticalGhostNoise)
OF_CONVERT = {"bias", "ghost_size", "channel_dim", "process_group"}  # not options: the layer's own, or named arguments


@dataclass(frozen=True)
class Method:
    """A method's layers: of any rank, of 1 to 3 spatial dimensions, with drop and act, and standalone noise."""

    norm: type[BatchNorm]
    ranked: tuple[type[BatchNorm], type[BatchNorm], type[BatchNorm]]
    activated: type[BatchNorm]
    noise: type[Noise] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)

    def options(self, layer: type[nn.Module]) -> list[str]:
        """The options that may be given to `layer`, one of this method's."""
        names = [
            name
            for name, parameter in inspect.signature(layer).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY or (name == "eps" and not issubclass(layer, BatchNorm))
        ]
        return [name for name in names if name not in OF_CONVERT and name not in self.fixed]

    def build(self, layer: type[nn.Module], size: object, options: dict[str, Any], **more: Any) -> nn.Module:
        """A `layer` with this ghost size, where it has one, and these options; its errors are the user's."""
        allowed = self.options(layer)
        for name in options:
            if name not in allowed:
                raise ValueError(
                    f"{name}={options[name]!r}: {layer.__name__} has no such option here; it takes "
                    f"{', '.join(allowed) or 'none'}"
                )
        sized = {} if size is ... else {"ghost_size": size}
        return layer(**sized, **self.fixed, **options, **more)

    @property
    def default_size(self) -> Any:
        """The default of `ghost_size`; the signature's `empty` if it must be given, Ellipsis if there is none."""
        parameter = inspect.signature(self.norm).parameters.get("ghost_size")
        return ... if parameter is None else parameter.default


_GHOST_NOISE = (
    GhostNoiseBatchNorm,
    (layers.GhostNoiseBatchNorm1d, layers.GhostNoiseBatchNorm2d, layers.GhostNoiseBatchNorm3d),
    variants.ActivatedGhostNoiseBatchNorm2d,
    layers.GhostNoise,
)
_ANALYTICAL = (
    AnalyticalGhostNoiseBatchNorm,
    (
        layers.AnalyticalGhostNoiseBatchNorm1d,
        layers.AnalyticalGhostNoiseBatchNorm2d,
        layers.AnalyticalGhostNoiseBatchNorm3d,
    ),
    variants.ActivatedAnalyticalGhostNoiseBatchNorm2d,
    layers.AnalyticalGhostNoise,
)
METHODS = {
    "bn": Method(
        BatchNorm,
        (layers.BatchNorm1d, layers.BatchNorm2d, layers.BatchNorm3d),
        variants.ActivatedBatchNorm2d,
    ),
    "gbn": Method(
        GhostBatchNorm,
        (layers.GhostBatchNorm1d, layers.GhostBatchNorm2d, layers.GhostBatchNorm3d),
        variants.ActivatedGhostBatchNorm2d,
    ),
    "xbn": Method(
        ExclusiveBatchNorm,
        (layers.ExclusiveBatchNorm1d, layers.ExclusiveBatchNorm2d, layers.ExclusiveBatchNorm3d),
        variants.ActivatedExclusiveBatchNorm2d,
    ),
    "en": Method(
        EvalNorm,
        (layers.EvalNorm1d, layers.EvalNorm2d, layers.EvalNorm3d),
        variants.ActivatedEvalNorm2d,
    ),
    "gni": Method(*_GHOST_NOISE),
    "gni-shift": Method(*_GHOST_NOISE, fixed={"scale": False}),
    "gni-scale": Method(*_GHOST_NOISE, fixed={"shift": False}),
    "agni": Method(*_ANALYTICAL),
    "agni-conv": Method(*_ANALYTICAL, fixed={"kind": "conv"}),
}


def find(name: str) -> Method:
    """The method called `name`."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name).lower(), METHODS, n=1, cutoff=0.4)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"method={name!r}: must be one of {', '.join(map(repr, METHODS))}{meant}")


def name_of(layer: type[nn.Module], options: dict[str, Any]) -> str:
    """The most specific name of the method that `layer` has with these options."""
    fitting = [
        name
        for name, method in METHODS.items()
        if issubclass(layer, (method.norm, method.noise or method.norm)) and method.fixed.items() <= options.items()
    ]
    return fitting[-1]

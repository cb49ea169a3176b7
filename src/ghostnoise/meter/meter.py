"""`Meter`: which modules of a model are measured, and the hooks that measure them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ghostnoise import checks
from ghostnoise.conversion.targets import (
    Found,
    everything,
    is_activation,
    is_batch_norm,
    is_norm_layer,
    known_channel_dim,
    listing,
)
from ghostnoise.masking import given_mask, mask_of
from ghostnoise.meter.code import placements
from ghostnoise.meter.layer import LayerMeter, MeteredModule, Side
from ghostnoise.meter.reading import Reading
from ghostnoise.methods import registry
from ghostnoise.text import did_you_mean
from ghostnoise.torch_private import in_backward


class Meter:
    """Measure the ghost noise in the layers of a model while it runs.

    Every forward pass inside the `with` block is measured, in training or evaluation mode, whether or not the model was
    converted. Outputs, gradients and random number generators are not affected. The meter measures the noise that ghost
    batches of `ghost_size` samples of the activations would have, not the noise that a layer itself injects. Memory
    does not grow with the number of batches.

    In a block of `ghostnoise.masked`, or if a layer is given a `mask`, only valid positions are measured, also those of
    layers that do not take masks themselves. Samples without valid positions are left out.

    Args:
        model: the model, any `nn.Module`.
        ghost_size: samples in a ghost batch, N. Default: 32.
        modules: names of the modules to measure, or patterns such as "layer1.*". If None, all normalization layers.
        side: "input" or "output" of the modules. If None, the input of batch norms and ghost noise layers, and the
            output of all other modules, which is where noise would be inserted.
        channel_dim: dimension of the channels, for modules whose type does not determine it.
        draws: ghost batches to draw from each batch, for each method. Default: 256.
        gap: whether to compare training with inference as well, which takes a few passes over the activations.
        seed: seed of the draws.

    Examples:
        >>> model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU())
        >>> with torch.no_grad(), Meter(model, ghost_size=16) as meter:
        ...     for _ in range(10):
        ...         _ = model(torch.randn(128, 20))
        >>> reading = meter.result()
        >>> reading
        Reading(1 layer, 8 channels, ghost_size=16, batches=10, samples=1280)
        >>> float(reading["1"].noise["gni"].shift.std.mean().round(2))  # 1/sqrt(16) in a fully connected layer
        0.25
    """

    def __init__(
        self,
        model: nn.Module,
        ghost_size: int = 32,
        *,
        modules: str | Sequence[str] | None = None,
        side: Side | None = None,
        channel_dim: int | None = None,
        draws: int = 256,
        gap: bool = True,
        seed: int = 0,
    ) -> None:
        size = checks.ghost_size(ghost_size)
        if side is not None:
            checks.choice("side", side, ("input", "output"))
        if channel_dim is not None:
            checks.dimension(channel_dim)
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise ValueError(
                f"draws={draws!r}: must be an integer of 1 or more, the number of ghost batches drawn from each batch"
            )
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.channel_dim = channel_dim
        self.layers = [LayerMeter(metered, size, draws, gap) for metered in select_modules(model, modules, side)]
        self.called: list[LayerMeter] = []
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        if self.handles:
            raise RuntimeError("this Meter is already active: leave its `with` block first, or use another Meter")
        for layer in self.layers:
            module = layer.metered.found.module
            if layer.metered.side == "input":
                hook = self._pre_hook(layer)
                self.handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            else:
                self.handles.append(module.register_forward_hook(self._hook(layer), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def result(self) -> Reading:
        """The measurements of all batches so far."""
        readings = [reading for layer in self.called if (reading := layer.result()) is not None]
        if not readings:
            skipped = sum(layer.skipped for layer in self.layers)
            why = (
                f"{skipped} batches had fewer than two samples or values that are not finite"
                if skipped
                else "no batch reached them"
            )
            raise ValueError(
                f"nothing was measured in {len(self.layers)} layers, because {why}: Meter needs batches of two samples "
                "or more; run forward passes inside the `with` block (for a compiled model, give Meter the module that "
                "was passed to torch.compile)"
            )
        return Reading(readings)

    def _pre_hook(self, layer: LayerMeter) -> Any:
        measure = self._uncompiled()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Keywords come in any order: the input of layers of this library may come after their mask.
            measure(layer, args or {name: value for name, value in kwargs.items() if name != "mask"}, args, kwargs)

        return hook

    def _hook(self, layer: LayerMeter) -> Any:
        measure = self._uncompiled()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            measure(layer, output, args, kwargs)

        return hook

    def _uncompiled(self) -> Any:
        """Return `_measure` for compiled models. As a decorator, this would load TorchDynamo with the module."""
        return torch.compiler.disable(self._measure)

    def _measure(self, layer: LayerMeter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():  # activation checkpointing repeats a forward pass that was measured already
            return
        if layer not in self.called:
            self.called.append(layer)
        # The accumulators outlive this forward pass, and must not be inference tensors or on its default device.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            x = first_tensor(value, layer.metered).detach()
            positional = isinstance(value, tuple) and layer.metered.side == "input" and isinstance(value[0], Tensor)
            single = isinstance(value, Tensor) or positional
            channel_dim = find_channel_dim(layer.metered, x, self.channel_dim)
            mask = find_mask(layer.metered, x, channel_dim, args, kwargs)
            layer.add(x, channel_dim, self.generator, single, mask)


def select_modules(model: nn.Module, modules: str | Sequence[str] | None, side: Side | None) -> list[MeteredModule]:
    """Select the modules whose names match `modules`; if it is None, the normalization layers."""
    checks.module(model, "Meter")
    found = everything(model)
    if modules is not None:
        chosen = _matching(found, [modules] if isinstance(modules, str) else list(modules), type(model).__name__)
    elif not (chosen := _normalization_layers(found)):
        raise ValueError(
            f"no normalization layer in this {type(model).__name__}: give modules= the names of the modules to "
            f"measure, or patterns such as '*relu*'; available: {_available(found)}"
        )
    sides = [side or _default_side(each.module) for each in chosen]
    placed = placements(list(zip(chosen, sides, strict=True)), found)
    return [MeteredModule(*each) for each in zip(chosen, sides, placed, strict=True)]


def first_tensor(value: Any, metered: MeteredModule) -> Tensor:
    """Return the first tensor of a module's input or output, which must be a floating-point batch."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    x = next((each for each in values if isinstance(each, Tensor)), None)
    if x is None:
        raise ValueError(
            f"{metered.found} has no tensor as its {metered.side}: Meter needs one; leave the module out of modules="
        )
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"{metered.found} has an {metered.side} of shape {tuple(x.shape)} and dtype {x.dtype}: Meter needs a "
            "floating-point batch (B, C, ...); leave the module out of modules="
        )
    return x


def find_channel_dim(metered: MeteredModule, x: Tensor, given: int | None) -> int:
    """Return the channel dimension of x: the one given, or that of the module's type, or the one its weight fits."""
    module = metered.found.module
    dim = given
    if given is None and isinstance(module, registry.noises()):
        dim = module.channel_dim  # type: ignore[assignment]
    elif given is None and not (is_activation(module) and x.ndim == 3):  # could be (B, T, C) tokens or (B, C, L)
        dim = known_channel_dim(module)
    if dim is not None and not -x.ndim < dim < x.ndim:
        raise ValueError(
            f"channel_dim={dim}: must be a dimension of the {metered.side} of {metered.found}, of shape "
            f"{tuple(x.shape)}, other than the batch dimension; use 1, or -1 if the channels are last"
        )
    if dim is not None:
        return dim
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        fitting = [dim for dim in {1, x.ndim - 1} if x.shape[dim] == weight.numel()]
        if len(fitting) == 1:
            return fitting[0]
    raise ValueError(
        f"channel_dim is not known for {metered.found}, with a tensor of shape {tuple(x.shape)}: give channel_dim=1, "
        "or -1 if the channels are last"
    )


def find_mask(
    metered: MeteredModule, x: Tensor, channel_dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the valid positions of x: the mask that the module was given, or that of the block; None if all are."""
    found = metered.found
    subject, remedy = f"{found} has an {metered.side}", "leave the module out of modules="
    mask = mask_of(found.module, x, given_mask(found.module, args, kwargs), channel_dim, subject, remedy)
    if mask is not None:
        checks.mask(mask, x, f"Meter of {found}", channel_dim)
    return mask


def _normalization_layers(found: list[Found]) -> list[Found]:
    """Select norms and noise layers. Of a norm that contains a noise layer, only one of the two is measured.

    That is the norm if it is a batch norm, and otherwise the noise layer: the output of other norms is measured, and
    would already contain the noise.
    """
    norms = [each for each in found if is_batch_norm(each.module)]
    inside = {child for norm in norms for child in norm.module.modules()} - {norm.module for norm in norms}
    noises = [each for each in found if isinstance(each.module, registry.noises()) and each.module not in inside]
    others = [
        each
        for each in found
        if is_norm_layer(each.module)
        and not is_batch_norm(each.module)
        and not any(isinstance(child, registry.noises()) for child in each.module.modules())
    ]
    chosen = {each.module for each in (*norms, *noises, *others)}
    return [each for each in found if each.module in chosen]


def _matching(found: list[Found], patterns: list[str], model: str) -> list[Found]:
    """Select the modules that match any of the patterns; each pattern must match at least one."""
    if not patterns:
        raise ValueError("modules is empty: give names or patterns, or None for the normalization layers")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for each in found for name in each.names):
            names = [name for each in found for name in each.names if name]
            hint = did_you_mean(pattern, names, show=repr)
            raise ValueError(
                f"modules has {pattern!r}, which nothing in this {model} matches: {hint and hint + ' '}available: "
                f"{_available(found)}"
            )
    return [each for each in found if any(fnmatchcase(name, pattern) for name in each.names for pattern in patterns)]


def _available(found: list[Found]) -> str:
    """List the first few modules without children."""
    leaves = [each for each in found if each.names[0] and not list(each.module.children())]
    return listing(leaves, most=8) or "none"


def _default_side(module: nn.Module) -> Side:
    return "input" if is_batch_norm(module) or isinstance(module, registry.noises()) else "output"

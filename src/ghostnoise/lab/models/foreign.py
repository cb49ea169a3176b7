"""Networks of timm and of the user, converted by `ghostnoise.convert`; timm is imported when it is needed."""

import inspect
from typing import Any

import torch
from torch import nn

from ghostnoise.conversion.convert import convert
from ghostnoise.lab.config import own
from ghostnoise.lab.config.methods import NONE, NormSettings, Placement, methods
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError, import_failure
from ghostnoise.lab.models.catalog import having
from ghostnoise.lab.models.slots import group, noise_options, refuse_batch_norm_settings
from ghostnoise.text import nearest
from ghostnoise.torch_private import AnyBatchNorm, AnyConvolution

PREFIX = "timm:"
# By name, since timm defines its own. Sigmoid, tanh and softmax are gates there, not activations.
ACTIVATIONS = {
    "CELU", "ELU", "GELU", "GELUTanh", "GammaAct", "HardMish", "HardMishMe", "HardSwish", "HardSwishMe", "Hardswish",
    "LeakyReLU", "Mish", "MishMe", "PReLU", "QuickGELU", "ReLU", "ReLU6", "SELU", "SiLU", "Swish", "SwishMe",
}  # fmt: skip


def named(name: str) -> bool:
    """Return whether a network is one of timm or of the user."""
    return name.startswith(PREFIX) or own.named(name)


def build(model: ModelSettings, norm: NormSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a network of timm with random weights or one of the user, and convert its batch norms or insert noise.

    "none" leaves the network unchanged; all other methods set eps and momentum of its batch norms.
    """
    _check_method(model.name, norm.method)
    if model.width is not None or model.widths is not None:
        raise UserError(
            f"model.width and model.widths for {model.name!r}: networks of timm have their own widths; leave them out"
        )
    if norm.placement is not None and norm.placement not in norm.placements:
        raise UserError(
            f"norm.placement={norm.placement!r} for {norm.method!r} in {model.name!r}: must be one of "
            f"{', '.join(map(repr, norm.placements))}; leave it out for the default"
        )
    made = (_own if own.named(model.name) else _create)(model, shape, classes)
    norms = [module for module in made.modules() if isinstance(module, AnyBatchNorm)]
    if norm.method == NONE or not norms:
        refuse_batch_norm_settings(norm, model.name)
    if norm.method != NONE:
        for module in norms:
            module.eps, module.momentum = norm.eps, norm.momentum
        default: Placement = "inside" if norms else "after"
        place = norm.placement or (default if norm.placements else None)
        _convert(made, norm, place, model.name, bool(norms))
    return made


def placement(name: str, method: str) -> Placement | None:
    """Return "inside" for networks of timm with batch norms, else "after"; None for methods without noise.

    Also None for a network of the user, which is built before its placement is known.
    """
    if own.named(name):
        _check_method(name, method)
        return None
    timm = _timm(name)
    _check_method(name, method)
    if not methods()[method].placements:
        return None
    with torch.device("meta"):
        made = timm.create_model(name.removeprefix(PREFIX))
    return "inside" if any(isinstance(module, AnyBatchNorm) for module in made.modules()) else "after"


def _check_method(name: str, method: str) -> None:
    offered = [each for each, kind in methods().items() if kind.norms or each == NONE]
    if method not in offered:
        raise UserError(
            f"norm.method={method!r} for {name!r}: networks of timm and your own have {', '.join(map(repr, offered))}; "
            f"use one of them, or one of the networks {', '.join(having(method)) or 'that have it'}"
        )


def _own(model: ModelSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    made = own.call(model.name, "model", model.args, shape, classes)
    if not isinstance(made, nn.Module):
        raise UserError(f"model.name={model.name!r}: returned {type(made).__name__}; must return a torch.nn.Module")
    return made


def _timm(name: str) -> Any:
    """Import timm, and check that it has the network."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter where it does not fit torch
        why = import_failure(error, "pip install timm")
        raise UserError(f"model.name={name!r}: timm cannot be imported {why}") from error
    bare = name.removeprefix(PREFIX)
    if not timm.is_model(bare):
        near = nearest(bare, timm.list_models(), cutoff=0)[0]
        raise UserError(f"model.name={name!r}: timm has no such network; did you mean {PREFIX + near!r}?")
    return timm


def _create(model: ModelSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    name = model.name
    timm, bare = _timm(name), name.removeprefix(PREFIX)
    if len(shape) != 3:
        raise UserError(f"{name} for signals of shape {shape}: networks of timm take images; use conv1d")
    channels, height, across = shape
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels, "pretrained": False}
    try:
        with torch.device("meta"):
            trial = timm.create_model(bare, **options)
            if "img_size" in inspect.signature(type(trial)).parameters:
                options["img_size"] = height if height == across else (height, across)
                trial = timm.create_model(bare, **options)
            _try(trial.eval(), torch.empty(1, *shape))
        made: nn.Module = timm.create_model(bare, **options)
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"images of {channels}x{height}x{across} for {name!r}: not accepted ({_line(error)}); change "
            "data.image_size or use another network"
        ) from error
    return made


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _try(trial: nn.Module, x: torch.Tensor) -> None:
    """Run a network on the meta device, so that images of the wrong size are refused before training."""
    try:
        trial(x)
    except RuntimeError as error:
        if "meta tensors" not in str(error):  # depends on values
            raise


def _convert(model: nn.Module, norm: NormSettings, place: Placement | None, name: str, has_batch_norm: bool) -> None:
    if place == "after":
        _inject(model, norm, _after_norms(model, name), "after")
    elif place == "activation":
        _inject(model, norm, _before_activations(model, name), "before")
    elif not has_batch_norm:
        given = f"norm.placement={place!r}" if place else f"norm.method={norm.method!r}"
        remedy = "'after' or 'activation'" if place else "'none', 'gni' or 'agni'"
        raise UserError(f"{given} for {name!r}: needs batch norms, and the network has none; use {remedy}")
    elif norm.method != "bn" or group(norm):
        size: Any = {} if norm.ghost_size is None else {"ghost_size": norm.ghost_size}
        convert(model, norm.method, scope=_scope(norm), **size, **norm.options)


def _scope(norm: NormSettings) -> str:
    return "global" if group(norm) else "local"


def _after_norms(model: nn.Module, name: str) -> dict[str, int]:
    """Return the norms with the dimension of their channels."""
    dims = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        if not isinstance(module, (AnyBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)) and not kind.startswith(
            ("RmsNorm", "SimpleNorm")
        ):
            continue
        if not isinstance(getattr(module, "act", nn.Identity()), nn.Identity):
            raise UserError(
                f"norm.placement='after' for {name!r}: its {kind} {path!r} includes the activation, so that noise "
                "would come after the activation; use 'inside' or 'activation'"
            )
        first = isinstance(module, (AnyBatchNorm, nn.GroupNorm)) or "2d" in kind
        dims[path] = 1 if first else -1
    if not dims:
        raise UserError(f"norm.placement='after' for {name!r}: it has no norms; use 'activation'")
    return dims


def _before_activations(model: nn.Module, name: str) -> dict[str, int]:
    """Return the activations with the dimension of their channels."""
    dims = {}
    for path, module in model.named_modules():
        if type(module).__name__ in ACTIVATIONS:
            dims[path] = _channel_dim(module, model.get_submodule(path.rpartition(".")[0]))
    if not dims:
        raise UserError(f"norm.placement='activation' for {name!r}: it has no activation layers; use 'after'")
    return dims


def _channel_dim(activation: nn.Module, parent: nn.Module) -> int:
    """Return -1 if the nearest layer in the activation's parent, looking backward first, is linear; else 1."""
    beside = list(parent.modules())
    at = beside.index(activation)
    telling = (nn.Linear, AnyConvolution, AnyBatchNorm)
    near = (each for each in [*reversed(beside[:at]), *beside[at:]] if isinstance(each, telling))
    return -1 if isinstance(next(near, None), nn.Linear) else 1


def _inject(model: nn.Module, norm: NormSettings, dims: dict[str, int], side: str) -> None:
    options: Any = {side: nn.Module, "scope": _scope(norm), **noise_options(norm)}
    for dim in sorted(set(dims.values())):

        def here(name: str, _: nn.Module, dim: int = dim) -> bool:
            return dims.get(name) == dim

        convert(model, norm.method, norm.ghost_size, where=here, channel_dim=dim, **options)

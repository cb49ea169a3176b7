"""Conversion of the layers of a model, and back: everything is checked first, then the model is changed."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from torch import Generator, nn

from ghostnoise import checks
from ghostnoise.conversion import insertion, swap, targets, wrappers
from ghostnoise.conversion.summary import summary
from ghostnoise.conversion.swap import Method
from ghostnoise.conversion.targets import Found, Types, Where
from ghostnoise.methods import registry

Model = TypeVar("Model", bound=nn.Module)


class Options(TypedDict, total=False):
    """The options of all methods, for type checkers and editors; each method takes those of its layer."""

    # exports: begin, written by tools/exports.py
    alpha: float | Literal["1/N^2"] | None
    clamp_output: float | None
    components: Literal["both", "shift", "scale"]
    concentration: float
    d_max: float
    dof: Literal["paper", "exact"]
    draw: Literal["replacement", "partition"]
    generator: Generator | None
    history: int
    law: Literal["fc", "conv"]
    min_std: float
    noise_eps: float
    normalizer: Literal["batch", "exclusive"]
    p: float
    prior_samples: float
    r_max: float
    running_var_from: Literal["ghost", "batch", "each", "each-scaled"]
    self_weight: float
    transition: Literal["limits", "correction"]
    transition_steps: int
    uneven: bool
    warmup_steps: int
    # exports: end


def convert(
    model: Model,
    method: str | type[nn.Module],
    ghost_size: targets.Sizes = ...,
    *,
    after: Types | None = None,
    before: Types | None = None,
    where: Where | None = None,
    channel_dim: int | None = None,
    scope: str | None = None,
    process_group: targets.Group = ...,
    verbose: bool = False,
    **options: Unpack[Options],
) -> Model:
    """Convert every batch norm of `model` to a method of this library, or insert noise at other layers.

    Layers are changed in place, and `model` is returned: parameters, buffers, state_dict keys, hooks and an optimizer
    that was created before stay valid. Converting again changes the method. A call that raises leaves the model
    unchanged.

    Args:
        model: any network that is not yet wrapped by FSDP.
        method: the name of a method that has a batch norm, such as "gbn", "xbn", "en" or "gni", or a shorthand such as
            "gni-shift", or of noise that is inserted at other layers, such as "mixstyle"; `ghostnoise methods` lists
            them all. Long names, such as "ghost noise", layers, such as `GhostNoise`, and names with a ghost size, such
            as "GNI-16", select the same methods.
        ghost_size: the number of samples in a ghost batch; or a `Schedule`; or a mapping from patterns of module names
            to these, whose first matching pattern applies. None disables ghost batches. If it is left out, the ghost
            batch norms of pytorch-tabnet, pytorch_tabular and Composer keep their size, and all other batch norms stay
            as they are.
        after: a type of module, or a tuple of types, after which to insert noise, for methods that have noise.
        before: the same, before these modules.
        where: a function of a module's name and the module that returns whether to convert it. Alone, with a method
            that has noise, it also selects modules that are not batch norms: noise is inserted after them.
        channel_dim: the channel dimension of inserted noise, where it is not known from the type of the module.
        scope: "local" is short for `process_group=None`, "global" for `process_group="world"`.
        process_group: the ranks that share a batch, as in the layers: None is this process alone, "world" is all
            ranks, or a process group or its name. If neither this nor `scope` is given, an `nn.SyncBatchNorm` keeps its
            group, and every other layer uses this process alone.
        verbose: whether to print the `summary` of the converted model.
        **options: options of the method's layer, such as `noise_eps`, `components`, `alpha`, `generator` or `uneven`.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> convert(model, "gni", ghost_size=32)[1]
        GhostNoiseBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True,
        ghost_size=32, noise_eps=0.001, components='both', draw='replacement', normalizer='batch')
    """
    checks.module(model, "convert")
    checks.flag("verbose", verbose)
    (chosen, size), given = swap.find(method), dict[str, Any](options)
    if size is not None and ghost_size is not ...:
        raise ValueError(f"{method!r} with ghost_size={ghost_size!r}: the name has a ghost size already; give one only")
    ghost_size = ghost_size if size is None else size
    types = targets.check_places(after, before, where)
    group = targets.requested_group(scope, process_group)
    if types is not None and chosen.spec.noise is None:
        known = [name for name, (spec, _) in registry.names().items() if spec.noise is not None]
        raise ValueError(
            f"{chosen.name!r} with after= or before=: it has no noise to insert; use one of "
            f"{', '.join(map(repr, known))}, or leave after= and before= out"
        )
    if types is None and where is None and chosen.spec.norm is None:
        raise ValueError(
            f"{chosen.name!r} without after=, before= or where=: it replaces no batch norm; give the type of the "
            "modules to insert it at, as in after=nn.ReLU, or where=lambda name, module: name in ('layer1', 'layer2')"
        )
    arguments = list(inspect.signature(convert).parameters)[2:-1]
    layer = chosen.spec.noise if types is not None or chosen.spec.norm is None else chosen.spec.norm
    swap.check_options(chosen, layer, given, arguments)
    norms, hosts = targets.select(model, chosen.spec, types, where)
    if hosts:
        swap.check_options(chosen, chosen.spec.noise, given, arguments)
    targets.check_changeable(model, [*norms, *hosts])
    targets.check_called(model, hosts)
    if channel_dim is not None and not hosts:
        raise ValueError(
            f"channel_dim={channel_dim!r} without after= or before=: batch norms have their channels in dimension 1; "
            "leave it out"
        )
    others = wrappers.wrappers(model)
    wrapped = {wrapper.norm: wrapper for wrapper in others}
    if ghost_size is ... and where is None and chosen.spec.ghost_size == "required":
        norms = [each for each in norms if each.module in wrapped] or norms
    sizes = targets.ghost_sizes(ghost_size, [*norms, *hosts], chosen.spec, chosen.name, wrapped)
    count = len(norms)
    swaps = [swap.plan(each, chosen, size, given, group) for each, size in zip(norms, sizes[:count], strict=True)]
    selected = {each.module for each in norms}
    swaps += [change for wrapper in others if wrapper.norm in selected for change in wrappers.plan(wrapper)]
    insertions = _insertions(hosts, chosen, sizes[count:], given, channel_dim, before is not None, group)
    for place in insertions:
        place.report()
    for change in swaps:
        change.commit()
    for place in insertions:
        place.commit()
    _watch(model)
    if verbose:
        print(summary(model))
    return model


def revert(model: Model, *, to: Literal["original", "nn"] = "original") -> Model:
    """Restore converted layers to what they were, with their present weights, and remove inserted noise.

    Layers of this library that were not made by `convert` become the `nn.BatchNorm*d` of the same rank. A model without
    such layers is returned unchanged.

    Args:
        model: any network.
        to: "original" restores the classes that layers had before; "nn" makes converted layers of other libraries
            layers of `torch.nn` with the same keys in the state_dict: an `nn.BatchNorm*d`, and a wrapper that divides
            the batch an `nn.Sequential` of it. An `nn.SyncBatchNorm` keeps its process group, and timm's layers, which
            contain an activation, become those of timm.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> revert(convert(model, "gbn", ghost_size=16))[1]
        BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    """
    checks.module(model, "revert")
    checks.choice("to", to, ("original", "nn"))
    found = targets.everything(model)
    ours = [each for each in found if swap.is_ours(each.module)]
    swaps = [swap.plan_back(each, to == "nn") for each in ours] + wrappers.plan_back(found, to == "nn")
    specs = [swap.spec_of(type(each.module)) for each in ours]
    for spec in registry.specs().values():
        if spec.changes_inference and spec in specs:
            warnings.warn(
                f"{specs.count(spec)} {spec.title} layers become plain batch norm: their eval output changes",
                stacklevel=2,
            )
    for change in swaps:
        change.commit()
    for each in found:
        insertion.remove(each.module)
        insertion.unwatch(each.module)
    return model


def _insertions(
    hosts: Sequence[Found],
    method: Method,
    sizes: Sequence[Any],
    options: dict[str, Any],
    channel_dim: int | None,
    before: bool,
    group: Any,
) -> list[insertion.Insertion]:
    dims = targets.channel_dims(hosts, channel_dim)
    plans = []
    for host, size, dim in zip(hosts, sizes, dims, strict=True):
        guessed = channel_dim is None and targets.is_activation(host.module)
        point = insertion.InsertionPoint(host, before, guessed)
        plans.append(insertion.plan(host, method, size, options, point, dim, group))
    return plans


def _watch(model: nn.Module) -> None:
    found = targets.everything(model)
    names = [name for each in found if swap.is_ours(each.module) for name in each.names if name]
    hook = insertion.watch(model, names)
    for each in found:
        noise = insertion.inserted(each.module)
        if noise is not None:
            noise.insertion_point.count_for(hook)

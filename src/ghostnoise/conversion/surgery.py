"""Convert the layers of a model, and back: everything is checked first, then the model is changed."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from ghostnoise.conversion import channels, insertion, scopes, sizes, swap, table, watch
from ghostnoise.conversion.selection import (
    Found,
    Types,
    Where,
    check_model,
    check_places,
    check_untouched,
    everything,
    select,
)
from ghostnoise.layers.eval_norm import EvalNorm

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    method: str,
    ghost_size: sizes.Sizes = ...,
    *,
    after: Types | None = None,
    before: Types | None = None,
    where: Where | None = None,
    channel_dim: int | None = None,
    scope: str | None = None,
    process_group: Any = None,
    **options: Any,
) -> Model:
    """Give every batch norm of `model` a method of this library, or inject noise at other layers; returns `model`.

    Layers are changed in place: parameters, buffers, state_dict keys, hooks and an optimizer that was built before
    stay valid, and converting again changes the method. A call that raises leaves the model as it was.

    Args:
        model: any network.
        method: "bn", "gbn", "xbn", "en", "gni", "gni-shift", "gni-scale", "agni" or "agni-conv".
        ghost_size: samples in a ghost batch; or a `Schedule`; or a mapping from patterns of module names to these, of
            which the first that matches counts; None is no ghosts. Not for "bn"; "xbn" takes the whole batch without.
        after, before: a type of module, or a tuple of types, to inject standalone noise at (gni and agni methods).
        where: a function of name and module that says which ones. Alone, with a noise method, it also selects modules
            that are no batch norms: noise comes after them.
        channel_dim: where the channels of inserted noise are, if the type of the module does not tell.
        scope: "local", or "global" for statistics and draws over all ranks of `process_group`; if None, local, and
            global for `nn.SyncBatchNorm`.
        process_group: the ranks, if not all.
        options: of the method's layer, such as `noise_eps`, `dof`, `running_var_from`, `alpha` or `generator`; and
            `uneven=True` where ranks may hold different numbers of samples.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> convert(model, "gni", ghost_size=32)[1]
    GhostNoiseBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True,
    ghost_size=32, noise_eps=0.001, shift=True, scale=True)
    """
    check_model(model, "convert")
    chosen = table.find(method)
    types = check_places(after, before, where)
    scopes.check(scope, process_group)
    if types is not None and chosen.noise is None:
        raise ValueError(f"{method!r} with after= or before=: it is no noise; take 'gni' or 'agni', or leave them out")
    norms, hosts = select(model, chosen.noise is not None, types, where)
    check_untouched([*norms, *hosts])
    if channel_dim is not None and not hosts:
        raise ValueError(
            f"channel_dim={channel_dim!r} without after= or before=: batch norms have theirs; leave it out"
        )
    each = sizes.each(ghost_size, [*norms, *hosts], chosen, method)
    swaps = [
        swap.plan(norm, chosen, size, options, scope, process_group)
        for norm, size in zip(norms, each[: len(norms)], strict=True)
    ]
    group = scopes.group(scope, process_group, nn.Module, None)
    insertions = _insertions(hosts, chosen, each[len(norms) :], options, channel_dim, before is not None, group)
    for place in insertions:
        place.report()
    for change in swaps:
        change.commit()
    for place in insertions:
        place.commit()
    _watch(model)
    return model


def revert(model: Model) -> Model:
    """Make converted layers what they were, with the weights that they have now, and take inserted noise away.

    Layers of ours that were built by hand become the `nn.BatchNorm*d` that they subclass. A model without any is
    returned as it is.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> revert(convert(model, "gbn", ghost_size=16))[1]
    BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    """
    check_model(model, "revert")
    found = everything(model)
    mixing = [each for each in found if isinstance(each.module, EvalNorm)]
    swaps = [swap.plan_back(each.module) for each in found if swap.is_ours(each.module)]
    if mixing:
        warnings.warn(
            f"{len(mixing)} EvalNorm layers become plain batch norm: their eval output changes, since a sample's own "
            "moments no longer count in it",
            stacklevel=2,
        )
    for change in swaps:
        change.commit()
    for each in found:
        insertion.remove(each.module)
        watch.remove(each.module)
    return model


def _insertions(
    hosts: Sequence[Found],
    method: table.Method,
    each: Sequence[Any],
    options: dict[str, Any],
    channel_dim: int | None,
    before: bool,
    group: str | None,
) -> list[insertion.Insertion]:
    dims = channels.channel_dims(hosts, channel_dim)
    plans = []
    for host, size, dim in zip(hosts, each, dims, strict=True):
        guessed = channel_dim is None and channels.is_activation(host.module)
        place = insertion.Place(host, before, guessed)
        plans.append(insertion.plan(host, method, size, options, place, dim, group))
    return plans


def _watch(model: nn.Module) -> None:
    found = everything(model)
    names = [name for each in found if swap.is_ours(each.module) for name in each.names if name]
    hook = watch.put(model, names)
    for each in found:
        noise = insertion.inserted(each.module)
        if noise is not None:
            noise.place.count_for(hook)

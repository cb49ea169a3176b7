"""Noise after or before a module, as a child and a hook of it: no module is replaced, and no key is renamed.

A hook on the converted model counts its forward passes, in which a module may be called only once.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ghostnoise.conversion.schedules import Schedule, release
from ghostnoise.conversion.swap import Method
from ghostnoise.conversion.targets import Found, range_of
from ghostnoise.masking import active
from ghostnoise.methods import registry
from ghostnoise.torch_private import children, forward_hooks

CHILD = "ghost_noise"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Watch:
    """A hook of a converted model: it counts forward passes, and detects that converted batch norms were replaced.

    `paths` lead to these batch norms.
    """

    def __init__(self, names: list[str]) -> None:
        self.paths = [name.split(".") for name in names]
        self.passes, self.running = 0, False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Record the start of a forward pass."""
        if torch.compiler.is_compiling():
            return
        self.passes, self.running = self.passes + 1, True
        for path in self.paths:
            if isinstance(_submodule(module, path), nn.SyncBatchNorm):
                raise RuntimeError(
                    f"{'.'.join(path)!r} is now a SyncBatchNorm: convert_sync_batchnorm replaced the converted layers, "
                    'and their method is lost; use convert(..., scope="global") instead, or call '
                    "ghostnoise.revert(model) to keep plain synchronized batch norm"
                )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a forward pass."""
        if not torch.compiler.is_compiling():
            self.running = False


def watch(model: nn.Module, names: list[str]) -> Watch:
    """Install the hook on `model`, instead of an earlier one."""
    unwatch(model)
    hook = Watch(names)
    model.register_forward_pre_hook(hook)
    model.register_forward_hook(hook.end)
    return hook


def unwatch(module: nn.Module) -> None:
    """Remove the hook of `watch`."""
    for hooks in forward_hooks(module):
        for key in [key for key, hook in hooks.items() if is_watch(hook)]:
            del hooks[key]


def is_watch(hook: Any) -> bool:
    """Return whether a hook is one of `watch`."""
    return isinstance(getattr(hook, "__self__", hook), Watch)


def _submodule(module: nn.Module, path: list[str]) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else children(found).get(name)
    return found


class InsertionPoint:
    """The place at which noise was inserted, stored as `insertion_point` of the noise.

    Args:
        host: the module.
        before: if True, the noise is injected into the input of the host, else into its output.
        guessed: whether the channel dimension is a guess that 3-dimensional inputs can contradict.
    """

    def __init__(self, host: Found, before: bool, guessed: bool) -> None:
        self.host, self.before, self.guessed = str(host), before, guessed
        self.reported = len(host.names) > 1  # `convert` itself warns about these
        self.count_for(None)

    def count_for(self, hook: Watch | None) -> None:
        """Count calls per forward pass of the model that has this hook, from now on."""
        self.watch, self.last_pass = hook, 0

    def check(self, x: Any) -> None:
        """Check that `x` is one tensor, and that its channel dimension is not ambiguous."""
        if not isinstance(x, Tensor):
            raise ValueError(
                f"noise {self} got a {type(x).__name__}: must be a single tensor; insert the noise at another module"
            )
        if self.guessed and x.ndim == 3:
            raise ValueError(
                f"noise {self} got an input of shape {tuple(x.shape)}: tokens (B, T, C) or a sequence (B, C, L), and "
                "an activation does not show which; convert with channel_dim=-1 for tokens, or channel_dim=1"
            )

    def count(self) -> None:
        """Warn, once, about a second call in the same forward pass of the model."""
        if torch.compiler.is_compiling() or self.watch is None or not self.watch.running or self.reported:
            return
        if self.last_pass == self.watch.passes:
            self.reported = True
            _warn(f"noise {self} is called more than once in a forward pass")
        self.last_pass = self.watch.passes

    def __str__(self) -> str:
        return f"{'before' if self.before else 'after'} {self.host}"


class Insertion(NamedTuple):
    """Noise that was checked and can be inserted."""

    host: Found
    noise: Any
    schedule: Schedule | None

    def commit(self) -> None:
        """Insert the noise, instead of noise that was inserted by an earlier conversion."""
        module = self.host.module
        remove(module)
        self.noise.train(module.training)
        module.add_module(CHILD, self.noise)
        if self.noise.insertion_point.before:
            module.register_forward_pre_hook(inject_before)
        else:
            module.register_forward_hook(inject_after)
        if self.schedule is not None:
            self.schedule.attach(self.noise)

    def report(self) -> None:
        """Warn about a module that has several names, and so is called more than once."""
        if self.noise.insertion_point.reported:
            names = ", ".join(map(repr, self.host.names))
            _warn(f"noise {self.noise.insertion_point} is at a module with several names, {names}")


def plan(
    host: Found,
    method: Method,
    size: Any,
    options: dict[str, Any],
    point: InsertionPoint,
    channel_dim: int,
    process_group: Any,
) -> Insertion:
    """Plan to insert noise of `method` at a module; raises if it is not possible."""
    if isinstance(host.module, CONTAINERS):
        raise ValueError(
            f"{host} is a container, whose children are its layers, so noise cannot be added to it: select a layer "
            "inside it (where= is called for every module, so check the type too)"
        )
    if not inserted(host.module) and hasattr(host.module, CHILD):
        raise ValueError(f"{host} has an attribute {CHILD!r} of its own: rename it, or exclude the module with where=")
    layer: Any = method.spec.noise
    fixed: dict[str, Any] = {"channel_dim": channel_dim}
    if "process_group" in inspect.signature(layer).parameters:
        fixed["process_group"] = None if process_group is ... else process_group
    elif process_group not in (..., None):
        raise ValueError(
            f"process_group={process_group!r}: {layer.__name__} has noise of each process alone; leave it out, or use "
            "scope='local'"
        )
    noise, *_ = [method.build(layer, each, options, **fixed) for each in range_of(size)]
    noise.insertion_point = point
    noise._ghostnoise_path = ".".join(filter(None, (host.names[0], CHILD)))
    return Insertion(host, noise, size if isinstance(size, Schedule) else None)


def inserted(module: nn.Module) -> Any:
    """Return the noise that conversion inserted at a module, or None."""
    noise = getattr(module, CHILD, None)
    return noise if isinstance(noise, registry.inserted()) and is_inserted(noise) else None


def is_inserted(noise: nn.Module) -> bool:
    """Return whether conversion inserted this noise."""
    return isinstance(getattr(noise, "insertion_point", None), InsertionPoint)


def remove(module: nn.Module) -> None:
    """Remove the inserted noise, if any."""
    noise = inserted(module)
    if noise is None:
        return
    release(noise)
    delattr(module, CHILD)
    for hooks in forward_hooks(module):
        for key in [key for key, hook in hooks.items() if hook in (inject_before, inject_after)]:
            del hooks[key]


def inject_after(module: Any, args: Any, output: Any) -> Any:
    """Inject noise into the output of a module; a forward hook."""
    return _inject(module.ghost_noise, output)


def inject_before(module: Any, args: Any) -> Any:
    """Inject noise into the input of a module; a forward pre-hook."""
    noise = module.ghost_noise
    if not args and not _is_idle(noise):
        raise ValueError(f"noise {noise.insertion_point} got no positional input: call the module as module(x)")
    return (_inject(noise, args[0]), *args[1:]) if args else None


def _inject(noise: Any, x: Any) -> Any:
    if isinstance(x, fx.Proxy):  # `torch.fx` traces into the host
        return noise(x)
    if _is_idle(noise):
        return x
    noise.insertion_point.check(x)
    if noise.training:
        noise.insertion_point.count()
    return noise(x)


def _is_idle(noise: Any) -> bool:
    """Return whether nothing uses a call of the noise: eval mode, without masks, `sampling` or hooks.

    The host may then have any input and output, as it has without the noise.
    """
    sampling = getattr(noise, "_sampling", None) is not None
    return not (noise.training or active() or sampling or any(forward_hooks(noise)))


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}: each call draws new noise; to have noise at one of the calls only, use a separate module for each",
        stacklevel=2,
    )

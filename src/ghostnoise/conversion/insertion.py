"""Standalone noise after or before a module, as a child and a hook: no module is replaced, no key is renamed."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ghostnoise.conversion.schedules import Schedule, release
from ghostnoise.conversion.selection import Found
from ghostnoise.conversion.sizes import Size, range_of
from ghostnoise.conversion.table import NOISES, Method
from ghostnoise.conversion.watch import Watch

CHILD = "ghost_noise"


class Place:
    """Where noise was inserted; held by the noise itself."""

    def __init__(self, host: Found, before: bool, guessed: bool) -> None:
        self.host, self.before, self.guessed = str(host), before, guessed
        self.reported = len(host.names) > 1  # by the conversion itself
        self.count_for(None)

    def count_for(self, watch: Watch | None) -> None:
        """Count calls in the forward passes that `watch` sees, from now on."""
        self.watch, self.last_pass = watch, 0

    def check(self, x: Any) -> None:
        """There is one tensor, and its channels are where they were taken to be."""
        if not isinstance(x, Tensor):
            raise ValueError(
                f"noise {self} got a {type(x).__name__}: must be a single tensor; insert the noise at another module"
            )
        if self.guessed and x.ndim == 3:
            raise ValueError(
                f"noise {self} got an input of shape {tuple(x.shape)}: tokens (B, T, C) or a sequence (B, C, L), which "
                "an activation does not tell; convert with channel_dim=-1 for tokens, or channel_dim=1"
            )

    def count(self) -> None:
        """Report a second call in one forward pass of the model, once."""
        if torch.compiler.is_compiling() or self.watch is None or not self.watch.running or self.reported:
            return
        if self.last_pass == self.watch.passes:
            self.reported = True
            _warn(f"noise {self} is called more than once in a forward pass")
        self.last_pass = self.watch.passes

    def __str__(self) -> str:
        return f"{'before' if self.before else 'after'} {self.host}"


class Insertion(NamedTuple):
    """Noise, ready to be inserted."""

    host: Found
    noise: Any
    schedule: Schedule | None

    def commit(self) -> None:
        """Insert the noise, instead of what conversion inserted before."""
        module, place = self.host.module, self.noise.place
        remove(module)
        self.noise.train(module.training)
        module.add_module(CHILD, self.noise)
        if place.before:
            module.register_forward_pre_hook(inject_before)
        else:
            module.register_forward_hook(inject_after)
        if self.schedule is not None:
            self.schedule.attach(self.noise)

    def report(self) -> None:
        """Warn of a module that is known to be called more than once."""
        if self.noise.place.reported:
            names = ", ".join(map(repr, self.host.names))
            _warn(f"noise {self.noise.place} is at a module with several names, {names}")


def plan(
    host: Found, method: Method, size: Size, options: dict[str, Any], place: Place, dim: int, group: str | None
) -> Insertion:
    """Insert noise of `method` at a module; raises if it cannot be."""
    if isinstance(host.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{host} is a container, whose children are its layers: noise cannot be one of them; select a layer in it "
            "(where= sees every module, so test the type too)"
        )
    if not inserted(host.module) and hasattr(host.module, CHILD):
        raise ValueError(f"{host} has an attribute {CHILD!r} of its own: rename it, or leave it out with where=")
    layer: Any = method.noise
    noise: Any
    noise, *_ = [method.build(layer, each, options, channel_dim=dim, process_group=group) for each in range_of(size)]
    noise.place = place
    return Insertion(host, noise, size if isinstance(size, Schedule) else None)


def inserted(module: nn.Module) -> Any:
    """The noise that conversion inserted at a module, or None."""
    noise = module._modules.get(CHILD)
    return noise if isinstance(noise, NOISES) and hasattr(noise, "place") else None


def remove(module: nn.Module) -> None:
    """Take the inserted noise away."""
    noise = inserted(module)
    if noise is None:
        return
    release(noise)
    del module._modules[CHILD]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (inject_before, inject_after)]:
            del hooks[key]


def inject_after(module: Any, args: Any, output: Any) -> Any:
    """Forward hook: noise on what a module returns."""
    return _inject(module.ghost_noise, output)


def inject_before(module: Any, args: Any) -> Any:
    """Forward pre-hook: noise on what a module is given."""
    noise = module.ghost_noise
    if not args and noise.training:
        raise ValueError(f"noise {noise.place} got no input by position: call the module as module(x)")
    return (_inject(noise, args[0]), *args[1:]) if args else None


def _inject(noise: Any, x: Any) -> Any:
    if isinstance(x, fx.Proxy):  # its host is traced through
        return noise(x)
    if not noise.training:
        return x
    noise.place.check(x)
    noise.place.count()
    return noise(x)


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}: each call draws noise of its own; give the calls modules of their own to have noise at one of them",
        stacklevel=2,
    )

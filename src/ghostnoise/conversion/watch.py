"""A hook on a converted model that counts its forward passes, and detects that converted layers were replaced."""

from typing import Any

import torch
from torch import nn

from ghostnoise.torch_private import children, forward_hooks


class Watch:
    """A forward pre-hook of the converted model; `paths` lead to its converted batch norms."""

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


def install(model: nn.Module, names: list[str]) -> Watch:
    """Install the hook on `model`, instead of an earlier one."""
    remove(model)
    watch = Watch(names)
    model.register_forward_pre_hook(watch)
    model.register_forward_hook(watch.end)
    return watch


def remove(module: nn.Module) -> None:
    """Remove the hook."""
    for hooks in forward_hooks(module):
        for key in [key for key, hook in hooks.items() if is_watch(hook)]:
            del hooks[key]


def is_watch(hook: Any) -> bool:
    """Return whether a hook was installed by this module."""
    return isinstance(getattr(hook, "__self__", hook), Watch)


def _submodule(module: nn.Module, path: list[str]) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else children(found).get(name)
    return found

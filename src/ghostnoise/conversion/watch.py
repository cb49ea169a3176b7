"""A hook on the model: counts its forward passes, and sees when converted layers have been replaced."""

from typing import Any

import torch
from torch import nn


class Watch:
    """A forward pre-hook of the model that was converted; `paths` lead to its converted batch norms."""

    def __init__(self, names: list[str]) -> None:
        self.paths = [name.split(".") for name in names]
        self.passes, self.running = 0, False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a forward pass."""
        if torch.compiler.is_compiling():
            return
        self.passes, self.running = self.passes + 1, True
        for path in self.paths:
            if isinstance(_at(module, path), nn.SyncBatchNorm):
                raise RuntimeError(
                    f"{'.'.join(path)!r} is a SyncBatchNorm now: convert_sync_batchnorm has replaced the converted "
                    'layers, and their method is lost; convert with scope="global" instead of it, or call '
                    "ghostnoise.revert(model) to keep plain synchronized batch norm"
                )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward pass."""
        if not torch.compiler.is_compiling():
            self.running = False


def put(model: nn.Module, names: list[str]) -> Watch:
    """Watch `model`, instead of any former watch."""
    remove(model)
    watch = Watch(names)
    model.register_forward_pre_hook(watch)
    model.register_forward_hook(watch.end)
    return watch


def remove(module: nn.Module) -> None:
    """Watch no longer."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_watch(hook)]:
            del hooks[key]


def is_watch(hook: Any) -> bool:
    """A hook is ours."""
    return isinstance(getattr(hook, "__self__", hook), Watch)


def _at(module: nn.Module, path: list[str]) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found

"""Stateless functions, one for each method: they check the input, draw, and update the running buffers given to them.

Normalizers take the arguments of `torch.nn.functional.batch_norm`, in its order, and keyword-only options. Every method
defines its own function (`ghostnoise.methods`); this module collects them.

>>> import torch
>>> from ghostnoise import functional
>>> x = torch.randn(64, 3, 8, 8)
>>> functional.ghost_noise(x, ghost_size=16).shape
torch.Size([64, 3, 8, 8])
"""

from typing import Any

from ghostnoise.methods import registry

__all__ = sorted(registry.functions())


def __getattr__(name: str) -> Any:
    try:
        return registry.functions()[name]
    except KeyError:
        raise AttributeError(f"module 'ghostnoise.functional' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return __all__

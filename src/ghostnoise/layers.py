"""Layers with parameters and buffers, whose forward is one call of their function.

Every method defines its own layers (`ghostnoise.methods`); this module collects them.
"""

from typing import Any

from ghostnoise.methods import registry

__all__ = sorted(registry.layers())


def __getattr__(name: str) -> Any:
    try:
        return registry.layers()[name]
    except KeyError:
        raise AttributeError(f"module 'ghostnoise.layers' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return __all__

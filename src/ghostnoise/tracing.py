"""Layers as single nodes of `torch.fx` graphs, as torch's own layers are."""

from typing import Any

from torch import fx, nn


class Leaf(nn.Module):
    """A layer that `torch.fx` records as one call, with its hooks inside, and does not look into.

    Tracers take a layer from outside `torch.nn` to be built of calls that they can record.
    """

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        traced = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(traced, fx.Proxy):
            tracer: Any = traced.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return super()._call_impl(*args, **kwargs)

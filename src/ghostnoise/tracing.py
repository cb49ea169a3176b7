"""Layers as single nodes of `torch.fx` graphs, as torch's own layers are; and a clear error for TorchScript."""

from typing import Any

from torch import fx, nn

from ghostnoise.torch_private import call_module


class Leaf(nn.Module):
    """A layer that `torch.fx` records as one call, including its hooks, without tracing into it.

    By default, tracers trace into every layer that is not from `torch.nn`.
    """

    _ghostnoise_path: str = ""  # the name of the layer in the model that `convert` converted, for error messages

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        traced = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(traced, fx.Proxy):
            tracer: Any = traced.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return call_module(self, *args, **kwargs)  # not by `super()`: `revert` changes the class of compiled layers

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which cannot compile these layers."""
        raise RuntimeError(
            f"torch.jit.script of {type(self).__name__}: it cannot be compiled to TorchScript; call "
            "ghostnoise.revert(model) first, which gives plain torch.nn layers with the same weights, or use "
            "torch.export or torch.jit.trace in eval mode"
        )

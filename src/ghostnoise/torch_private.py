"""Every private torch API that this library uses, each tried on torch 2.13.0.

Nothing else in the library may use an attribute of torch that starts with an underscore; a test checks it. When a torch
release breaks one of these, this is the only file to change.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _LazyNormBase as AnyLazyNorm
from torch.nn.modules.conv import _ConvNd as AnyConvolution
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "AnyBatchNorm",
    "AnyConvolution",
    "AnyLazyNorm",
    "DispatchMode",
    "backward_hooks",
    "batch_norm_state",
    "break_graph",
    "call_module",
    "checkpoints",
    "children",
    "current_backward",
    "eager_apply",
    "forward_hooks",
    "has_saved_tensor_hooks",
    "has_tangent",
    "in_backward",
    "input_check",
    "is_compiled_checkpoint",
    "is_exporting",
    "is_lazy_hook",
    "is_symbolic",
    "is_traced",
    "may_run_again",
    "needs_operators",
    "process_group_by_name",
    "standard_gamma",
    "transformed",
    "vmap_levels",
]


call_module: Callable[..., Any] = nn.Module._call_impl  # what `module(...)` calls, or the graph of `module.compile()`


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children of a module by name; `getattr` takes several times as long."""
    return module._modules


def batch_norm_state(
    layer: AnyBatchNorm,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return weight, bias, running mean, running variance and the number of batches; `getattr` takes longer.

    A parametrization or a wrapper may have replaced a parameter by an attribute.
    """
    if not torch.compiler.is_compiling():
        parameters, buffers = layer._parameters, layer._buffers
        try:
            running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
            return parameters["weight"], parameters["bias"], *running
        except KeyError:
            pass
    return layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.num_batches_tracked


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the forward pre-hooks and the forward hooks of a module, which can be removed from these tables."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the backward pre-hooks and the backward hooks of a module."""
    return module._backward_pre_hooks, module._backward_hooks


def is_lazy_hook(hook: object) -> bool:
    """Return whether a hook is the one by which a lazy module infers its parameters from the first batch."""
    return getattr(hook, "__name__", "") == "_infer_parameters"


def input_check(layer: type[AnyBatchNorm]) -> Any:
    """Return the method by which a class of batch norms checks the rank of its input."""
    return layer._check_input_dim


def transformed() -> bool:
    """Return whether a `torch.func` transform (grad, vmap, jvp, ...) is active."""
    return torch._C._are_functorch_transforms_active()


def vmap_levels(tensor: Tensor) -> set[int]:
    """Return the levels of the `torch.func.vmap` calls that map over a tensor."""
    levels, functorch = set(), torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            levels.add(functorch.maybe_get_level(tensor))
        tensor = functorch.get_unwrapped(tensor)
    return levels


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether any tensor has a tangent of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_exporting() -> bool:
    """Return whether `torch.export` runs; in torch 2.10, `torch.compiler.is_exporting` is True in every graph."""
    return torch.compiler._is_exporting_flag


def needs_operators(*tensors: Tensor | None) -> bool:
    """Return whether torch itself must see every operator: for export, `torch.jit.trace`, `torch.func` or tangents."""
    return (
        torch.compiler._is_exporting_flag
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or (forward_ad._current_level >= 0 and has_tangent(*tensors))
    )


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the `apply` of an autograd function for calls outside of `torch.func`, in half the time.

    `Function.apply` also handles `torch.func`, and unwraps tensors of a transform that has ended, as operators do.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_symbolic() -> bool:
    """Return whether tensors have no values, or operators are recorded: in FakeTensorMode, `make_fx` and export."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def is_traced() -> bool:
    """Return whether `torch.jit.trace` records the operators."""
    return torch._C._get_tracing_state() is not None


def in_backward() -> bool:
    """Return whether this thread runs inside a backward pass, as the recomputation of a checkpoint does.

    `torch.compile` decides on recomputation after it has captured the pass, and runs side effects once.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def may_run_again() -> bool:
    """Return whether this forward pass may run again, inside of a backward pass, or is such a pass."""
    if torch.compiler.is_compiling():
        return False
    return (
        not torch.is_grad_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._current_graph_task_id() != -1
    )


def current_backward() -> int:
    """Return a number that identifies the backward pass that this thread runs inside; -1 outside."""
    return torch._C._current_graph_task_id()


def standard_gamma(concentration: Tensor, **generator: torch.Generator) -> Tensor:
    """Draw from Gamma(concentration, 1); `torch.distributions.Gamma` does not accept a generator."""
    return torch._standard_gamma(concentration, **generator)


def break_graph(message: str) -> None:
    """Break the graph that `torch.compile` captures, and give the reason."""
    torch._dynamo.graph_break(msg=message)


def is_compiled_checkpoint() -> bool:
    """Return whether `torch.compile` captures a region of a checkpoint; it then runs this while it captures."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # an export without Dynamo
        return False
    while tracer is not None:
        if tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


# What `torch.compiler.assume_constant_result` sets, which takes a second to import Dynamo.
is_compiled_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def process_group_by_name(name: str) -> Any:
    """Return the process group with this name; raises RuntimeError if this process has none."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks for saved tensors are active, as inside of a checkpoint without reentrant autograd."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def checkpoints() -> tuple[list[Any], Any]:
    """Return what identifies the checkpoints that this pass is the first one of, and that of which it runs again.

    The latter is None if the pass does not run again. Checkpoints around a recomputation are not returned: they have
    run before. A checkpoint without reentrant autograd has an object, its frame, which its hooks for saved tensors
    hold. A reentrant one, of torch or of a library that has copied it, is an autograd function: its context is an
    argument on the call stack.
    """
    hooks: list[Any] = []
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while top is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    found: list[Any] = []
    for pack, _ in hooks:  # the innermost first
        target = _captured(pack, "target_frame_ref")
        if target is not None:
            return found, target()
        frame = _captured(pack, "frame")
        if frame is not None:
            found.append(frame)
    call = inspect.currentframe()
    while call is not None:
        name = call.f_code.co_name
        if name in ("forward", "backward") and call.f_code.co_qualname == f"CheckpointFunction.{name}":
            context = call.f_locals.get("ctx")
            if name == "backward":
                return found, context
            if context is not None:
                found.append(context)
        call = call.f_back
    return found, None


def _captured(function: Any, name: str) -> Any:
    """Return the variable of a function in `torch.utils.checkpoint` that it has captured; None if there is none."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars or function.__module__ != "torch.utils.checkpoint":
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents

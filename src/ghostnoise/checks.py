"""Checks of what users pass. Each error gives what was given, the rule and the remedy."""

import functools
import inspect
import math
import numbers
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ghostnoise.torch_private import is_exporting, is_symbolic, is_traced, transformed, vmap_levels

MOST_SAMPLES = 65_536  # in a ghost batch
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ghost_size(value: object, least: int = 1) -> int:
    """Return `value` as an integer in the allowed range."""
    return _samples("ghost_size", value, least, "the number of samples in a ghost batch; use 32 to start with")


def ghost_size_or_none(value: object, least: int = 1) -> int | None:
    """Return `value` as an integer in the allowed range, or None, which disables ghost batches."""
    if value is None or (type(value) is int and least <= value <= MOST_SAMPLES):
        return value  # at once, since this runs in every call
    return ghost_size(value, least)


def asking_for_ghost_size(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a layer, whose error about a missing ghost size gives a remedy."""
    parameter = inspect.signature(constructor).parameters.get("ghost_size")
    if parameter is None or parameter.default is not parameter.empty:
        return constructor

    @functools.wraps(constructor)
    def checked(layer: nn.Module, *arguments: Any, **options: Any) -> None:
        try:
            constructor(layer, *arguments, **options)
        except TypeError as error:
            if not str(error).endswith("argument: 'ghost_size'"):
                raise
            raise TypeError(
                f"ghost_size is missing: {type(layer).__name__} needs the number of samples in a ghost batch, as a "
                "keyword; use ghost_size=32 to start with, or None to disable ghost batches"
            ) from None

    return checked


def history(value: object, least: int = 0) -> int:
    """Return `value` as a number of earlier samples."""
    meaning = "the number of earlier samples; use 256 to start with"
    return _samples("history", value, least, meaning + (", or 0 for the batch alone" if least == 0 else ""))


def _samples(name: str, value: object, least: int, meaning: str) -> int:
    number = _integer(value)
    if not least <= number <= MOST_SAMPLES:
        raise ValueError(f"{name}={value!r}: must be an integer from {least} to {MOST_SAMPLES}, {meaning}")
    return number


def steps(value: object, least: int = 1, name: str = "steps") -> int:
    """Return `value` as a number of steps."""
    number = _integer(value)
    if number < least:
        raise ValueError(f"{name}={value!r}: must be an integer of {least} or more, a number of steps")
    return number


def samples(name: str, value: object, least: int = 1) -> int:
    """Return `value` as a number of samples."""
    number = _integer(value)
    if number < least:
        raise ValueError(f"{name}={value!r}: must be an integer of {least} or more, a number of samples")
    return number


def _integer(value: object) -> int:
    """Return `value` as an integer, or -1."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def no_draws(name: str, given: object) -> None:
    """Check that no draws are given where ghost batches are disabled."""
    if given is not None:
        raise ValueError(f"{name} with ghost_size=None: there are no ghost batches to draw; give a ghost_size")


def module(model: object, name: str) -> None:
    """Check that `model` is a module, and not compiled to TorchScript."""
    if type(model).__module__.startswith("torch.export"):
        raise ValueError(
            f"{name} got an {type(model).__name__}, whose layers have become operators: pass the model itself, and "
            "export it afterwards"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} got a {type(model).__name__}: model must be an nn.Module; pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"{name} got a ScriptModule, whose layers cannot be changed: pass the model before torch.jit")


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check that `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def flag(name: str, value: object) -> None:
    """Check that `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def generator(value: object) -> None:
    """Check that `value` is a generator or None."""
    if value is not None and not isinstance(value, Generator):
        raise ValueError(
            f"generator={value!r}: must be a torch.Generator or None; use torch.Generator().manual_seed(seed), or "
            "torch.manual_seed(seed) for the default one"
        )


def number(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Check that `value` is a finite number between `low` and `high`; an open end is excluded."""
    if type(value) is float:  # at once, since this runs in every call
        real = value
    else:
        real = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    above = low < real if open_low else low <= real
    below = real < high if open_high or high == math.inf else real <= high
    if not (above and below):
        ends = "(" if open_low else "[", ")" if open_high or high == math.inf else "]"
        raise ValueError(f"{name}={value!r}: must be a number in {ends[0]}{low}, {high}{ends[1]}")


def floating(x: object, name: str) -> None:
    """Check that `x` is a dense tensor with a supported floating dtype."""
    if isinstance(x, Tensor) and x.dtype in DTYPES and x.layout is torch.strided and not x.is_nested:
        return
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name} got a {type(x).__module__}.{type(x).__qualname__}: must be a torch.Tensor; convert with "
            "torch.as_tensor(x)"
        )
    if x.is_nested:
        raise ValueError(
            f"{name} got a nested tensor: must be a dense tensor; pad with torch.nested.to_padded_tensor(x, 0.0), or "
            "normalize each part alone"
        )
    if x.layout is not torch.strided:
        raise ValueError(f"{name} got a tensor of layout {x.layout}: must be a dense tensor; convert with x.to_dense()")
    remedy = "normalize torch.view_as_real(x)" if x.is_complex() else "convert with x.float()"
    raise ValueError(f"{name} got an input of dtype {x.dtype}: must be float16, bfloat16, float32 or float64; {remedy}")


def dimension(channel_dim: object) -> None:
    """Check that `channel_dim` may be a channel dimension: an integer, and not the batch dimension."""
    if isinstance(channel_dim, bool) or not isinstance(channel_dim, int) or channel_dim == 0:
        raise ValueError(
            f"channel_dim={channel_dim!r}: must be an integer other than 0, the batch dimension; use 1, or -1 if "
            "channels come last"
        )


# The tensors of a batch norm that have an element for each channel, each of which may be None.
PER_CHANNEL = ("running_mean", "running_var", "weight", "bias")


def layout(x: Tensor, name: str, channel_dim: int, per_channel: Sequence[Tensor | None] = ()) -> tuple[int, int]:
    """Check that `x` is a batch with a channel dimension, whose size is that of each tensor of `PER_CHANNEL`, if given.

    Returns the number of channels C and of positions S; under `torch.jit.trace`, which records sizes as tensors, S is 0
    and channels are not compared.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        floating(x, name)
    shape, ndim = x.shape, x.ndim
    if not 2 <= ndim <= 5:
        raise ValueError(
            f"{name} got an input of shape {tuple(shape)}: must have 2 to 5 dimensions, the first one the batch; "
            "add or flatten dimensions"
        )
    if type(channel_dim) is not int or channel_dim == 0:
        dimension(channel_dim)
    if not -ndim < channel_dim < ndim:
        raise ValueError(
            f"channel_dim={channel_dim}: must be a dimension of the input, of shape {tuple(shape)}, "
            "other than the batch; use 1, or -1 if channels come last"
        )
    count: Any = shape[channel_dim]
    if isinstance(count, Tensor):
        return count, 0  # type: ignore[return-value]  # recorded by torch.jit.trace
    expected = (count,)
    for tensor in per_channel:
        if tensor is not None and tensor.shape != expected:
            wrong = next(key for key, one in zip(PER_CHANNEL, per_channel, strict=True) if one is tensor)
            raise ValueError(
                f"{name} got {count} channels in dimension {channel_dim} of an input of shape {tuple(shape)}, and "
                f"{wrong} of shape {tuple(tensor.shape)}: must be ({count},); check num_features or channel_dim"
            )
    return count, math.prod(shape[1:]) // count if count else 0


def bools(mask: object, name: str) -> Tensor:
    """Return a mask that is a tensor of bools with at least one dimension."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"{name} got a mask of {given}: must be a torch.Tensor of dtype torch.bool, True at valid positions; "
            "convert with mask.bool(), or invert a mask that is True at padding, such as key_padding_mask, with ~mask"
        )
    if mask.ndim == 0:
        raise ValueError(f"{name} got a mask of shape (): must be (B, *positions), a bool for each position of a batch")
    return mask


def mask(mask: object, x: Tensor, name: str, channel_dim: int) -> None:
    """Check that `mask` has a bool for each position of each sample of `x`."""
    mask = bools(mask, name)
    if traced():
        return
    expected = positions_shape(x, channel_dim)
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"{name} got a mask of shape {tuple(mask.shape)} for an input of shape {tuple(x.shape)}: must be (B, "
            f"*positions) = {expected}, the shape of the input without its channels in dimension {channel_dim}; give "
            "the mask of these positions, or check channel_dim"
        )
    if mask.device != x.device:
        raise ValueError(
            f"{name} got a mask on {mask.device} for an input on {x.device}: must be on the same device; move it with "
            "mask.to(input.device)"
        )


def positions_shape(x: Tensor, channel_dim: int) -> tuple[int, ...]:
    """Return the shape of x without its channels, (B, *positions)."""
    dim = channel_dim % x.ndim
    return (*x.shape[:dim], *x.shape[dim + 1 :])


def some_valid(valid: Tensor, name: str, on: str | None = "cpu") -> None:
    """Check that a mask, or a table of the numbers of valid positions, is not 0 everywhere.

    By default only if it is on a CPU: on an accelerator this would synchronize with the device. There, the output is
    then 0, and running statistics are not updated.
    """
    if readable(valid, on) and valid.numel() > 0 and not valid.any():
        raise ValueError(
            f"{name} got a mask that is False everywhere: at least one position of the batch must be valid; skip "
            "batches that are padded entirely, or invert a mask that is True at padding with ~mask"
        )


def readable(tensor: Tensor, on: str | None = "cpu") -> bool:
    """Return whether the values of a tensor can be read: outside of graphs, and on this type of device, if any."""
    if torch.compiler.is_compiling() or on not in (None, tensor.device.type):
        return False
    return type(tensor) is Tensor and not (is_traced() or transformed() or is_symbolic())


def traced() -> bool:
    """Return whether `torch.jit.trace` records the operators."""
    return not torch.compiler.is_compiling() and is_traced()


def trainable(shape: torch.Size, name: str) -> None:
    """Check that statistics can be computed: at least one sample, no empty dimension, and no `torch.jit.trace`."""
    if traced():
        raise RuntimeError(
            f"{name} under torch.jit.trace in training mode: a trace would record the draws of one batch; call eval() "
            "before tracing, or use torch.compile"
        )
    if 0 in shape:
        raise ValueError(
            f"{name} got an empty input of shape {tuple(shape)}: training needs at least one sample and no empty "
            "dimension; skip empty batches, or call eval()"
        )


def several_values(shape: torch.Size, spatial: int, counts: Tensor | None = None) -> None:
    """Check that there is more than one value per channel, with the message of `torch.nn.functional.batch_norm`.

    `counts` (B, 1) are the numbers of valid positions of the samples; see `some_valid`.
    """
    if shape[0] * spatial == 1 or (counts is not None and readable(counts) and counts.sum() == 1):
        of = "" if counts is None else " and a mask with 1 valid position"
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}{of}")


def ghost_values(shape: torch.Size, name: str, spatial: int, size: int | None, valid: Tensor | None = None) -> None:
    """Check that ghost batches have more than one value: with one, the output would be all zeros.

    `valid` are the numbers of valid positions of ghost batches; see `some_valid`.
    """
    if valid is not None and readable(valid) and (valid == 1).any():
        raise ValueError(
            f"ghost_size={size} with an input of shape {tuple(shape)} and a mask: a ghost batch with one valid "
            f"position would be normalized to zeros; {name} needs 2 or more; raise ghost_size, or sort out such samples"
        )
    if size is not None and min(size, shape[0]) * spatial == 1:
        raise ValueError(
            f"ghost_size={size} with an input of shape {tuple(shape)}: ghost batches of one value per channel "
            f"would be normalized to zeros; {name} needs 2 values or more; raise ghost_size"
        )


def other_values(
    shape: torch.Size,
    spatial: int,
    size: int | None,
    name: str = "exclusive_batch_norm",
    valid: Tensor | None = None,
    least: int = 2,
) -> None:
    """Check that `least` values contribute besides the sample itself: with one, these alone have no variance.

    `valid` are the numbers of valid positions of the other samples, for each sample that has any; see `some_valid`.
    """
    if valid is not None and readable(valid) and (valid < least).any():
        raise ValueError(
            f"sample {int((valid < least).flatten().int().argmax())} of an input of shape {tuple(shape)} with a mask: "
            f"the other samples of its {'batch' if size is None else 'ghost batch'} have fewer than {least} valid "
            f"positions, and {name} would divide by the standard deviation of a single value; use a larger batch or "
            "ghost_size, or sort out samples without valid positions"
        )
    count = shape[0] if size is None or shape[0] < 2 * size else size  # of the smallest ghost batch
    if count == 1:
        raise ValueError(
            f"batch of 1 sample, of shape {tuple(shape)}: {name} needs 2 samples or more; "
            "use a larger batch or ghost_noise_batch_norm with normalizer='batch'"
        )
    if (count - 1) * spatial < least:
        raise ValueError(
            f"{'batch' if size is None else 'ghost batches'} of {count} samples in an input of shape {tuple(shape)}: "
            f"{name} would divide by the standard deviation of a single value; "
            f"{'use a batch of 3 samples' if size is None else 'raise ghost_size to 3'} or more"
        )


def few_samples(message: str, tracked: Tensor | None) -> None:
    """Warn of a batch with too few samples for a layer, if it is the first one that the layer is trained with.

    `tracked` is the number of batches before; None for functions, which have no first batch. A small last batch of an
    epoch is no reason to warn. A compiled layer warns when it is compiled for such a batch.
    """
    if tracked is not None and (torch.compiler.is_compiling() or (_readable_now(tracked) and not tracked)):
        warn_once(message)


def warn_once(message: str) -> None:
    """Warn; by default, Python shows equal warnings once."""
    warnings.warn(message, stacklevel=4)


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compile` calls it when it compiles


def _readable_now(tensor: Tensor) -> bool:
    return readable(tensor, None) and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def present(counts: Tensor) -> int:
    """Return the number of samples that have valid positions; the size of the batch if that cannot be read."""
    return int((counts > 0).sum()) if readable(counts) else len(counts)


def writable(buffers: Sequence[Tensor | None], stats: Tensor) -> None:
    """Check that `stats` can be written to the buffers: under `torch.func.vmap`, each run needs buffers of its own."""
    if torch.compiler.is_compiling() or not transformed():
        return
    mapped = vmap_levels(stats)
    if any(not mapped <= vmap_levels(buffer) for buffer in buffers if buffer is not None):
        raise ValueError(
            "running buffers that vmap does not map over, in training: each run would update them differently; map "
            "over them too (torch.func.stack_module_state), set track_running_stats=False on the layers, or call eval()"
        )


def recordable() -> None:
    """Check that a history can be updated: not in a `torch.func` transform, and not where tensors have no values."""
    if is_exporting() or (not torch.compiler.is_compiling() and is_symbolic()):
        raise ValueError(
            "a history in training under torch.export, make_fx or FakeTensorMode: a history must keep values, which "
            "tensors do not have there; use layers with history=0, torch.compile instead of an export, or call eval()"
        )
    if not torch.compiler.is_compiling() and transformed():
        raise ValueError(
            "a history in training under torch.func (vmap, grad, ...): a transformed function cannot update it; use "
            "layers with history=0, torch.autograd instead of torch.func, or call eval()"
        )


def index_table(indices: object, rows: int, size: int, batch_size: int) -> None:
    """Check a table of `size` sample numbers for each of `rows` samples, out of a batch of `batch_size`."""
    indices = _index_tensor(indices, "(B, N)")
    if indices.shape != (rows, size):
        raise ValueError(
            f"indices of shape {tuple(indices.shape)}: must be (B, N) = ({rows}, {size}), "
            "the samples drawn for each sample"
        )
    # On an accelerator this would synchronize with the device, whose own bounds check reports the same.
    if indices.device.type == "cpu" and rows > 0 and not torch.compiler.is_compiling():
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= batch_size:
            raise ValueError(f"indices from {low} to {high}: must lie in [0, B) = [0, {batch_size})")


def permutation(indices: object, batch_size: int, of: str) -> None:
    """Check a permutation of the samples of a batch; `of` describes what takes one."""
    indices = _index_tensor(indices, "(B,)")
    if indices.shape != (batch_size,):
        raise ValueError(
            f"indices of shape {tuple(indices.shape)}: must be (B,) = ({batch_size},), a permutation of the samples, "
            f"{of}; use torch.randperm"
        )
    # See `index_table`.
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        missing = set(range(batch_size)) - set(indices.tolist())
        if missing:
            raise ValueError(
                f"indices without sample {min(missing)}: must contain each of the {batch_size} samples once, {of}; "
                "use torch.randperm"
            )


def _index_tensor(indices: object, shape: str) -> Tensor:
    if not isinstance(indices, Tensor):
        raise ValueError(
            f"indices of type {type(indices).__name__}: must be a torch.Tensor {shape}; convert with torch.as_tensor"
        )
    if indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"indices of dtype {indices.dtype}: must be int64 or int32")
    return indices

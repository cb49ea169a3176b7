"""What users may pass. Each error says what was given, the rule and the remedy."""

import math
import numbers
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def ghost_size(value: object, least: int = 1) -> int:
    """`value` as an integer of at least `least`."""
    number = _integer(value)
    if number < least:
        raise ValueError(f"ghost_size={value!r}: must be an integer of {least} or more, the samples in a ghost batch")
    return number


def steps(value: object, least: int = 1) -> int:
    """`value` as a number of steps."""
    number = _integer(value)
    if number < least:
        raise ValueError(f"steps={value!r}: must be an integer of {least} or more, the steps of a schedule")
    return number


def _integer(value: object) -> int:
    """`value` as an integer, or -1."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def ghost_size_or_none(value: object, least: int = 1) -> int | None:
    """`value` as an integer of at least `least`, or None: no ghost batches."""
    return None if value is None else ghost_size(value, least)


def nothing_drawn(name: str, given: object) -> None:
    """Without ghost batches there is nothing that could be given as drawn."""
    if given is not None:
        raise ValueError(f"{name} with ghost_size=None: there are no ghost batches to draw; give a ghost_size")


def share(alpha: float | None, size: int | None) -> float:
    """EvalNorm's share of oneself: `alpha`, in [0, 1], or if None 1/`size`."""
    if alpha is not None:
        number("alpha", alpha, 0, 1)
        return alpha
    if size is None:
        raise ValueError("alpha=None with ghost_size=None: the share would be 1/ghost_size; give one of the two")
    return 1 / size


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """`value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def number(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
    """`value` is a finite number between `low` and `high`, or strictly so at an open end."""
    real = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    above = low < real if open_low else low <= real
    below = real < high if open_high or high == math.inf else real <= high
    if not (above and below):
        ends = "(" if open_low else "[", ")" if open_high or high == math.inf else "]"
        raise ValueError(f"{name}={value!r}: must be a number in {ends[0]}{low}, {high}{ends[1]}")


def floating(x: Tensor, name: str) -> None:
    """`x` has a real floating dtype."""
    if not x.is_floating_point():
        raise ValueError(
            f"{name} got an input of dtype {x.dtype}: must be a real floating dtype; convert with x.float()"
        )


def dimension(channel_dim: object) -> None:
    """`channel_dim` may be a channel dimension: an integer, and not the batch dimension."""
    if isinstance(channel_dim, bool) or not isinstance(channel_dim, int) or channel_dim == 0:
        raise ValueError(
            f"channel_dim={channel_dim!r}: must be an integer other than 0, the batch dimension; use 1, or -1 where "
            "channels come last"
        )


def layout(x: Tensor, name: str, channel_dim: int, channels: dict[str, Tensor | None] | None = None) -> tuple[int, int]:
    """`x` is a batch with a channel dimension, whose size is that of every given (C,) tensor; returns (C, S)."""
    floating(x, name)
    if not 2 <= x.ndim <= 5:
        raise ValueError(
            f"{name} got an input of shape {tuple(x.shape)}: must have 2 to 5 dimensions, the first one the batch; "
            "add or flatten dimensions"
        )
    dimension(channel_dim)
    if not -x.ndim < channel_dim < x.ndim:
        raise ValueError(
            f"channel_dim={channel_dim}: must be a dimension of the input, of shape {tuple(x.shape)}, "
            "other than the batch; use 1, or -1 where channels come last"
        )
    count = x.shape[channel_dim]
    for key, tensor in (channels or {}).items():
        if tensor is not None and tensor.shape != (count,):
            raise ValueError(
                f"{name} got {count} channels in dimension {channel_dim} of an input of shape {tuple(x.shape)}, and "
                f"{key} of shape {tuple(tensor.shape)}: must be ({count},); check num_features or channel_dim"
            )
    return count, math.prod(x.shape[1:]) // count if count else 0


def trainable(shape: torch.Size, name: str) -> None:
    """A batch that statistics can be taken of: at least one sample, and no empty dimension."""
    if 0 in shape:
        raise ValueError(
            f"{name} got an empty input of shape {tuple(shape)}: training needs at least one sample and no empty "
            "dimension; skip empty batches, or call eval()"
        )


def several_values(shape: torch.Size, spatial: int) -> None:
    """More than one value per channel, in the words of `torch.nn.functional.batch_norm`."""
    if shape[0] * spatial == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


def ghost_values(shape: torch.Size, name: str, spatial: int, size: int | None) -> None:
    """Ghost batches of more than one value: with one, the output would be all zeros."""
    if size is not None and min(size, shape[0]) * spatial == 1:
        raise ValueError(
            f"ghost_size={size} with an input of shape {tuple(shape)}: ghost batches of one value per channel "
            f"would be normalized to zeros; {name} needs 2 values or more; raise ghost_size"
        )


def other_values(shape: torch.Size, spatial: int, size: int | None) -> None:
    """At least two values beside oneself: with fewer, the denominator would be sqrt(eps)."""
    count = shape[0] if size is None or shape[0] < 2 * size else size  # of the smallest ghost batch
    if count == 1:
        raise ValueError(
            f"batch of 1 sample, of shape {tuple(shape)}: exclusive_batch_norm needs 2 samples or more; "
            "raise the batch size or use ghost_noise_batch_norm"
        )
    if (count - 1) * spatial < 2:
        raise ValueError(
            f"ghost batches of {count} samples in an input of shape {tuple(shape)}: exclusive_batch_norm would "
            "divide by the deviation of a single value; raise ghost_size to 3 or more"
        )


def written_to(buffers: Sequence[Tensor | None], stats: Tensor) -> None:
    """Buffers that `stats` can be written to: under `torch.func.vmap`, one for each of its runs."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    mapped = _vmaps(stats)
    if any(not mapped <= _vmaps(buffer) for buffer in buffers if buffer is not None):
        raise ValueError(
            "running buffers that vmap does not map over, in training: every run would move them elsewhere; map over "
            "them too (torch.func.stack_module_state), set track_running_stats=False on the layers, or call eval()"
        )


def _vmaps(tensor: Tensor) -> set[int]:
    """The levels of the `torch.func.vmap`s that map over a tensor."""
    levels, functorch = set(), torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            levels.add(functorch.maybe_get_level(tensor))
        tensor = functorch.get_unwrapped(tensor)
    return levels


def index_table(indices: Tensor, rows: int, size: int, batch_size: int) -> None:
    """A table of `size` sample numbers for each of `rows` samples, out of a batch of `batch_size`."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"indices of dtype {indices.dtype}: must be int64 or int32")
    if indices.shape != (rows, size):
        raise ValueError(
            f"indices of shape {tuple(indices.shape)}: must be (B, N) = ({rows}, {size}), "
            "the samples drawn for each sample"
        )
    # On an accelerator this would wait for the device, and its own bounds check reports the same.
    if indices.device.type == "cpu" and rows > 0 and not torch.compiler.is_compiling():
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= batch_size:
            raise ValueError(f"indices from {low} to {high}: must lie in [0, B) = [0, {batch_size})")

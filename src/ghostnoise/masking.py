"""The masks of a block of code, which the layers of this library take without a change of the model.

A checkpoint runs a forward pass again inside the backward pass, when the block may have ended or another one may be
active. The pass then takes the masks of the first pass (`ghostnoise.engine.recompute`).
"""

import inspect
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from ghostnoise import checks
from ghostnoise.engine.recompute import remembered
from ghostnoise.torch_private import may_run_again
from ghostnoise.tracing import Leaf

Masks: TypeAlias = dict[tuple[int, ...], Tensor]  # by their shapes


class masked:
    """Give the layers inside of a `with` block the valid positions of a padded batch.

    A layer takes the mask whose shape is that of its input without the channels. If none has this shape, it raises an
    error with its name. The input of a layer without positions, (B, C), takes a mask (B,) if there is one; else its
    samples are those with a valid position. A `mask=` that is given to a layer takes precedence, and so does an inner
    block. The block is that of the current thread.

    Checkpoints that run a forward pass again after the block use the masks of the block.

    Args:
        mask: a bool tensor (B, *positions), True where a position is valid. The `key_padding_mask` of
            `nn.MultiheadAttention` is the opposite: give `~key_padding_mask`.
        more: masks of other shapes, such as those of layers after a convolution with a stride.

    Examples:
        >>> import ghostnoise
        >>> model = nn.Sequential(nn.Conv1d(4, 8, 1), ghostnoise.BatchNorm1d(8))
        >>> mask = torch.arange(10) < torch.tensor([[10], [7]])
        >>> with ghostnoise.masked(mask):
        ...     y = model(torch.randn(2, 4, 10))
        >>> y[1, :, 7:].any()
        tensor(False)
    """

    def __init__(self, mask: Tensor, *more: Tensor) -> None:
        self.masks: Masks = {}
        for each in (mask, *more):
            checks.bools(each, "masked")
            if not (dist.is_available() and dist.is_initialized()):  # else the layers check the batch of all ranks
                checks.some_valid(each, "masked", on=None)
            if tuple(each.shape) in self.masks:
                raise ValueError(
                    f"masked got two masks of shape {tuple(each.shape)}: must be one for each shape; pass mask= to the "
                    "layers of one of them"
                )
            self.masks[tuple(each.shape)] = each
        for each in (mask, *more):
            if each.ndim > 1:
                self.masks.setdefault((each.shape[0],), each.flatten(1).any(1))

    def __enter__(self) -> None:
        _local.state.blocks = (*_local.state.blocks, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Blocks of generators may end in another order than they began in, or in another thread.
        blocks = list(_local.state.blocks)
        for place in reversed(range(len(blocks))):
            if blocks[place] is self:
                del blocks[place]
                break
        _local.state.blocks = tuple(blocks)


def active() -> bool:
    """Return whether layers that are called now take their masks from a block."""
    return _masks() is not None


def repeated(count: int) -> AbstractContextManager[None]:
    """Return a block with the masks of the current one for a batch that is repeated `count` times."""
    masks = _masks()
    if masks is None:
        return nullcontext()
    return masked(*(mask.repeat(count, *(1 for _ in shape[1:])) for shape, mask in masks.items()))


def mask_of(
    layer: nn.Module,
    input: Tensor,
    given: Tensor | None,
    channel_dim: int = 1,
    subject: str = "",
    remedy: str = "pass mask= to the layer",
) -> Tensor | None:
    """Return the mask of a layer's input: the given one, or that of the block; None outside of blocks.

    If the block has none for it, the error begins with `subject`, by default that the layer got an input.
    """
    if given is not None:
        return given
    if not may_run_again():
        if not _local.state.blocks:
            return None
        masks = _masks()
    else:
        masks = remembered(_masks)
    if masks is None or not isinstance(input, Tensor) or not -input.ndim <= channel_dim < input.ndim:
        return None
    shape = checks.positions_shape(input, channel_dim)
    found = masks.get(shape)
    if found is None:
        name = getattr(layer, "_ghostnoise_path", "")
        subject = subject or f"{repr(name) + ', a ' if name else ''}{layer} got an input"
        raise ValueError(
            f"{subject} of shape {tuple(input.shape)} inside of "
            f"ghostnoise.masked, which has masks of shape {', '.join(str(each) for each in masks)}: must have one for "
            f"its positions, {shape}; give this one too, as in masked(mask, mask[:, ::2]) for a stride of 2, or "
            f"{remedy}"
        )
    return found


def given_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the `mask` argument of a call of a layer; None if there is none, or the layer is not of this library."""
    parameters = list(inspect.signature(layer.forward).parameters) if isinstance(layer, Leaf) else []
    if "mask" not in parameters:
        return None
    place = parameters.index("mask")
    mask: Tensor | None = args[place] if place < len(args) else kwargs.get("mask")
    return mask


class _State:
    def __init__(self) -> None:
        self.blocks: tuple[masked, ...] = ()


class _Local(threading.local):
    """The blocks of the current thread.

    Thread-local rather than a `ContextVar`, which `torch.compile` cannot trace. An object of its own, since graphs do
    not write the attributes of a `threading.local`, and do not guard those of its class.
    """

    def __init__(self) -> None:
        self.state = _State()


_local = _Local()


def _masks() -> Masks | None:
    """Return the masks of the innermost block."""
    blocks = _local.state.blocks
    return blocks[-1].masks if blocks else None

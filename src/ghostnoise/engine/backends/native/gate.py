"""The gate: which tensors the library may access, and how they lie in memory.

This is the only module that takes the address of a tensor. `admits` decides for every tensor; what it does not admit is
served by `Aten`, or raises where `Aten` raises.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import Aten
from ghostnoise.engine.backends.base import Latest
from ghostnoise.engine.backends.native.library import DTYPES
from ghostnoise.statistics.moments import Moments
from ghostnoise.torch_private import same_metadata

P = ParamSpec("P")
T = TypeVar("T")

PLAIN = frozenset({Tensor, torch.nn.Parameter})  # the instances of torch.nn.Buffer are of type Tensor
CPU = torch.device("cpu")
TABLE_DTYPES = (torch.float32, torch.float64)
ARITHMETIC = {dtype: torch.promote_types(dtype, torch.float32) for dtype in DTYPES}


class NotAdmitted(Exception):
    """The library may not access a tensor, or has no code for its dtype, shape or strides."""


def or_aten(method: Callable[P, T]) -> Callable[P, T]:
    """Serve a call with the method of `Aten` if the gate does not admit one of its tensors."""
    reference = getattr(Aten, method.__name__)

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except NotAdmitted:
            served: T = reference(*args, **kwargs)
            return served

    return call


def admits(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are exactly what is at its address.

    True for a Tensor, Parameter or Buffer with memory on the CPU. False for all other subclasses (fake, DTensor), for
    negative views (the conjugate bit needs a complex dtype, which no caller takes), nested, sparse, meta, functional
    and zero-tensors, wrappers of torch.func, and tensors whose storage was freed: these have no address.
    """
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.is_neg() or tensor.is_nested:
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


made_at: Callable[[Tensor], int] = Tensor.data_ptr  # the address of a tensor that was admitted or made here


def addresses(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors that were admitted or made here; 0 for None."""
    return [0 if tensor is None else made_at(tensor) for tensor in tensors]


class Alike:
    """Tensors that were admitted as they are; the addresses of others with the same metadata are found in one call."""

    __slots__ = ("absent", "same")

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.same, self.absent = same_metadata(tensors), addresses(*tensors).count(0)  # empty tensors stand for None

    def addresses(self, tensors: tuple[Tensor, ...]) -> list[int] | None:
        """Return the addresses of these tensors; None if they are not alike."""
        if not self.same(*tensors):
            return None
        at = list(map(made_at, tensors))
        return at if at.count(0) == self.absent else None  # else a storage was freed


class Admissions(Generic[T]):
    """What was found out about tensors that were admitted as they are, for others with the same metadata."""

    def __init__(self) -> None:
        self.found = Latest[tuple[Alike, T]]()

    def get(self, key: Hashable, tensors: tuple[Tensor, ...]) -> tuple[T, list[int]] | None:
        """Return what was found out about tensors like these, for the same key, and the addresses of these."""
        for alike, value in self.found.get(key):
            if (at := alike.addresses(tensors)) is not None:
                return value, at
        return None

    def add(self, key: Hashable, tensors: tuple[Tensor, ...], value: T) -> None:
        """Remember what was found out about tensors that were admitted as they are; empty ones stand for None."""
        alike = Alike(tensors)
        if alike.addresses(tensors) is not None:  # else one of them is there twice
            self.found.add(key, (alike, value))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a CPU tensor, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device=CPU)


def located(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return the address of a table that is admitted as it is, contiguous and of this dtype and shape; else None."""
    if type(tensor) not in PLAIN or tensor.dtype is not dtype or not tensor.is_cpu or tensor.is_neg():
        return None
    try:  # nested tensors have no shape, and others have no address, as in `admits`
        if tensor.shape != shape or not tensor.is_contiguous():
            return None
        at = tensor.data_ptr()
    except RuntimeError:
        return None
    return at if at or tensor.numel() == 0 else None


def fits(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a table is admitted as it is: contiguous and of this dtype and shape."""
    return located(tensor, dtype, shape) is not None


def table(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a table that fits: the tensor itself, or a copy."""
    if fits(tensor, dtype, shape):
        return tensor
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.is_nested or tensor.shape != shape:
        raise NotAdmitted
    copy = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format).copy_(tensor.detach())
    if not fits(copy, dtype, shape):
        raise NotAdmitted
    return copy


def optional(tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """Return None, or an admitted table."""
    return None if tensor is None else table(tensor, dtype, shape)


def updatable(mean: Tensor | None, var: Tensor | None, count: Tensor | None, channels: int) -> torch.dtype | None:
    """Return the common dtype of buffers, each of which may be None; None if they cannot be updated in place."""
    given = var if mean is None else mean
    dtype, shape = torch.float32 if given is None else given.dtype, (channels,)
    in_place = (
        (mean is None or _is_updatable(mean, dtype, shape))
        and (var is None or _is_updatable(var, dtype, shape))
        and (count is None or _is_updatable(count, torch.int64, ()))
    )
    return dtype if in_place and dtype in TABLE_DTYPES else None


def _is_updatable(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return located(buffer, dtype, shape) is not None and not buffer.is_inference()


def consecutive(tables: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """Return a tensor at whose address the tables follow one after another."""
    tables = [table(one, dtype, shape) for one in tables]
    size = dtype.itemsize * shape[0] * shape[1]
    first, *others = addresses(*tables)
    if all(other == first + k * size for k, other in enumerate(others, start=1)):
        return tables[0]
    return torch.stack(tables)


# The variance of samples with a single position. Every view of it is 0, so its address alone identifies it.
_ZERO = torch.frombuffer(bytearray(8), dtype=torch.float64)


def single_position(x: Tensor) -> Moments:
    """Return the moments of samples with a single position: x in the dtype of its arithmetic, and no variance."""
    mean = x.detach().flatten(1).to(ARITHMETIC[x.dtype]).contiguous()
    return Moments(mean, _ZERO.expand(mean.shape))


def sample_moments(moments: Moments, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the admitted means of samples (B, C) in float32 or float64, and their variances; None if these are 0."""
    mean, var = moments
    shape = tuple(mean.shape) if shape is None else shape
    mean = table(mean, torch.float32 if mean.dtype == torch.float32 else torch.float64, shape)
    if admits(var) and var.data_ptr() == _ZERO.data_ptr() and var.shape == shape:
        return mean, None
    return mean, table(var, torch.float64, shape)


class Layout(NamedTuple):
    """How a tensor lies in memory.

    Its channels are contiguous (`last`), or its positions are; the strides are over the samples and over the other.
    """

    last: bool
    batch_stride: int
    inner_stride: int


@functools.lru_cache(maxsize=4096)
def layouts(shape: torch.Size, strides: tuple[int, ...]) -> list[Layout]:
    """Return the layouts of a tensor, the better one first; it has both if it has one position or one channel."""
    batch, channel = strides[:2]
    dims = [(size, stride) for size, stride in zip(shape[2:], strides[2:], strict=True) if size != 1]
    # The positions have a single stride if each dimension steps over all of the next one.
    if any(stride != size * step for (_, stride), (size, step) in pairwise(dims)):
        return []
    position = dims[-1][1] if dims else 1
    found = [Layout(True, batch, position)] if channel == 1 or shape[1] == 1 else []
    if position == 1:
        found.insert(0 if dims else len(found), Layout(False, batch, channel))
    return found


class Pair(NamedTuple):
    """The layouts of an input, and of a result that `torch.empty_like` allocates for it; both have the same `last`."""

    input: Layout
    result: Layout


@functools.lru_cache(maxsize=4096)
def paired(shape: torch.Size, strides: tuple[int, ...]) -> Pair | None:
    """Return the best layouts that an input and its result have in common; expanded tensors may have none."""
    if len(shape) < 3 or 0 in shape:
        return None
    dense = layouts(shape, torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride())
    for layout in layouts(shape, strides):
        if (result := like(dense, layout)) is not None:
            return Pair(layout, result)
    return None


def like(found: list[Layout], wanted: Layout) -> Layout | None:
    """Return the layout with the same `last`, if there is one."""
    return next((layout for layout in found if layout.last == wanted.last), None)


def refusal(x: Tensor) -> str | None:
    """Return why the library cannot take `x` as an input, or None if it can."""
    if not admits(x):
        return f"a {type(x).__name__} on {x.device}; it takes plain strided CPU tensors"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype}; it takes {', '.join(map(str, DTYPES))}"
    if paired(x.shape, x.stride()) is None:
        return (
            f"shape {tuple(x.shape)} and strides {x.stride()}; it takes (B, C, *spatial) without empty dimensions, "
            "with adjacent positions or adjacent channels"
        )
    return None


def admitted_input(x: Tensor) -> Pair:
    """Return the layouts of an admitted x, and of a result for it."""
    if admits(x) and x.dtype in DTYPES and (pair := paired(x.shape, x.stride())) is not None:
        return pair
    raise NotAdmitted


def admitted_gradient(
    dy: Tensor, x: Tensor, shape: torch.Size, strides: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return dy, or a copy that lies in memory as results for x do, and its strides."""
    if dy.dtype is x.dtype and admits(dy) and dy.shape == shape:
        gradient = dy.stride()
        if gradient == strides or _alike(shape, strides, gradient):
            return dy, gradient
    if type(dy) not in PLAIN or not dy.is_cpu or dy.is_nested or dy.shape != shape:
        raise NotAdmitted
    dy = torch.empty_like(x).copy_(dy)
    if not admits(dy):
        raise NotAdmitted
    return dy, dy.stride()


@functools.lru_cache(maxsize=4096)
def _alike(shape: torch.Size, strides: tuple[int, ...], gradient: tuple[int, ...]) -> bool:
    pair = paired(shape, strides)
    return pair is not None and like(layouts(shape, gradient), pair.input) is not None

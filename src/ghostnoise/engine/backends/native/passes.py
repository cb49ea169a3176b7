"""The passes over x as calls of the C++ library."""

import functools

import torch
from torch import Tensor

from ghostnoise.engine.backends.aten import Aten
from ghostnoise.engine.backends.base import Affine
from ghostnoise.engine.backends.native.gate import (
    ARITHMETIC,
    Layout,
    NotAdmitted,
    addresses,
    admitted_gradient,
    admitted_input,
    empty,
    layouts,
    like,
    or_aten,
    refusal,
    single_position,
    table,
)
from ghostnoise.engine.backends.native.library import DTYPES, run, threads
from ghostnoise.engine.plan import positions
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import LinearTerm

WHOLE = 0  # the result of a pass is not a part of a larger one


class NativePasses(Aten):
    """`Aten` with native passes over x."""

    @or_aten
    def moments(self, x: Tensor) -> Moments:
        """Measure the moments of each sample (B, C); for a single position, x itself is the mean."""
        layout, _ = admitted_input(x)
        if positions(x) == 1:
            return single_position(x)
        mean, var = (empty(x.shape[:2], torch.float64) for _ in range(2))
        _run("moments", x, layout, *_at(x, layout), *addresses(mean, var))
        return Moments(mean, var)

    @or_aten
    def transform(self, x: Tensor, affine: Affine, samples_per_pool: int = 1) -> Tensor:
        """Apply `scale * (x - center) + shift`, in the memory format of x."""
        layout, result = admitted_input(x)
        rows = _Rows(x, samples_per_pool, *affine)
        y = torch.empty_like(x)
        _run("transform", x, layout, WHOLE, *_at(x, layout), *rows.arguments, *_at(y, result))
        return y

    @or_aten
    def gradient_sums(self, dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[Tensor, Tensor]:
        """Sum dy and dy·(x - center) over positions (B, C); for a single position, dy itself may be its sum."""
        layout, _ = admitted_input(x)
        dy, gradient = _gradient(dy, x, layout)
        rows, dtype = _Rows(x, samples_per_pool, center), ARITHMETIC[x.dtype]
        single = layout.last and positions(x) == 1 and dy.dtype == dtype and dy.is_contiguous()
        total = dy.flatten(1) if single else empty(x.shape[:2], dtype)
        moment = empty(x.shape[:2], dtype)
        given = (*_at(dy, gradient), *_at(x, layout), *rows.arguments)
        _run("gradient_sums", x, layout, *given, *addresses(None if single else total, moment))
        return total, moment

    @or_aten
    def input_gradient(
        self, dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, term: LinearTerm, samples_per_pool: int = 1
    ) -> Tensor:
        """Add `gain·scale·dy` and the linear term."""
        layout, result = admitted_input(x)
        dy, gradient = _gradient(dy, x, layout)
        if gain is not None and gain.shape != x.shape[:2]:
            raise NotAdmitted
        gain = _ones(x.shape[1], scale.dtype) if gain is None else gain
        rows = _Rows(x, samples_per_pool, scale, gain, *term)
        dx = torch.empty_like(x)
        given = (*_at(dy, gradient), *_at(x, layout), *rows.arguments)
        _run("input_gradient", x, layout, WHOLE, *given, *_at(dx, result))
        return dx

    @or_aten
    def scale_gradient(self, dy: Tensor, scale: Tensor) -> Tensor:
        """Return `scale·dy`."""
        if refusal(dy):
            dy = dy.contiguous()
        layout, result = admitted_input(dy)
        rows, dx = _Rows(dy, 1, scale), torch.empty_like(dy)
        _run("scale_gradient", dy, layout, *_at(dy, layout), *rows.arguments, *_at(dx, result))
        return dx


class _Rows:
    """Tables (R, C) as arguments of a pass: address, samples per row, last row; `alive` owns their memory."""

    def __init__(self, x: Tensor, samples_per_pool: int, *tables: Tensor) -> None:
        batch_size, channels = x.shape[:2]
        self.alive, self.arguments = [], []
        for given in tables:
            if given.ndim != 2 or given.shape[1] not in (1, channels):
                raise NotAdmitted
            rows = given.shape[0]
            per_row = 1 if rows == batch_size else samples_per_pool
            if not 0 < (rows - 1) * per_row + 1 <= batch_size:  # more rows than samples, or none
                raise NotAdmitted
            wide = given if given.shape[1] == channels else given.expand(rows, channels)
            admitted = table(wide, ARITHMETIC[x.dtype], (rows, channels))
            self.alive.append(admitted)
            self.arguments += [*addresses(admitted), per_row, rows - 1]


@functools.lru_cache(maxsize=64)
def _ones(channels: int, dtype: torch.dtype) -> Tensor:
    return empty((1, channels), dtype).fill_(1)


def _gradient(dy: Tensor, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    dy, strides = admitted_gradient(dy, x, x.shape, x.stride())
    found = like(layouts(x.shape, strides), layout)
    if found is None:
        raise NotAdmitted
    return dy, found


def _at(x: Tensor, layout: Layout) -> tuple[int, int, int]:
    (at,) = addresses(x)
    return at, layout.batch_stride, layout.inner_stride


def _run(name: str, x: Tensor, layout: Layout, *given: int) -> None:
    sizes = (x.shape[0], x.shape[1], positions(x))
    run(name, DTYPES[x.dtype], int(layout.last), threads(x.numel()), *sizes, *given)

"""The passes over x, in Triton's interpreter."""

from unittest import mock

import numpy as np
import pytest
import torch
from ghostnoise.engine.backends.base import Affine
from ghostnoise.engine.backends.triton import passes
from ghostnoise.engine.backends.triton.backend import DTYPES, Triton
from ghostnoise.engine.backends.triton.kernels import INTERPRETED
from ghostnoise.statistics.samples import LinearTerm
from hypothesis import given, settings
from hypothesis import strategies as st

from support import reference
from support.closeness import assert_close
from support.inputs import lay_out

TRITON = Triton()
IN_USE = {"LEAST_TILES": passes.LEAST_TILES}
IN_PARTS = {"LEAST_TILES": 1}
# Tiles of 32 elements make small tensors walk over tiles, and come in parts.
WALKED = {"TILE": 32, "POSITIONS": 8, "PROGRAMS": 1}
WALKED_IN_PARTS = {"TILE": 32, "POSITIONS": 4, "PROGRAMS": 8, "LEAST_TILES": 1}


def arithmetic(dtype):
    return torch.promote_types(dtype, torch.float32)


LAYOUTS = ("contiguous", "channels_last", "every other sample", "channels of a wider tensor")
UPSTREAM = (*LAYOUTS, "sliced", "transposed", "expanded", "expanded positions")


def laid_out(x, layout):
    """The same values in other strides."""
    if layout == "every other sample":
        return x.repeat_interleave(2, 0)[::2]
    if layout == "channels of a wider tensor":
        return lay_out(torch.cat([x, x], 1), "channels_last")[:, : x.shape[1]]
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    if layout == "expanded positions":
        return x[(..., *[slice(1)] * (x.ndim - 2))].expand(x.shape)
    return lay_out(x, layout)


@st.composite
def cases(draw):
    """x, dy, and five tables, some of which all samples or all channels share."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 3, 5, 8, 17))),
        *draw(st.sampled_from(((1,), (2,), (7,), (16,), (3, 5), (4, 4), (1, 1), (2, 3, 5), (45,)))),
    )
    dtype = draw(st.sampled_from(DTYPES))

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = laid_out(normal(*shape).add_(0.5).to(dtype), draw(st.sampled_from(LAYOUTS)))
    dy = laid_out(normal(*shape).to(dtype), draw(st.sampled_from(UPSTREAM)))
    tables = []
    for _ in range(4):
        table = normal(*shape[:2]).to(arithmetic(dtype))
        strides = draw(st.sampled_from(("full", "shared", "one", "transposed")))
        table = table[:1] if strides == "shared" else table[:1, :1] if strides == "one" else table
        tables.append(table.T.contiguous().T if strides == "transposed" else table.expand(shape[:2]))
    return x, dy, tables


def check(actual, exact, x, direction="output", magnitude=0.0):
    """`actual` equals `exact` (B, C, S), in x's dtype and in strides like x's."""
    if x.dtype == torch.bfloat16:  # the interpreter cuts off the digits that a GPU rounds
        magnitude = 2 * max(magnitude, exact.abs().max().item())
    assert actual.dtype == x.dtype
    assert_close(actual, exact.view(x.shape), direction, magnitude)


def check_passes(division, case):
    x, dy, tables = case
    first, second, third, fourth = (table.double()[..., None] for table in tables)
    exact, exact_dy = reference.fold(x), reference.fold(dy)
    tolerance = 1e-13 if x.dtype == torch.float64 else 1e-6
    assert TRITON.refuses(x) is None
    with mock.patch.multiple(passes, **division):
        mean, var = TRITON.moments(x)
        y = TRITON.transform(x, Affine(*tables[:3]))
        total, moment = TRITON.gradient_sums(dy, x, tables[0])
        dx = TRITON.input_gradient(dy, x, tables[0], None, LinearTerm(*tables[1:]))
        alone = TRITON.scale_gradient(dy, tables[0])

    wanted = exact.var(2, correction=0)
    assert mean.dtype == var.dtype == torch.float64
    assert ((mean - exact.mean(2)).abs() <= tolerance * (wanted.sqrt() + 1e-3)).all()
    assert ((var - wanted).abs() <= tolerance * (wanted + 1e-6)).all()

    check(y, second * (exact - first) + third, x, magnitude=(second * first).abs().max().item())
    assert y.stride() == torch.empty_like(x).stride()

    terms = exact_dy * (exact - first)
    assert total.dtype == moment.dtype == arithmetic(x.dtype)
    assert ((total - exact_dy.sum(2)).abs() <= tolerance * exact_dy.abs().sum(2)).all()
    assert ((moment - terms.sum(2)).abs() <= tolerance * (terms.abs().sum(2) + 1)).all()

    through = third * (exact - second) + fourth
    magnitude = max((third * second).abs().max().item(), fourth.abs().max().item())
    check(dx, first * exact_dy + through, x, "gradient", magnitude)
    assert dx.stride() == torch.empty_like(x).stride()
    check(alone, first * exact_dy, x, "gradient")


class TestInterpreted:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("division", [IN_USE, WALKED_IN_PARTS])
    @given(cases())
    @settings(max_examples=3)
    def test_passes_equal_their_formulas(self, division, case):
        check_passes(division, case)

    @pytest.mark.slow
    @pytest.mark.parametrize("division", [IN_USE, WALKED, WALKED_IN_PARTS])
    @given(cases())
    @settings(max_examples=30)
    def test_passes_equal_their_formulas_in_more_cases(self, division, case):
        check_passes(division, case)

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("division", [IN_USE, IN_PARTS])
    @pytest.mark.parametrize("positions", [100, 5000])
    def test_moments_of_a_mean_far_from_zero(self, positions, division, layout):
        x = lay_out(torch.randn(2, 3, positions) + 1e4, layout)
        with mock.patch.multiple(passes, **division):
            mean, var = TRITON.moments(x)
        exact = reference.fold(x)
        assert (mean - exact.mean(2)).abs().max() < 1e-6
        assert (var / exact.var(2, correction=0) - 1).abs().max() < 1e-6

    @pytest.mark.parametrize("division", [IN_USE, IN_PARTS])
    def test_moments_around_a_first_tile_unlike_the_rest(self, division):
        x = torch.randn(1, 2, 5000, dtype=torch.float64)
        x[..., :1024] += 1e6
        for dtype, tolerance in [(torch.float32, 1e-6), (torch.float64, 1e-13)]:
            with mock.patch.multiple(passes, **division):
                mean, var = TRITON.moments(x.to(dtype))
            exact = reference.fold(x.to(dtype))
            std = exact.std(2, correction=0)
            assert ((mean - exact.mean(2)).abs() < tolerance * std).all()
            assert ((var / std.square() - 1).abs() < tolerance).all()

    def test_non_finite_values_stay_in_their_row(self):
        x = torch.randn(2, 3, 40)
        x[0, 1, 7], x[1, 2, 3] = float("inf"), float("nan")
        with mock.patch.multiple(passes, **WALKED), np.errstate(invalid="ignore"):
            for table in TRITON.moments(x):
                assert table.isfinite().tolist() == [[True, False, True], [True, True, False]]

    def test_results_repeat_to_the_bit(self):
        x = torch.randn(2, 3, 3000)
        with mock.patch.multiple(passes, **IN_PARTS):
            assert all(map(torch.equal, TRITON.moments(x), TRITON.moments(x)))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from closeness import assert_close
from ghostnoise.engine import aten
from ghostnoise.moments import arithmetic_dtype
from inputs import LAYOUTS, lay_out

ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A sample of 4 x 5 x 3 elements; slices of one, of three and of all seven samples.
SLICES = [1, 180, 10**6]


def batch(dtype=torch.float64, layout="contiguous", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lay_out(torch.randn(7, 4, 5, 3, dtype=torch.float64, generator=generator).add_(0.5).to(dtype), layout)


def tables(seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, 4, dtype=torch.float64, generator=generator) for _ in range(count)]


@pytest.fixture(params=SLICES)
def _slices(request, monkeypatch):
    monkeypatch.setattr(aten, "SLICE_ON_CPU", request.param)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_equal_the_two_pass_formula(dtype, layout):
    x = batch(dtype, layout)
    mean, var = aten.moments(x)
    exact = reference.fold(x)
    wanted = exact.mean(2)
    tolerance = 1e-14 if dtype == torch.float64 else 2e-7
    assert mean.dtype == var.dtype == torch.float64
    torch.testing.assert_close(mean, wanted, rtol=0, atol=tolerance * 3)
    torch.testing.assert_close(var, ((exact - wanted[..., None]) ** 2).mean(2), rtol=tolerance * 3, atol=0)


def test_moments_of_a_mean_far_from_zero():
    x = (torch.randn(3, 2, 1000) + 1e4).contiguous()
    mean, var = aten.moments(x)
    exact = reference.fold(x)
    assert (mean - exact.mean(2)).abs().max() < 1e-6
    assert (var / exact.var(2, correction=0) - 1).abs().max() < 1e-6


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transform_equals_its_formula_and_keeps_the_strides(dtype, layout):
    x = batch(dtype, layout)
    center, scale, shift = (table.to(arithmetic_dtype(x)) for table in tables(1, 3))
    y = aten.transform(x, center, scale, shift)
    center, scale, shift = (table.double()[..., None, None] for table in (center, scale, shift))
    assert_close(y, scale * (x.double() - center) + shift)
    assert y.dtype == dtype
    assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("upstream", [*LAYOUTS, "expanded"])
def test_backward_passes_equal_their_formulas(dtype, layout, upstream):
    x = batch(dtype, layout)
    dy = torch.ones((), dtype=dtype).expand(x.shape) if upstream == "expanded" else batch(dtype, upstream, seed=3)
    center, scale, slope, offset = (table.to(arithmetic_dtype(x)) for table in tables(2, 4))
    total, moment = aten.gradient_sums(dy, x, center)
    exact, exact_dy = reference.fold(x), reference.fold(dy)
    around = exact - center.double()[..., None]
    terms = exact_dy * around
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    for ours, wanted, size in ((total, exact_dy, exact_dy), (moment, terms, terms)):
        bound = tolerance * size.abs().sum(2).max().item()
        torch.testing.assert_close(ours.double(), wanted.sum(2), rtol=0, atol=bound)

    dx = aten.input_gradient(dy, x, scale, center, slope, offset)
    scale64, slope64, offset64 = (table.double()[..., None] for table in (scale, slope, offset))
    assert_close(dx, (scale64 * exact_dy + slope64 * around + offset64).view(x.shape), "gradient")
    assert dx.dtype == dtype
    assert dx.stride() == torch.empty_like(x).stride()

    alone = aten.scale_gradient(dy, scale)
    assert_close(alone, (scale64 * exact_dy).view(x.shape), "gradient")
    assert alone.dtype == dtype


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 200))
def test_slices_cover_the_batch_once(batch_size, sample, elements):
    x = torch.zeros(batch_size, 1, sample)
    before, aten.SLICE_ON_CPU = aten.SLICE_ON_CPU, elements
    try:
        rows = [row for part in aten._slices(x) for row in range(batch_size)[part]]
    finally:
        aten.SLICE_ON_CPU = before
    assert rows == list(range(batch_size))

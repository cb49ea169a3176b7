import pytest
import torch
from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.plan import COMPONENTS
from hypothesis import given
from hypothesis import strategies as st

from support import reference
from support.backend_checks import (
    ALL_DTYPES,
    check_draws,
    check_passes,
    check_tables,
    dtypes,
    layouts,
    pool_sizes,
    shapes,
    upstreams,
)

# A sample has 60 elements: slices of one, of three and of all seven samples.
SLICES = [1, 180, 10**6]


@pytest.mark.parametrize("elements", SLICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_passes_in_slices(monkeypatch, elements, dtype, layout):
    monkeypatch.setattr(aten, "SLICE_ON_CPU", elements)
    check_passes(ATEN, (7, 4, 5, 3), dtype, layout, "contiguous", samples_per_pool=3)


@given(shapes, dtypes, layouts, upstreams, pool_sizes)
def test_passes_equal_their_formulas(shape, dtype, layout, upstream, samples_per_pool):
    check_passes(ATEN, shape, dtype, layout, upstream, samples_per_pool)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20), st.sampled_from([torch.float32, torch.float64]))
def test_draws_equal_the_naive_loop(rows, drawn, channels, dtype):
    check_draws(ATEN, rows, drawn, channels, dtype)


def test_moments_of_a_mean_far_from_zero():
    x = (torch.randn(3, 2, 1000) + 1e4).contiguous()
    mean, var = ATEN.moments(x)
    exact = reference.fold(x)
    assert (mean - exact.mean(2)).abs().max() < 1e-6
    assert (var / exact.var(2, correction=0) - 1).abs().max() < 1e-6


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 200))
def test_slices_cover_the_batch_once(batch_size, sample, elements):
    x = torch.zeros(batch_size, 1, sample)
    before, aten.SLICE_ON_CPU = aten.SLICE_ON_CPU, elements
    try:
        rows = [row for part in aten._slices(x) for row in range(batch_size)[part]]
    finally:
        aten.SLICE_ON_CPU = before
    assert rows == list(range(batch_size))


@given(
    st.sampled_from([torch.float32, torch.float64]), st.integers(2, 7), st.integers(1, 4), pool_sizes,
    st.sampled_from(COMPONENTS), st.booleans(), st.sampled_from([0.0, 0.7]),
)  # fmt: skip
def test_tables_in_float32_equal_those_in_float64(
    dtype, batch_size, channels, samples_per_pool, components, affine, min_std
):
    check_tables(ATEN, dtype, batch_size, channels, samples_per_pool, components, affine, min_std)


def test_it_runs_anything():
    assert ATEN.unavailable() is None
    assert ATEN.refuses(torch.zeros(2, 3, 4, dtype=torch.float64, device="meta")[..., ::2]) is None

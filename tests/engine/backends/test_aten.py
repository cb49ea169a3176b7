import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import reference
from ghostnoise.engine.backends import aten
from support.passes import ALL_DTYPES, check_draws, check_passes, dtypes, layouts, row_sizes, shapes, upstreams

# Of a sample of 60 elements: slices of one, of three and of all seven samples.
SLICES = [1, 180, 10**6]


@pytest.mark.parametrize("elements", SLICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_passes_in_slices(monkeypatch, elements, dtype, layout):
    monkeypatch.setattr(aten, "SLICE_ON_CPU", elements)
    check_passes(aten, (7, 4, 5, 3), dtype, layout, "contiguous", each=3)


@given(shapes, dtypes, layouts, upstreams, row_sizes)
def test_passes_equal_their_formulas(shape, dtype, layout, upstream, each):
    check_passes(aten, shape, dtype, layout, upstream, each)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20), st.sampled_from([torch.float32, torch.float64]))
def test_draws_equal_the_naive_loop(rows, drawn, channels, dtype):
    check_draws(aten, rows, drawn, channels, dtype)


def test_moments_of_a_mean_far_from_zero():
    x = (torch.randn(3, 2, 1000) + 1e4).contiguous()
    mean, var = aten.moments(x)
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

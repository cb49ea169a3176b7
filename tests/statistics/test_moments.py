import torch
from ghostnoise.statistics.moments import Moments, arithmetic_dtype, expand_pools, sum_pools, table_dtype
from ghostnoise.statistics.samples import ghost_sizes
from hypothesis import given
from hypothesis import strategies as st


def test_tables_are_float64_where_the_device_has_it():
    assert table_dtype(torch.device("cpu")) == torch.float64
    assert table_dtype(torch.device("cuda")) == torch.float64
    assert table_dtype(torch.device("mps")) == torch.float32


def test_arithmetic_is_float32_or_better():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert arithmetic_dtype(torch.zeros(1, dtype=dtype)) == torch.float32
    assert arithmetic_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64


@given(st.integers(1, 12), st.integers(1, 13))
def test_expand_pools_and_its_transpose(batch_size, samples_per_pool):
    rows = len(ghost_sizes(batch_size, samples_per_pool))
    table, samples = torch.randn(rows, 3, dtype=torch.float64), torch.randn(batch_size, 3, dtype=torch.float64)
    wide = expand_pools(table, batch_size, samples_per_pool)
    for b in range(batch_size):
        assert torch.equal(wide[b], table[min(b // samples_per_pool, rows - 1)])
    summed = sum_pools(samples, rows, samples_per_pool)
    torch.testing.assert_close((wide * samples).sum(), (table * summed).sum())


def test_detached_moments():
    moments = Moments(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)).detach()
    assert not moments.mean.requires_grad
    assert not moments.var.requires_grad

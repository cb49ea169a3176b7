import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.ghosts import ghost_sizes
from ghostnoise.moments import arithmetic_dtype, spread, table_dtype, total


def test_tables_are_float64_where_the_device_has_it():
    assert table_dtype(torch.device("cpu")) == torch.float64
    assert table_dtype(torch.device("cuda")) == torch.float64
    assert table_dtype(torch.device("mps")) == torch.float32


def test_arithmetic_is_float32_or_better():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert arithmetic_dtype(torch.zeros(1, dtype=dtype)) == torch.float32
    assert arithmetic_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64


@given(st.integers(1, 12), st.integers(1, 13))
def test_spread_and_its_transpose(batch_size, each):
    rows = len(ghost_sizes(batch_size, each))
    table, samples = torch.randn(rows, 3, dtype=torch.float64), torch.randn(batch_size, 3, dtype=torch.float64)
    wide = spread(table, batch_size, each)
    for b in range(batch_size):
        assert torch.equal(wide[b], table[min(b // each, rows - 1)])
    torch.testing.assert_close((wide * samples).sum(), (table * total(samples, rows, each)).sum())

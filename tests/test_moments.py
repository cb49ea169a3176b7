import torch

from ghostnoise.moments import arithmetic_dtype, table_dtype


def test_tables_are_float64_where_the_device_has_it():
    assert table_dtype(torch.device("cpu")) == torch.float64
    assert table_dtype(torch.device("cuda")) == torch.float64
    assert table_dtype(torch.device("mps")) == torch.float32


def test_arithmetic_is_float32_or_better():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert arithmetic_dtype(torch.zeros(1, dtype=dtype)) == torch.float32
    assert arithmetic_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64

import numpy as np
import pytest
import torch

from ghostnoise import checks


@pytest.mark.parametrize("value", [0, -3, 2.0, 2.5, "8", True, None, [4], torch.tensor(2.5), np.array([1, 2]), 65_537])
def test_not_a_ghost_size(value):
    with pytest.raises(ValueError, match=r"ghost_size=.*: must be an integer from 1 to 65536"):
        checks.ghost_size(value)


@pytest.mark.parametrize("value", [1, 7, np.int64(5), torch.tensor(3), 65_536])
def test_ghost_sizes(value):
    assert type(checks.ghost_size(value)) is int
    assert checks.ghost_size(value) == int(value)


def test_numbers():
    for value in (0, 0.5, np.float32(0.25)):
        checks.number("p", value, 0, 1)
    for value in (-0.1, 1.0, float("nan"), "0.5", True, None):
        with pytest.raises(ValueError, match=r"p=.*: must be a number in \[0, 1\)"):
            checks.number("p", value, 0, 1, open_high=True)
    with pytest.raises(ValueError, match=r"clamp=0: must be a number in \(0, inf\)"):
        checks.number("clamp", 0, 0, open_low=True)
    with pytest.raises(ValueError, match=r"eps=inf: must be a number in \[0, inf\)"):
        checks.number("eps", float("inf"), 0)
    assert checks.steps(5) == 5
    with pytest.raises(ValueError, match="warmup=0: must be an integer of 1 or more, a number of steps"):
        checks.steps(0, name="warmup")


def test_sparse_tensors():
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo: must be a dense tensor; convert with x.to_dense"):
        checks.floating(torch.randn(4, 3).to_sparse(), "f")

import pytest
import torch

from families import example
from ghostnoise import GhostBatchNorm1d, GhostBatchNorm2d, functional


def test_forward_is_the_function():
    layer = GhostBatchNorm2d(3, ghost_size=3, running_var_from="batch", eps=1e-3, momentum=0.3)
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.ghost_batch_norm(
        example(2), mean, var, layer.weight, layer.bias, True, 0.3, 1e-3, ghost_size=3, running_var_from="batch"
    )
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


def test_a_ragged_batch_loses_no_sample():
    """17 samples in ghost batches of 8: 8 and 9."""
    x = torch.randn(17, 3, 4)
    y = GhostBatchNorm1d(3, ghost_size=8)(x)
    for rows in (slice(0, 8), slice(8, 17)):
        torch.testing.assert_close(y[rows].mean((0, 2)), torch.zeros(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(y[rows].var((0, 2), correction=0), torch.ones(3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("ghost_size", [0, -1, 1.5, "4"])
def test_ghost_sizes_are_checked_when_built(ghost_size):
    with pytest.raises(ValueError, match="ghost_size="):
        GhostBatchNorm2d(3, ghost_size=ghost_size)
    with pytest.raises(TypeError, match="ghost_size"):
        GhostBatchNorm2d(3)


def test_options_are_checked_when_built():
    with pytest.raises(ValueError, match="running_var_from='x'"):
        GhostBatchNorm2d(3, ghost_size=2, running_var_from="x")

import pytest
import torch

from families import example
from ghostnoise import ExclusiveBatchNorm1d, ExclusiveBatchNorm2d, functional


def test_forward_is_the_function():
    options = {"ghost_size": 4, "min_std": 0.5, "clamp_output": 2.0}
    layer = ExclusiveBatchNorm2d(3, **options)
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.exclusive_batch_norm(example(2), mean, var, layer.weight, layer.bias, True, **options)
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


def test_the_whole_batch_by_default():
    x = torch.randn(6, 2, dtype=torch.float64)
    y = ExclusiveBatchNorm1d(2, dtype=torch.float64)(x)
    others = x[1:]
    expected = (x[0] - others.mean(0)) / (others.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(y[0], expected)


def test_options_are_checked_when_built():
    for options in ({"ghost_size": 1}, {"ghost_size": 2.0}, {"min_std": -1}, {"clamp_output": -1}, {"min_std": None}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}="):
            ExclusiveBatchNorm2d(3, **options)

import pytest
import torch

from families import example
from ghostnoise import AnalyticalGhostNoiseBatchNorm2d, GhostNoiseBatchNorm2d, functional


def test_forward_is_the_function():
    layer = GhostNoiseBatchNorm2d(
        3, ghost_size=7, noise_eps=1e-2, scale=False, generator=torch.Generator().manual_seed(1)
    )
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.ghost_noise_batch_norm(
        example(2), mean, var, layer.weight, layer.bias, True, ghost_size=7, noise_eps=1e-2, scale=False,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert torch.equal(layer(example(2)), y)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, var)


def test_analytical_forward_is_the_function():
    options = {"ghost_size": 7, "kind": "conv", "dof": "exact", "shift": False, "noise_eps": 1e-2}
    layer = AnalyticalGhostNoiseBatchNorm2d(3, **options, generator=torch.Generator().manual_seed(1))
    y = functional.analytical_ghost_noise_batch_norm(
        example(2), None, None, layer.weight, layer.bias, True, **options, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(layer(example(2)), y)


@pytest.mark.parametrize("ghost_size", [1, 3, 100])
def test_any_ghost_size_will_do(ghost_size):
    layer = GhostNoiseBatchNorm2d(3, ghost_size=ghost_size)
    assert layer(example(2)).isfinite().all()


def test_less_noise_with_larger_ghost_batches():
    """The shift noise's variance goes down as 1/N (identity 4), measured as the output's distance from plain BN."""
    torch.manual_seed(0)
    x = torch.randn(256, 8, 1, 1)
    clean = torch.nn.functional.batch_norm(x, None, None, training=True)
    variances = {
        size: (GhostNoiseBatchNorm2d(8, ghost_size=size, scale=False)(x) - clean).square().mean().item()
        for size in (4, 16, 64)
    }
    n = 256 * 8
    for size, variance in variances.items():
        assert abs(variance * size - 1) <= 5 * (2 / n) ** 0.5 * 1.5


def test_options_are_checked_when_built():
    for layer, options in (
        (GhostNoiseBatchNorm2d, {"ghost_size": 0}),
        (GhostNoiseBatchNorm2d, {"ghost_size": 4, "noise_eps": -1}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 2.5}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 4, "kind": "x"}),
        (AnalyticalGhostNoiseBatchNorm2d, {"ghost_size": 4, "dof": "x"}),
    ):
        name = list(options)[-1]
        with pytest.raises(ValueError, match=f"{name}="):
            layer(3, **options)

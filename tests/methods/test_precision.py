"""Float32 against float64 for inputs on which naive formulas lose digits."""

import pytest
import torch

from ghostnoise import functional
from support import reference


def float32_error(function, x, naive) -> float:
    y = function(x, None, None, training=True)
    expected = reference.unfold(naive(reference.fold(x)), x)
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_precision_with_a_mean_far_from_zero(layout):
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8) + 1e4
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    indices = torch.randint(16, (16, 5))
    assert float32_error(functional.batch_norm, x, reference.batch_norm) <= 1e-5
    assert float32_error(
        lambda *a, **k: functional.ghost_batch_norm(*a, ghost_size=4, **k), x,
        lambda x: reference.ghost_batch_norm(x, 4),
    ) <= 1e-5  # fmt: skip
    assert float32_error(
        lambda *a, **k: functional.exclusive_batch_norm(*a, ghost_size=4, **k), x,
        lambda x: reference.exclusive_batch_norm(x, 4),
    ) <= 1e-5  # fmt: skip
    assert float32_error(
        lambda *a, **k: functional.ghost_noise_batch_norm(*a, ghost_size=5, indices=indices, **k), x,
        lambda x: reference.ghost_noise_batch_norm(x, indices),
    ) <= 1e-5  # fmt: skip


def test_precision_of_gradients_with_a_mean_far_from_zero():
    torch.manual_seed(0)
    x = (torch.randn(16, 4, 8, 8) + 1e4).requires_grad_()
    dy = torch.randn(16, 4, 8, 8)
    y = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
    (gradient,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    expected = reference.unfold(reference.ghost_batch_norm(reference.fold(exact), 4), x)
    (wanted,) = torch.autograd.grad(expected, exact, dy.double())
    assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_precision_with_an_outlier_in_another_ghost_batch():
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8)
    x[0] += 1e8
    y = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
    expected = reference.unfold(reference.ghost_batch_norm(reference.fold(x), 4), x)
    assert (y[4:] - expected[4:]).abs().max() <= 1e-5 * expected[4:].abs().max()


@pytest.mark.parametrize("deviation", [1e4, 1e8, 1e12])
def test_precision_of_exclusive_batch_norm_with_self_far_out(deviation):
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8)
    x[5] += deviation
    y = functional.exclusive_batch_norm(x, None, None, training=True)
    expected = reference.unfold(reference.exclusive_batch_norm(reference.fold(x), None), x)
    for k in range(16):
        assert (y[k] - expected[k]).abs().max() <= 1e-5 * expected[k].abs().max()


@pytest.mark.parametrize("deviation", [1e4, 1e8, 1e12])
def test_precision_of_a_self_weight_with_self_far_out(deviation):
    torch.manual_seed(0)
    for shape in ((16, 4), (16, 4, 8, 8)):
        x = torch.randn(shape)
        x[5] += deviation
        y = functional.exclusive_batch_norm(x, None, None, training=True, self_weight=0.05)
        expected = reference.unfold(reference.self_weighted_batch_norm(reference.fold(x), None, 0.05), x)
        for k in range(16):
            assert (y[k] - expected[k]).abs().max() <= 1e-5 * expected[k].abs().max()


@pytest.mark.parametrize("deviation", [1e4, 1e8])
def test_precision_of_exclusive_gradients_with_self_far_out(deviation):
    torch.manual_seed(0)
    x, dy = torch.randn(16, 2, 3), torch.randn(16, 2, 3)
    x[3] += deviation

    def gradient(function, x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, dy.to(x.dtype))[0]

    ours = gradient(lambda x: functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=8), x)
    wanted = gradient(lambda x: reference.exclusive_batch_norm(x, 8), x.double())
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()

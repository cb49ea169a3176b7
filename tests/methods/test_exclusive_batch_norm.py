"""What is special to exclusive batch norm; its output and gradients are those of test_every_method.py."""

import functools

import pytest
import torch

from ghostnoise import functional

train = functools.partial(functional.exclusive_batch_norm, running_mean=None, running_var=None, training=True)
noisy = functools.partial(
    functional.ghost_noise_batch_norm, running_mean=None, running_var=None, training=True, ghost_size=4,
    normalizer="exclusive",
)  # fmt: skip


@pytest.mark.parametrize("options", [{"min_std": 1.2}, {"clamp_output": 0.8}], ids=str)
def test_gradcheck_of_a_self_weight_with_another_remedy(options):
    x = torch.randn(6, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: train(x, ghost_size=3, self_weight=0.3, **options), x)


def test_no_self_weight_is_exclusive_batch_norm():
    x = torch.randn(12, 3, 4, requires_grad=True)
    y, wanted = train(x, ghost_size=4, self_weight=0), train(x, ghost_size=4)
    assert torch.equal(y, wanted)
    assert torch.equal(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (y, wanted)))


def test_a_floored_constant_channel_has_a_gradient():
    x = torch.ones(6, 2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(train(x, eps=0.0, min_std=0.5).square().sum(), x)
    assert (gradient == 0).all()


def test_statistics_of_fewer_than_two_values():
    with pytest.raises(ValueError, match=r"batch of 1 sample.*use a larger batch"):
        train(torch.randn(1, 3, 4))
    with pytest.raises(ValueError, match=r"single value; raise ghost_size"):
        train(torch.randn(8, 3), ghost_size=2)
    train(torch.randn(8, 3, 2), ghost_size=2)
    train(torch.randn(8, 3), ghost_size=3)
    train(torch.randn(3, 3), ghost_size=2)  # one ghost batch of 3
    with pytest.raises(ValueError, match=r"batch of 1 sample.*normalizer='exclusive' needs 2 samples.*normalizer='bat"):
        noisy(torch.randn(1, 3, 4))
    with pytest.raises(ValueError, match=r"^batch of 2 samples.*single value; use a batch of 3 samples or more"):
        noisy(torch.randn(2, 3))
    assert noisy(torch.randn(2, 3, 2)).isfinite().all()


def test_a_self_weight_needs_one_other_sample():
    """Two values suffice then: the output of a pair is its sign, sqrt((1 - a)/a) times."""
    x = torch.tensor([[0.0], [2.0], [3.0], [-3.0]], dtype=torch.float64)
    y = train(x, eps=1e-14, ghost_size=2, self_weight=0.2)
    torch.testing.assert_close(y[:, 0], torch.tensor([-2.0, 2.0, 2.0, -2.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"batch of 1 sample.*use a larger batch"):
        train(torch.randn(1, 3, 4), self_weight=0.2)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("spatial", [(), (4,)])
def test_a_non_finite_value_in_a_sample(bad, spatial):
    """The other samples of its ghost batch are NaN; the sample's own statistics and other ghost batches are finite."""
    x = torch.randn(12, 3, *spatial, generator=torch.Generator().manual_seed(0))
    wanted = train(x, ghost_size=4)
    x[(5, 1, *(2 for _ in spatial))] = bad
    y = train(x, ghost_size=4)
    finite = x[5, 1].isfinite()
    assert torch.equal(y[5, 1][finite], wanted[5, 1][finite])
    assert not y[5, 1][~finite].isfinite().any()
    assert y[[4, 6, 7], 1].isnan().all()
    rest = [k for k in range(12) if not 4 <= k < 8]
    assert torch.equal(y[rest], wanted[rest])
    assert torch.equal(y[:, [0, 2]], wanted[:, [0, 2]])


def test_noise_after_it_has_its_running_statistics_and_without_ghost_batches_its_output():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(6, 3, 4), torch.randn(3), torch.randn(3)
    plain = torch.zeros(3), torch.ones(3)
    expected = functional.exclusive_batch_norm(x, *plain, weight, bias, True)
    for size in (None, 4):
        buffers, options = (torch.zeros(3), torch.ones(3)), {"ghost_size": size, "normalizer": "exclusive"}
        y = functional.ghost_noise_batch_norm(x, *buffers, weight, bias, True, **options)
        assert torch.equal(y, expected) == (size is None)
        torch.testing.assert_close(buffers, plain)

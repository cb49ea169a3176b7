"""Prediction-time batch norm in eval mode; it trains as batch norm, which test_every_method.py tests."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise import PredictionTimeBatchNorm1d, PredictionTimeBatchNorm2d, functional
from support import reference
from support.closeness import assert_close
from support.families import example
from support.inputs import cases


def naive(samples, running_mean, running_var, prior, weight, bias, eps=1e-5):
    """Normalize all samples with the averaged statistics; samples without valid positions do not count."""
    n = sum(sample.shape[1] > 0 for sample in samples)
    batch_mean, batch_var = reference.statistics(samples)
    mean = (prior * running_mean + n * batch_mean) / (prior + n)
    var = (prior * running_var + n * batch_var) / (prior + n)
    out = [(each - mean[:, None]) / torch.sqrt(var + eps)[:, None] for each in samples]
    return [each * weight[:, None] + bias[:, None] for each in out]


@given(cases(dtypes=(torch.float64, torch.float32)), st.floats(0.01, 100), st.booleans())
def test_evaluation_equals_the_naive_loop(case, prior, masked):
    running = case.vector(3).double(), case.vector(4).double().square() + 0.1
    before = [each.clone() for each in running]
    mask = case.mask() if masked else None
    inputs = [each.requires_grad_() for each in (case.tensor(), case.vector(1), case.vector(2))]
    x, weight, bias = inputs
    y = functional.prediction_time_batch_norm(
        x, *running, weight, bias, prior_samples=prior, channel_dim=case.channel_dim, mask=mask
    )
    exact = [each.detach().double().requires_grad_() for each in inputs]
    samples = naive(reference.fold(exact[0], case.channel_dim, mask), *running, prior, *exact[1:])
    expected = reference.unfold(samples, x, case.channel_dim, mask)
    assert_close(y, expected)
    dy = case.tensor(5)
    gradients = zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True)
    for actual, wanted in gradients:  # parameters are sums over the batch, and small variances are steep
        assert_close(actual, wanted, "gradient", magnitude=20 * dy.abs().max())
    assert all(torch.equal(*pair) for pair in zip(running, before, strict=True))


def test_gradcheck():
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 2, 3), (2,), (2,))]
    buffers = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def run(x, weight, bias):
        return functional.prediction_time_batch_norm(x, *buffers, weight, bias, prior_samples=3)

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_both_ends_of_the_prior():
    layer, plain = PredictionTimeBatchNorm2d(3, prior_samples=math.inf), nn.BatchNorm2d(3)
    layer(example(2))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(example(2)), plain.eval()(example(2)))
    layer.prior_samples = 0
    torch.testing.assert_close(layer(example(2)), plain.train()(example(2)))


def test_a_shift_of_all_inputs_is_corrected():
    """With n₀ = 0, exactly; batch norm's own output keeps the shift."""
    layer, x = PredictionTimeBatchNorm1d(3, prior_samples=0.0), torch.randn(64, 3)
    for _ in range(20):
        layer(torch.randn(64, 3))
    torch.testing.assert_close(layer.eval()(2 * x + 5), layer(x), rtol=1e-4, atol=1e-4)
    assert (functional.batch_norm(2 * x + 5, layer.running_mean, layer.running_var).mean(0) > 3).all()


@pytest.mark.parametrize("prior", [-1, math.nan, "16", None, -math.inf, True])
def test_priors_that_are_no_numbers_of_samples(prior):
    with pytest.raises(ValueError, match=r"^prior_samples=.*: must be a number"):
        PredictionTimeBatchNorm1d(3, prior_samples=prior)
    with pytest.raises(ValueError, match=r"^prior_samples=.*: must be a number"):
        functional.prediction_time_batch_norm(torch.randn(4, 3), torch.zeros(3), torch.ones(3), prior_samples=prior)


def test_a_single_value_and_an_empty_batch():
    layer = PredictionTimeBatchNorm1d(3).eval()
    assert layer(torch.randn(1, 3)).isfinite().all()
    assert layer(torch.randn(0, 3)).shape == (0, 3)
    layer.prior_samples = 0
    with pytest.raises(
        ValueError, match=r"prior_samples=0 with an input of shape \(1, 3\): the statistics of a single"
    ):
        layer(torch.randn(1, 3))


def test_conversion_of_a_trained_network_and_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(8, 3, 6, 6)
    model(x)
    before = model.eval()(x)
    ghostnoise.convert(model, "ptbn", prior_samples=4)
    assert type(model[1]) is PredictionTimeBatchNorm2d
    assert not torch.equal(model(x), before)
    with ghostnoise.Meter(model, ghost_size=2) as meter:
        model(x)
    assert "bn" in meter.result()["1"].gaps
    with pytest.warns(UserWarning, match=r"1 Prediction-time batch normalization layers become plain batch norm"):
        ghostnoise.revert(model)
    assert torch.equal(model(x), before)

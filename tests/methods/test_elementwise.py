import copy
import pickle

import pytest
import torch
from torch import nn

from ghostnoise import AdditiveGaussianNoise, NoisyDropout, functional

DISTRIBUTIONS = ["bernoulli", "gaussian"]
N = 60_000


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_noise_has_mean_one_and_the_variance_of_dropout(distribution, p):
    torch.manual_seed(0)
    noise = functional.noisy_dropout(torch.ones(N, dtype=torch.float64), p, distribution=distribution)
    variance = p / (1 - p)
    assert abs(noise.mean() - 1) <= 5 * (variance / N) ** 0.5
    squares = (noise - 1) ** 2
    assert abs(squares.mean() - variance) <= 5 * (squares.var() / N) ** 0.5
    if distribution == "bernoulli":
        assert set(noise.unique().tolist()) == {0, 1 / (1 - p)}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_p_can_set_the_standard_deviation_of_gaussian_noise(p):
    torch.manual_seed(0)
    layer = NoisyDropout(p, distribution="gaussian", p_sets="std")
    squares = (layer(torch.ones(N, dtype=torch.float64)) - 1) ** 2
    variance = (p / (1 - p)) ** 2
    assert abs(squares.mean() - variance) <= 5 * variance * (2 / N) ** 0.5
    torch.manual_seed(0)
    same = NoisyDropout(variance / (1 + variance), distribution="gaussian")
    torch.testing.assert_close((same(torch.ones(N, dtype=torch.float64)) - 1) ** 2, squares)
    with pytest.raises(ValueError, match=r"p_sets='std' with distribution='bernoulli': only for 'gaussian'; leave"):
        NoisyDropout(p, p_sets="std")


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1e-3, 0.3])
def test_the_default_dtype_does_not_change_how_much_is_dropped(default_dtype, dtype, p):
    """Nor that of the input: neither has to have the digits that p needs."""
    n = 4_000_000
    layer = NoisyDropout(p, generator=torch.Generator().manual_seed(0))
    dropped = (layer(torch.ones(n, dtype=dtype)) == 0).sum().item()
    assert abs(dropped - n * p) <= 5 * (n * p * (1 - p)) ** 0.5
    again = NoisyDropout(p, generator=torch.Generator().manual_seed(0))(torch.ones(n, dtype=torch.float32)) == 0
    if dtype != torch.float64:
        assert dropped == again.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("p", [1e-3, 1e-5])
def test_half_precision_rounds_the_output_alone(distribution, dtype, p):
    """The noise is that of a float32 input, though 1 + noise would be rounded to 1."""
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    y, wide = (
        functional.noisy_dropout(each, p, distribution=distribution, generator=torch.Generator().manual_seed(0))
        for each in (x, x.float())
    )
    assert y.dtype == dtype
    assert torch.equal(y, wide.to(dtype))
    dy = torch.randn_like(y)
    (gradient,), (expected,) = (torch.autograd.grad(each, x, dy.to(each.dtype)) for each in (y, wide))
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_additive_noise_in_half_precision_is_that_of_float32(dtype):
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    y, wide = (
        functional.additive_gaussian_noise(each, 0.3, generator=torch.Generator().manual_seed(0))
        for each in (x, x.float())
    )
    assert torch.equal(y, wide.to(dtype))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("channel_dim", [1, -1])
def test_per_channel_noise_is_shared_by_the_positions(distribution, channel_dim):
    x = torch.ones(6, 5, 4, 3)
    noise = functional.noisy_dropout(x, 0.5, distribution=distribution, per="channel", channel_dim=channel_dim).movedim(
        channel_dim, 1
    )
    flat = noise.flatten(2)
    assert (flat == flat[:, :, :1]).all()
    assert len(flat[:, :, 0].unique()) > 1


def test_per_element_noise_is_not():
    noise = functional.noisy_dropout(torch.ones(2, 2, 50), 0.5, distribution="gaussian")
    assert len(noise.unique()) == 200


def test_gradient_is_the_noise():
    x = torch.ones(4, 3, requires_grad=True)
    y = functional.noisy_dropout(x, 0.4, distribution="gaussian")
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


def test_additive_noise_has_its_standard_deviation():
    torch.manual_seed(0)
    x = torch.full((N,), 3.0, dtype=torch.float64)
    noise = functional.additive_gaussian_noise(x, 0.2) - x
    assert abs(noise.mean()) <= 5 * 0.2 / N**0.5
    assert abs(noise.square().mean() - 0.04) <= 5 * 0.04 * (2 / N) ** 0.5


LAYERS = [
    NoisyDropout(0.3),
    NoisyDropout(0.3, distribution="gaussian"),
    NoisyDropout(0.3, per="channel"),
    NoisyDropout(0.3, distribution="gaussian", per="channel", channel_dim=-1),
    AdditiveGaussianNoise(0.1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layers(layer, dtype):
    x = torch.randn(5, 4, 3).to(dtype).transpose(1, 2)
    torch.manual_seed(0)
    y = layer.train()(x)
    assert y.dtype == dtype
    assert y.stride() == x.stride()
    assert not torch.equal(y, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.manual_seed(0)
        assert torch.equal(twin(x), y)
    assert layer.eval()(x) is x
    assert list(layer.state_dict()) == []


def test_generators():
    x = torch.randn(5, 4)
    for layer in (NoisyDropout, AdditiveGaussianNoise):
        first, second = (layer(0.5, generator=torch.Generator().manual_seed(2))(x) for _ in range(2))
        assert torch.equal(first, second)


def test_no_noise_is_the_identity():
    x = torch.randn(3, 2)
    assert functional.noisy_dropout(x, 0.0) is x
    assert functional.additive_gaussian_noise(x, 0.0) is x


def test_dropping_everything():
    assert NoisyDropout(1.0)(torch.randn(3, 2)).abs().sum() == nn.Dropout(1.0)(torch.randn(3, 2)).abs().sum()


def test_bad_input():
    for p in (-0.1, 1.1, "0.5", None):
        with pytest.raises(ValueError, match=r"p=.*: must be a number in \[0, 1\]"):
            NoisyDropout(p)
    with pytest.raises(ValueError, match=r"p=1.0: must be a number in \[0, 1\)"):
        NoisyDropout(1.0, distribution="gaussian")
    with pytest.raises(ValueError, match="distribution='x'"):
        NoisyDropout(0.5, distribution="x")
    with pytest.raises(ValueError, match="per='x'"):
        NoisyDropout(0.5, per="x")
    with pytest.raises(ValueError, match="std=-1"):
        AdditiveGaussianNoise(-1)
    with pytest.raises(ValueError, match="must be float16, bfloat16, float32 or float64"):
        NoisyDropout(0.5)(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be float16, bfloat16, float32 or float64"):
        AdditiveGaussianNoise(0.5)(torch.ones(3, dtype=torch.complex64))

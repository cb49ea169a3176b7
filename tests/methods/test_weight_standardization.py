import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostnoise import WSConv2d, WSLinear, functional


def naive(weight, gain, std, eps=1e-5):
    rows = []
    for row, g in zip(weight, gain, strict=True):
        var = ((row - row.mean()) ** 2).mean()
        rows.append(g * std * (row - row.mean()) / torch.sqrt(var + eps))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2, 2)])
def test_standardized_weight_equals_naive_loop(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(functional.standardize_weight(weight, gain, 0.3), naive(weight, gain, 0.3))
    assert torch.autograd.gradcheck(lambda w, g: functional.standardize_weight(w, g, 0.3), (weight, gain))
    assert torch.autograd.gradgradcheck(lambda w, g: functional.standardize_weight(w, g, 0.3), (weight, gain))


def test_layers_use_it():
    torch.manual_seed(0)
    conv, linear = WSConv2d(3, 4, 3, stride=2, padding=1, groups=1), WSLinear(6, 4)
    nn.init.normal_(conv.gain), nn.init.normal_(linear.gain)
    image, row = torch.randn(2, 3, 8, 8), torch.randn(2, 6)
    weight = naive(conv.weight, conv.gain, conv.init_std)
    torch.testing.assert_close(conv(image), F.conv2d(image, weight, conv.bias, stride=2, padding=1))
    weight = naive(linear.weight, linear.gain, linear.init_std)
    torch.testing.assert_close(linear(row), F.linear(row, weight, linear.bias))


@pytest.mark.parametrize("layer", [WSConv2d(64, 128, 3, groups=2), WSLinear(500, 400)], ids=["conv", "linear"])
def test_init_std_is_the_initializers(layer):
    n = layer.weight.numel()
    # The sample standard deviation of a uniform distribution has relative error sqrt((κ-1)/(4n)), with kurtosis κ=1.8.
    assert abs(layer.weight.std() / layer.init_std - 1) <= 5 * (0.8 / (4 * n)) ** 0.5
    assert (layer.gain == 1).all()
    assert layer.gain.shape == (layer.weight.shape[0],)


def test_state_dict_round_trip():
    conv, other = WSConv2d(3, 4, 3), WSConv2d(3, 4, 3)
    assert sorted(conv.state_dict()) == ["bias", "gain", "init_std", "weight"]
    conv.init_std.fill_(0.5)
    other.load_state_dict(conv.state_dict(), strict=True)
    x = torch.randn(1, 3, 5, 5)
    assert torch.equal(conv(x), other(x))
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(twin(x), conv(x))
    conv.reset_parameters()
    assert conv.init_std == pytest.approx((3 * 27) ** -0.5)


def test_device_and_dtype_reach_the_gain():
    layer = WSLinear(6, 4, bias=False, device="meta", dtype=torch.float64)
    assert layer.gain.device.type == layer.init_std.device.type == "meta"
    assert layer.gain.dtype == layer.init_std.dtype == torch.float64
    assert layer.bias is None
    assert isinstance(layer, nn.Linear)

"""Weight standardization against a loop over output channels."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostnoise import WSConv1d, WSConv2d, WSLinear, functional


def naive(weight, gain, std, eps=1e-5):
    rows = []
    for row, g in zip(weight, gain, strict=True):
        var = ((row - row.mean()) ** 2).mean()
        rows.append(g * std * (row - row.mean()) / torch.sqrt(var + eps))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2), (4, 3, 2, 2)])
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


OPTIONS = [
    {}, {"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2, "bias": False}, {"groups": 2, "padding": "same"},
    {"padding": 1, "padding_mode": "circular"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_wsconv1d_against_float64(options):
    """The output and the gradients of a convolution with the weight of the naive loop."""
    torch.manual_seed(0)
    layer = WSConv1d(4, 6, 3, **options, dtype=torch.float64)
    plain = nn.Conv1d(4, 6, 3, **options, dtype=torch.float64)
    nn.init.normal_(layer.gain)
    weight = naive(layer.weight, layer.gain, layer.init_std)
    x = torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True)
    expected = torch.func.functional_call(
        plain, {"weight": weight} | ({} if layer.bias is None else {"bias": layer.bias}), (x,)
    )
    torch.testing.assert_close(layer(x), expected)
    tensors = [x, *layer.parameters()]
    dy = torch.randn_like(expected)
    gradients = zip(torch.autograd.grad(layer(x), tensors, dy), torch.autograd.grad(expected, tensors, dy), strict=True)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs)


def test_wsconv1d_gradcheck():
    torch.manual_seed(0)
    layer = WSConv1d(2, 3, 3, stride=2, padding=1, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def output(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(2, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(output, (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(output, (x, *layer.parameters()))


def test_wsconv1d_is_a_convolution():
    layer = WSConv1d(3, 4, 5, stride=2, padding=2, bias=False)
    assert isinstance(layer, nn.Conv1d)
    assert (layer.kernel_size, layer.stride, layer.padding, layer.bias) == ((5,), (2,), (2,), None)
    with pytest.raises(RuntimeError, match=r"Expected 2D .* or 3D"):
        layer(torch.randn(1, 3, 8, 8))
    torch.manual_seed(0)
    ours = WSConv1d(3, 4, 5)
    torch.manual_seed(0)
    theirs = nn.Conv1d(3, 4, 5)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize(
    "layer",
    [WSConv1d(256, 128, 5, groups=2), WSConv2d(64, 128, 3, groups=2), WSLinear(500, 400)],
    ids=["conv1d", "conv2d", "linear"],
)
def test_init_std_is_the_initializers(layer):
    n = layer.weight.numel()
    # The sample standard deviation of a uniform distribution has relative error sqrt((κ-1)/(4n)), with kurtosis κ=1.8.
    assert abs(layer.weight.std() / layer.init_std - 1) <= 5 * (0.8 / (4 * n)) ** 0.5
    assert (layer.gain == 1).all()
    assert layer.gain.shape == (layer.weight.shape[0],)


@pytest.mark.parametrize(("kind", "positions"), [(WSConv1d, (5,)), (WSConv2d, (5, 5))])
def test_state_dict_round_trip(kind, positions):
    conv, other = kind(3, 4, 3), kind(3, 4, 3)
    assert sorted(conv.state_dict()) == ["bias", "gain", "init_std", "weight"]
    conv.init_std.fill_(0.5)
    other.load_state_dict(conv.state_dict(), strict=True)
    x = torch.randn(1, 3, *positions)
    assert torch.equal(conv(x), other(x))
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(twin(x), conv(x))
    conv.reset_parameters()
    assert conv.init_std == pytest.approx((3 * 3 * 3 ** len(positions)) ** -0.5)


def test_device_and_dtype_reach_the_gain():
    layer = WSLinear(6, 4, bias=False, device="meta", dtype=torch.float64)
    assert layer.gain.device.type == layer.init_std.device.type == "meta"
    assert layer.gain.dtype == layer.init_std.dtype == torch.float64
    assert layer.bias is None
    assert isinstance(layer, nn.Linear)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WSConv1d(1, 4, 1), lambda: WSConv1d(6, 6, 1, groups=6), lambda: WSConv2d(1, 4, 1),
        lambda: WSConv2d(6, 12, 1, groups=6), lambda: WSLinear(1, 4), lambda: WSLinear(1, 4, device="meta"),
    ],
)  # fmt: skip
def test_a_single_element_per_output_channel_is_refused(make):
    """It equals its mean, so the standardized weight would be 0, whatever the weight."""
    with pytest.raises(
        ValueError, match=r"WS\w+ got a weight of shape \(.*\): .* 2 elements or more, .*; use the plain"
    ):
        make()


def test_functions_and_replaced_weights_are_checked_too():
    with pytest.raises(
        ValueError, match=r"standardize_weight got a weight of shape \(4, 1\): each output channel must"
    ):
        functional.standardize_weight(torch.randn(4, 1))
    with pytest.raises(ValueError, match=r"standardize_weight got a weight of shape \(4,\): each output channel must"):
        functional.standardize_weight(torch.randn(4))
    layer = WSLinear(2, 4)
    layer.weight = nn.Parameter(torch.randn(4, 1))
    with pytest.raises(ValueError, match="got a weight of shape"):
        layer(torch.randn(3, 1))


def test_two_elements_are_standardized():
    """To plus and minus the standard deviation, apart from eps."""
    torch.manual_seed(0)
    weight = torch.randn(5, 2, dtype=torch.float64)
    found = functional.standardize_weight(weight, eps=0)
    torch.testing.assert_close(found, torch.stack([(weight[:, 0] - weight[:, 1]).sign() * side for side in (1, -1)], 1))

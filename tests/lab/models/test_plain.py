"""Networks without shortcuts, compared with the same layers in a plain nn.Sequential."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostnoise import NoisyDropout
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from support.lab_networks import build, images, norm, parameters, trained

PLAIN = NormSettings(method="bn")


def test_mlps_of_the_paper():
    def kinds(model):
        return [type(layer) for layer in model]

    mnist = models.build(ModelSettings(name="mlp", widths=[512, 300]), PLAIN, (1, 28, 28), 10)
    assert kinds(mnist) == [nn.Flatten, *[nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2, nn.Linear]
    assert [(layer.in_features, layer.out_features) for layer in mnist if isinstance(layer, nn.Linear)] == [
        (784, 512), (512, 300), (300, 10),
    ]  # fmt: skip
    cifar = models.build(ModelSettings(name="mlp"), PLAIN, (3, 32, 32), 100)
    assert kinds(cifar) == [nn.Flatten, *[nn.Linear, nn.BatchNorm1d, nn.ReLU] * 3, nn.Linear]
    assert parameters(cifar) == 3072 * 1024 + 2 * 1024**2 + 3 * 2 * 1024 + (1024 + 1) * 100


def test_width_is_that_of_all_layers():
    model = models.build(ModelSettings(name="mlp", width=7), PLAIN, (1, 2, 2), 3)
    assert [layer.num_features for layer in model if isinstance(layer, nn.BatchNorm1d)] == [7, 7, 7]


def test_digits_net_is_three_convolutions():
    ours = models.build(ModelSettings(name="digits-net"), PLAIN, (1, 8, 8), 10)
    layers = [
        layer
        for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2))
        for layer in (nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    theirs = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)), strict=True)
    x = images(6, (1, 8, 8))
    assert torch.equal(ours(x), theirs(x))


def plain_conv1d(channels=1, length=40, width=64, classes=10):
    """Return the network of MNIST-1D: convolutions without bias, batch norm, ReLU, and a linear layer."""
    layers, positions = [], length
    for inputs, kernel in ((channels, 5), (width, 3), (width, 3)):
        conv = nn.Conv1d(inputs, width, kernel, stride=2, padding=kernel // 2, bias=False)
        layers += [conv, nn.BatchNorm1d(width), nn.ReLU()]
        positions = (positions - 1) // 2 + 1
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * positions, classes))


def test_conv1d_is_the_network_of_mnist1d():
    torch.manual_seed(0)
    ours = models.build(ModelSettings(name="conv1d"), PLAIN, (1, 40), 10)
    torch.manual_seed(0)
    theirs = plain_conv1d()
    assert theirs[-1].in_features == 320
    for tensor, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(tensor, other)  # the initial weights: torch's defaults, from the same draws
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images(16, (1, 40))), torch.arange(16) % 10).backward()
            optimizer.step()
    x = images(16, (1, 40))
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("length", [1, 2, 7, 39, 40, 41])
def test_conv1d_takes_signals_of_any_length(length):
    ours = build("conv1d", shape=(2, length))
    theirs = plain_conv1d(2, length, width=4, classes=5)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)), strict=True)
    x = images(6, (2, length))
    assert torch.equal(ours(x), theirs(x))


def test_dropout_of_conv1d_is_between_each_norm_and_relu():
    model = build("conv1d", "dropout")
    assert [type(layer) for layer in model] == [
        *3 * [nn.Conv1d, nn.BatchNorm1d, NoisyDropout, nn.ReLU], nn.Flatten, nn.Linear,
    ]  # fmt: skip


def test_wsln_conv1d_in_float64():
    """Weights standardized row by row, and normalization over channels and positions of each sample."""
    model = trained(build("wsln-conv1d")).double()
    x = images(3, (3, 16)).double()
    scores = []
    for sample in x:
        y = sample[None]
        for conv, affine in zip(model[0:12:4], model[1:12:4], strict=True):
            rows = [(row - row.mean()) / torch.sqrt(row.var(correction=0) + 1e-5) for row in conv.weight]
            weight = torch.stack(rows) * (conv.gain * conv.init_std)[:, None, None]
            y = F.conv1d(y, weight, stride=2, padding=conv.weight.shape[2] // 2)
            y = (y - y.mean()) / torch.sqrt(y.var(correction=0) + 1e-5)
            y = (y * affine.weight[:, None] + affine.bias[:, None]).clamp(min=0)
        scores.append(model[-1](y.flatten(1))[0])
    torch.testing.assert_close(model(x), torch.stack(scores))


def test_wsln_conv1d_keeps_the_standard_deviation_of_its_initialization():
    model = models.build(ModelSettings(name="wsln-conv1d"), norm("none"), (1, 40), 10)
    for conv, fan_in in zip(model[0:12:4], (5, 192, 192), strict=True):
        raw = conv.weight.flatten(1).var(1, correction=0)
        expected = torch.sqrt(raw / (raw + 1e-5) / (3 * fan_in))  # that of U(-b, b) with b = 1/sqrt(fan_in)
        torch.testing.assert_close(conv.standardized_weight().flatten(1).std(1, correction=0), expected)
        assert conv.bias is None

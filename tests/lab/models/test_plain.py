import torch
from torch import nn

from ghostnoise.lab import models
from ghostnoise.lab.config.schema import ModelSettings, NormSettings
from support.lab_networks import images, parameters

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

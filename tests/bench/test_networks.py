import pytest
import torch
from torch import nn

from ghostnoise.bench import networks
from ghostnoise.bench.net import training_step


@pytest.mark.parametrize(
    ("build", "convolutions", "weights"), [(networks.resnet20, 21, 272_474), (networks.resnet18, 20, 11_173_962)]
)
def test_networks_have_their_layers_and_weights(build, convolutions, weights):
    model = build(nn.BatchNorm2d)
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == convolutions
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_every_normalization_is_the_given_one():
    model = networks.resnet20(lambda channels: nn.GroupNorm(1, channels), width=2)
    assert sum(isinstance(layer, nn.GroupNorm) for layer in model.modules()) == 21
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())


def test_a_step_trains():
    torch.manual_seed(0)
    model = networks.resnet20(nn.BatchNorm2d, width=2)
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    step = training_step(model, images, labels)
    before = nn.functional.cross_entropy(model(images), labels).item()
    for _ in range(20):
        step()
    assert nn.functional.cross_entropy(model(images), labels).item() < before

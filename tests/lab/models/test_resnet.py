"""Compare ResNets with those of torchvision, with the same weights."""

import importlib
import math

import pytest
import torch
from torch import nn

from ghostnoise import WSConv2d
from ghostnoise.lab import models
from ghostnoise.lab.config.schema import ModelSettings, NormSettings
from support.lab_networks import build, images, parameters, trained

PLAIN = NormSettings(method="bn")


def torchvision():
    importlib.import_module("startup.sitecustomize")
    return importlib.import_module("torchvision.models")


def for_small_images(model):
    """Replace the stem with that of CIFAR networks."""
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


@pytest.mark.parametrize("classes", [10, 100])
def test_resnet18_matches_torchvision_with_another_stem(classes):
    ours = trained(models.build(ModelSettings(name="resnet18"), PLAIN, (3, 32, 32), classes))
    theirs = for_small_images(torchvision().resnet18(num_classes=classes))
    assert parameters(ours) == parameters(theirs) == {10: 11_173_962, 100: 11_220_132}[classes]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = images(4, (3, 12, 12))
    assert torch.equal(ours(x), theirs(x))  # in training
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_resnet50_matches_torchvision():
    theirs = trained(torchvision().resnet50())
    ours = models.build(ModelSettings(name="resnet50"), PLAIN, (3, 224, 224), 1000)
    assert parameters(ours) == parameters(theirs) == 25_557_032
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(2, (3, 65, 49))
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize(("name", "depth"), [("resnet20", 20), ("resnet8", 8)])
def test_the_networks_of_three_stages(name, depth):
    """He et al., section 4.2: 6n + 2 layers of 16, 32 and 64 channels; here with 1x1 convolutions as shortcuts."""
    model = models.build(ModelSettings(name=name), PLAIN, (3, 32, 32), 10)
    convolutions = {path: module for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    shortcuts = {path: module for path, module in convolutions.items() if "downsample" in path}
    assert len(convolutions) - len(shortcuts) + 1 == depth
    assert [(module.in_channels, module.out_channels, module.stride) for module in shortcuts.values()] == [
        (16, 32, (2, 2)), (32, 64, (2, 2)),
    ]  # fmt: skip
    n = (depth - 2) // 6
    expected = 27 * 16 + 2 * 16
    for inputs, width in ((16, 16), (16, 32), (32, 64)):
        expected += 9 * width * (inputs + (2 * n - 1) * width) + 2 * n * 2 * width
        expected += inputs * width + 2 * width if inputs != width else 0
    assert parameters(model) == expected + 65 * 10
    features = model[:-3](torch.zeros(2, 3, 32, 32))
    assert features.shape == (2, 64, 8, 8)


def test_weights_are_initialized_as_by_he_et_al():
    torch.manual_seed(0)
    model = models.build(ModelSettings(name="resnet18", width=16), PLAIN, (3, 32, 32), 10)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            ratio = module.weight.std().item() / math.sqrt(2 / (module.out_channels * module.kernel_size[0] ** 2))
            assert abs(ratio - 1) < 5 / math.sqrt(2 * module.weight.numel()), path
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones(module.num_features))


def test_wsln_matches_torchvision_with_group_norm_and_standardized_weights():
    ours = trained(models.build(ModelSettings(name="wsln-resnet18"), NormSettings(method="none"), (3, 32, 32), 10))
    theirs = for_small_images(torchvision().resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(1, c)))
    gains = 0
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.endswith(("gain", "init_std"))}
    for path, module in ours.named_modules():
        if isinstance(module, WSConv2d):
            gains += module.out_channels
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            weight = module.weight.double().flatten(1)
            weight = (weight - weight.mean(1, keepdim=True)) / (weight.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
            weight *= module.gain.double()[:, None] * math.sqrt(2 / fan_out)
            state[f"{path}.weight"] = weight.view_as(module.weight).float()
    theirs.load_state_dict(state, strict=True)
    assert parameters(ours) - gains == parameters(theirs)
    x = images(2, (3, 12, 12))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_wsln_keeps_the_standard_deviation_of_its_initialization():
    for module in build("wsln-resnet18").modules():
        if isinstance(module, WSConv2d):
            deviation = module.standardized_weight().flatten(1).std(1, correction=0)
            expected = math.sqrt(2 / (module.out_channels * module.kernel_size[0] ** 2))
            torch.testing.assert_close(deviation, torch.full_like(deviation, expected), rtol=1e-3, atol=0)

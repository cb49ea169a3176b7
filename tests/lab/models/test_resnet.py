"""Compare ResNets with those of torchvision, with the same weights."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostnoise import WSConv2d
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
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


def preactivation(model, x, norm, weight):
    """Compute the pre-activation ResNet-18 of the released code from the modules of `model`."""

    def convolve(path, x):
        module = model.get_submodule(path)
        return F.conv2d(x, weight(module), stride=module.stride, padding=module.padding)

    x = convolve("conv1", x)
    for stage in range(1, 5):
        for block in (f"layer{stage}.0", f"layer{stage}.1"):
            y = convolve(f"{block}.conv1", norm(f"{block}.bn1", x).relu())
            y = convolve(f"{block}.conv2", norm(f"{block}.bn2", y).relu())
            first = block.endswith("0") and stage > 1
            x = y + (convolve(f"{block}.downsample.1", norm(f"{block}.downsample.0", x)) if first else x)
    return model.fc(norm("bn1", x).relu().mean((2, 3)))


def test_preactivation_resnet18_is_that_of_the_released_code():
    """A norm of its own in the shortcuts, no activation there, none in the stem, and a last norm and ReLU."""
    model = trained(models.build(ModelSettings(name="preact-resnet18", width=8), PLAIN, (3, 32, 32), 10)).eval()

    def norm(path, x):
        module = model.get_submodule(path)
        mean, scale = module.running_mean, (module.running_var + 1e-5).rsqrt() * module.weight
        return (x - mean[:, None, None]) * scale[:, None, None] + module.bias[:, None, None]

    x = images(4, (3, 16, 16))
    expected = preactivation(model, x, norm, lambda module: module.weight)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_preactivation_wsln_has_weights_of_unit_fan_in():
    """Standardized to 1/sqrt(fan_in), times the gain, whatever the initialization."""
    settings = ModelSettings(name="preact-wsln-resnet18", width=8)
    model = trained(models.build(settings, NormSettings(method="none"), (3, 32, 32), 10))

    def weight(module):
        flat = module.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
        return (flat * module.gain[:, None] / math.sqrt(flat.shape[1])).view_as(module.weight)

    def norm(path, x):
        module = model.get_submodule(path)
        x = (x - x.mean((1, 2, 3), keepdim=True)) / (x.var((1, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
        return x * module.weight[:, None, None] + module.bias[:, None, None]

    x = images(4, (3, 16, 16))
    torch.testing.assert_close(model(x), preactivation(model, x, norm, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "last", "method"),
    [
        ("resnet50", "bn3", "bn"),
        ("resnet50", "bn3", "gni"),
        ("resnet8", "bn2", "gbn"),
        ("wsln-resnet18", "bn2", "none"),
    ],
)
def test_the_last_gain_of_each_branch_can_start_at_zero(name, last, method):
    """As timm initializes ResNets: every block is then the identity, apart from its ReLU and its shortcut."""
    torch.manual_seed(0)
    settings = ModelSettings(name=name, width=4, zero_init_last=True)
    norm = NormSettings(method=method, **({"ghost_size": 2} if method in ("gbn", "gni") else {}))
    model = models.build(settings, norm, (3, 64, 64), 10)
    initial = build(name, method if method in ("bn", "none") else None, shape=(3, 64, 64), classes=10).state_dict()
    for key, value in model.state_dict().items():
        zero = key.endswith(f".{last}.weight")
        assert torch.equal(value, torch.zeros_like(value) if zero else initial[key]), key
    block = model.layer1[-1]
    x = torch.randn(4, model.layer1[-1].conv1.in_channels, 8, 8)
    assert torch.equal(block(x), x.relu())

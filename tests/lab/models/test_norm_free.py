"""Compare NF-ResNet with that of timm, and its form for signals with plain operations, with the same weights."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostnoise import WSConv1d
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.models.norm_free import RELU_GAMMA, NormFreeBlock
from support.lab_networks import build, images, parameters, trained


def reference(width, classes=10):
    """Return timm's network with SkipInit and the stem of the paper: one 3x3 convolution without stride or pooling."""
    importlib.import_module("startup.sitecustomize")
    nfnet = importlib.import_module("timm.models.nfnet")
    config = nfnet.NfCfg(
        depths=(2, 2, 2, 2), channels=tuple(4 * width * 2**stage for stage in range(4)), stem_type="3x3_pool",
        stem_chs=width, bottle_ratio=0.25, act_layer="relu", skipinit=True, alpha=0.2,
    )  # fmt: skip
    model = nfnet.NormFreeNet(config, num_classes=classes)
    model.stem.pool, model.stem.conv.stride = nn.Identity(), (1, 1)
    return model


def as_theirs(state):
    kept = {name: tensor for name, tensor in state.items() if not name.endswith("init_std")}
    return {name: tensor.view(-1, 1, 1, 1) if name.endswith(".gain") else tensor for name, tensor in kept.items()}


@pytest.mark.parametrize("size", [8, 13])
def test_the_network_matches_timm(size):
    torch.manual_seed(0)
    settings = ModelSettings(name="nf-resnet26", width=8)
    ours = trained(models.build(settings, NormSettings(method="none"), (3, size, size), 10))
    theirs = reference(8)
    theirs.load_state_dict(as_theirs(ours.state_dict()), strict=True)
    x = images(3, (3, size, size))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_the_number_of_parameters_matches_timm():
    with torch.device("meta"):
        assert models.CATALOG["nf-resnet26"].parameters == parameters(reference(64))


def test_blocks_are_shortcuts_at_initialization():
    model = build("nf-resnet26")
    gains = [module.skipinit_gain for module in model.modules() if isinstance(module, NormFreeBlock)]
    assert len(gains) == 8
    assert all(gain.shape == () and gain.item() == 0 for gain in gains)
    model(images()).square().sum().backward()
    assert all(gain.grad != 0 for gain in gains)
    branch = [module.conv2.weight.grad for module in model.modules() if isinstance(module, NormFreeBlock)]
    assert not any(gradient.any() for gradient in branch)


def standardized(conv, x, stride=1):
    """Convolve (B, C, L) with a weight that is standardized row by row."""
    rows = [(row - row.mean()) / torch.sqrt(row.var(correction=0) + 1e-5) for row in conv.weight]
    weight = torch.stack(rows) * (conv.gain * conv.init_std)[:, None, None]
    return F.conv1d(x, weight, conv.bias, stride, padding=weight.shape[2] // 2)


def signal_block(block, x, beta, stride):
    """Return shortcut + 0.2 · gain · branch, with averages of neighbors in the shortcut of a stride."""
    y = x.clamp(min=0) * beta
    shortcut = y
    if stride == 2:
        pairs = [y[..., at : at + 2].mean(2) for at in range(0, y.shape[2], 2)]  # of an odd length, the last is alone
        shortcut = torch.stack(pairs, 2)
    shortcut = standardized(block.downsample.conv, shortcut)
    y = standardized(block.conv2, standardized(block.conv1, y).clamp(min=0), stride)
    return shortcut + 0.2 * block.skipinit_gain * standardized(block.conv3, y.clamp(min=0))


@pytest.mark.parametrize("length", [16, 13])
def test_the_network_for_signals_matches_its_formulas(length):
    model = trained(build("nf-resnet1d", shape=(3, length))).double()
    x = images(4, (3, length)).double()
    (first,), (second,) = model.stages
    y = standardized(model.stem.conv, x)
    y = signal_block(first, y, 1.0, 1)
    y = signal_block(second, y, 1 / math.sqrt(1 + 0.2**2), 2)
    scores = y.clamp(min=0).mean(2) @ model.head.fc.weight.T + model.head.fc.bias
    torch.testing.assert_close(model(x), scores)


def test_initialization_of_the_network_for_signals():
    model = build("nf-resnet1d")
    for conv in (module for module in model.modules() if isinstance(module, WSConv1d)):
        fan_in = math.prod(conv.weight.shape[1:])
        assert conv.init_std == pytest.approx(RELU_GAMMA / math.sqrt(fan_in))
        assert not conv.bias.any()
    assert not model.head.fc.bias.any()
    assert all(block.skipinit_gain == 0 for block in model.modules() if isinstance(block, NormFreeBlock))

"""Compare NF-ResNet with that of timm, with the same weights."""

import importlib

import pytest
import torch
from torch import nn

from ghostnoise.lab import models
from ghostnoise.lab.config.schema import ModelSettings, NormSettings
from ghostnoise.lab.models.norm_free import NormFreeBlock
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

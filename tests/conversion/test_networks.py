"""Conversion of whole timm networks."""

import copy
import io

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.methods.base import NormLayer
from support import networks
from support.models import state

WITH_BATCH_NORM = ["resnet18", "mobilenetv3_small_050", "efficientnet_b0", "resnetv2_50", "regnetx_002", "test_byobnet"]


def pixels(batch_size=4):
    return torch.randn(batch_size, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_all_batch_norms_are_converted_and_reverted(name):
    torch.manual_seed(0)
    model = networks.build(name)
    before = state(model)
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    expected = model.eval()(pixels())
    keys = list(model.state_dict())
    ghostnoise.convert(model, "gni", 2)
    assert len(norms) > 10
    assert all(isinstance(norm, NormLayer) for norm in norms)
    assert len(ghostnoise.summary(model)) == len(norms)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(pixels()), expected)
    ghostnoise.revert(model)
    model.train()
    assert state(model) == before


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "test_byobnet"])
def test_converted_networks_train_copy_and_save(name):
    torch.manual_seed(0)
    model = networks.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    ghostnoise.convert(model, "gni", 2)
    model(pixels()).square().sum().backward()
    optimizer.step()
    for key, tensor in model.state_dict().items():  # the last batch norm of a block starts as zero, and so its gradient
        counted = key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        gradient = None if counted else model.get_parameter(key).grad
        assert torch.equal(before[key], tensor) != (counted or bool(gradient.any()))
    assert sum(bool(parameter.grad.any()) for parameter in model.parameters()) > 20
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin.eval()(pixels()), copy.deepcopy(model).eval()(pixels()))
    networks.build(name).load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("name", "options", "channel_dim", "kind"),
    [("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, -1, nn.LayerNorm), ("convnext_atto", {}, 1, nn.LayerNorm)],
)
def test_noise_in_networks_without_batch_norm(name, options, channel_dim, kind):
    torch.manual_seed(0)
    model = networks.build(name, **options)
    before, expected = state(model), model.eval()(pixels())
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=r"no batch norm in this .*, whose norm layers are: .*LayerNorm.* give after="):
        ghostnoise.convert(model, "gni", 4)
    with pytest.raises(ValueError, match=r"channel_dim is not known for .*: give channel_dim=1, or channel_dim=-1"):
        ghostnoise.convert(model, "gni", 4, after=kind)
    ghostnoise.convert(model, "gni", 4, after=kind, channel_dim=channel_dim)
    assert torch.equal(model(pixels()), expected)
    assert list(model.state_dict()) == keys
    assert not torch.equal(model.train()(pixels()), model(pixels()))
    ghostnoise.revert(model)
    assert state(model) == before

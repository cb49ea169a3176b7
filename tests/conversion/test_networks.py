"""Conversion of whole networks of timm."""

import copy
import io

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.methods.base import NormLayer
from support import networks
from support.models import state

FEW = ["resnet18", "mobilenetv3_small_050", "resnetv2_50", "regnetx_002", "test_byobnet"]
# One or more of every family that has batch norm.
MANY = """
    cs3darknet_s cspresnet50 darknet17 densenet121 dla34 dpn48b efficientformer_l1 efficientformerv2_s0
    efficientnet_b0 efficientnet_lite0 efficientvit_b0 ese_vovnet19b_slim fasternet_t0 fastvit_t8 fbnetc_100
    gernet_s ghostnet_050 ghostnetv2_100 hardcorenas_a hgnet_tiny hgnetv2_b0 hrnet_w18_small lcnet_050
    legacy_seresnet18 levit_128s mixnet_s mnasnet_050 mobilenet_edgetpu_100 mobilenetv2_050
    mobilenetv4_conv_small_050 mobileone_s0 regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s
    resnest14d resnetrs50 rexnet_100 semnasnet_075 seresnext26t_32x4d skresnet18 spnasnet_100 starnet_s1 tinynet_e
    tresnet_m vgg11_bn xception41
"""


def pixels(batch_size=4, size=64):
    return torch.randn(batch_size, 3, size, size, generator=torch.Generator().manual_seed(0))


def check(name, size=64):
    """Convert a network, train it for a step, and revert it."""
    torch.manual_seed(0)
    model = networks.build(name)
    expected = model.eval()(pixels(size=size))
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    before = [state(norm) for norm in norms]
    assert len(norms) > 3
    ghostnoise.convert(model, "gni", 2)
    assert all(isinstance(norm, NormLayer) for norm in norms)
    assert len(ghostnoise.summary(model)) == len(norms)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(pixels(size=size)), expected)
    with torch.no_grad():
        model.train()(pixels(size=size))
    assert all(int(norm.num_batches_tracked) == 1 for norm in norms if norm.num_batches_tracked is not None)
    ghostnoise.revert(model.eval())
    assert [state(norm) for norm in norms] == before
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", FEW)
def test_all_batch_norms_are_converted_and_reverted(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY.split())
def test_networks_of_every_family(name):
    check(name, 224)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
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
    expected = copy.deepcopy(model).eval()(pixels())
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin.eval()(pixels()), expected)
    networks.build(name).load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("name", "options", "after"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, nn.LayerNorm),
        ("convnext_atto", {}, nn.LayerNorm),
        ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}, nn.LayerNorm),
        ("nf_regnet_b0", {}, nn.Conv2d),
    ],
)
def test_noise_in_networks_without_batch_norm(name, options, after):
    """In one call, in the channels of each layer: its output has as many as the layer has weights."""
    torch.manual_seed(0)
    model = networks.build(name, **options)
    before, expected = state(model), model.eval()(pixels())
    keys, hosts = list(model.state_dict()), [each for each in model.modules() if isinstance(each, after)]
    with pytest.raises(ValueError, match=r"no batch norm in this .*, whose norm layers are: .* give after="):
        ghostnoise.convert(model, "gni", 4)
    ghostnoise.convert(model, "gni", 4, after=after)
    shapes = {}
    for host in hosts:
        host.ghost_noise.register_forward_hook(lambda noise, args, y: shapes.update({noise: y.shape}))
    assert torch.equal(model(pixels()), expected)
    assert list(model.state_dict()) == keys
    assert not torch.equal(model.train()(pixels()), model(pixels()))
    assert len(shapes) == len(ghostnoise.summary(model)) == len(hosts) > 3
    for host in hosts:
        assert shapes[host.ghost_noise][host.ghost_noise.channel_dim] == len(host.weight)
    ghostnoise.revert(model)
    assert state(model) == before


@pytest.mark.parametrize(
    ("name", "channel_dim"),
    [
        ("LayerNorm", -1), ("LayerNorm2d", 1), ("LayerNormFp32", -1), ("LayerNormAct2d", 1), ("RmsNorm", -1),
        ("RmsNorm2d", 1), ("SimpleNorm", -1), ("GroupNorm1", 1), ("GroupNormAct", 1),
    ],
)  # fmt: skip
def test_the_channels_of_norms_of_timm(name, channel_dim):
    """On an input with other sizes, only these channels fit the layer."""
    norm = networks.layer(name)(5, **({"num_groups": 1} if name == "GroupNormAct" else {}))
    model = ghostnoise.convert(nn.Sequential(norm), "gni", 4, after=type(norm))
    assert norm.ghost_noise.channel_dim == channel_dim
    assert model(torch.randn(4, 3, 7, 5).movedim(-1, channel_dim)).shape[channel_dim] == 5

"""Compare ConvMixer with that of timm, and its form for signals with plain operations, with the same weights."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError
from support.lab_networks import build, images, parameters, trained


def reference(width, classes):
    importlib.import_module("startup.sitecustomize")
    timm = importlib.import_module("timm.models.convmixer")
    return timm.ConvMixer(width, depth=8, kernel_size=5, patch_size=2, num_classes=classes)


@pytest.mark.parametrize("width", [12, 256])
def test_the_network_matches_timm(width):
    settings = ModelSettings(name="convmixer", width=width)
    ours = trained(models.build(settings, NormSettings(method="bn"), (3, 32, 32), 10))
    theirs = reference(width, 10)
    assert parameters(ours) == parameters(theirs)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = images(3, (3, 6, 10))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)


def normalized(x, norm):
    """Batch norm of (B, C, L) in training."""
    mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), correction=0, keepdim=True)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight[:, None] + norm.bias[:, None]


def signal_reference(model, x):
    """Return the scores of signals (B, C, L) in training."""
    conv, _, norm = model.stem
    x = normalized(F.gelu(F.conv1d(x, conv.weight, conv.bias, stride=2)), norm)
    for residual, pointwise, _, after in model.blocks:
        depthwise, _, norm = residual.fn
        padded = F.pad(x, (2, 2))
        shifted = torch.stack([padded[..., k : k + x.shape[2]] for k in range(5)], 2)  # (B, C, 5, L)
        mixed = (shifted * depthwise.weight[:, 0, :, None]).sum(2) + depthwise.bias[:, None]
        x = x + normalized(F.gelu(mixed), norm)
        x = torch.einsum("oc,bcl->bol", pointwise.weight[..., 0], x) + pointwise.bias[:, None]
        x = normalized(F.gelu(x), after)
    return x.mean(2) @ model.head.weight.T + model.head.bias


def test_the_network_for_signals_matches_its_formulas():
    model = trained(build("convmixer1d", shape=(3, 12))).double()
    x = images(4, (3, 12)).double()
    torch.testing.assert_close(model(x), signal_reference(model, x))
    assert len(model.blocks) == 4


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("convmixer", (3, 8, 9), "8x9"), ("convmixer", (3, 7, 8), "7x8"), ("convmixer1d", (1, 41), "41")],
)
def test_sizes_are_multiples_of_the_patch(name, shape, size):
    with pytest.raises(UserError, match=f"inputs of {size}: a ConvMixer needs multiples of its patch size, 2; resize"):
        models.build(ModelSettings(name=name), NormSettings(method="bn"), shape, 10)

"""Compare ConvMixer with that of timm, with the same weights."""

import importlib

import pytest
import torch

from ghostnoise.lab import models
from ghostnoise.lab.config.schema import ModelSettings, NormSettings
from ghostnoise.lab.errors import UserError
from support.lab_networks import images, parameters, trained


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


def test_sizes_are_multiples_of_the_patch():
    with pytest.raises(UserError, match="images of 8x9: convmixer needs multiples of its patch size, 2"):
        models.build(ModelSettings(name="convmixer"), NormSettings(method="bn"), (3, 8, 9), 10)

"""Folding batch norm into the layer before it, for deployment."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import ghostnoise
from support.converted import PLAIN_AT_INFERENCE, converted
from support.models import images

every_method = pytest.mark.parametrize("method", PLAIN_AT_INFERENCE)


@every_method
def test_reverted_networks_fold(method):
    model = converted(method).eval()
    expected = model(images())
    folded = fuse(ghostnoise.revert(copy.deepcopy(model)))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in folded.modules())
    torch.testing.assert_close(folded(images()), expected)
    torch.testing.assert_close(fuse(model)(images()), expected)  # converted, they stay, and equal


@every_method
def test_layers_fold(method):
    model = converted(method).eval()
    conv = fuse_conv_bn_eval(model[0], model[1])
    torch.testing.assert_close(conv(images()), model[1](model[0](images())), rtol=1e-5, atol=1e-5)
    linear = fuse_linear_bn_eval(*model[4])
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x), model[4](x), rtol=1e-5, atol=1e-5)


def test_eval_norm_is_left_alone_until_it_is_plain():
    """It is not an instance of `nn.BatchNorm2d`, so code that folds batch norms does not take it for one."""
    model = converted("en").eval()
    torch.testing.assert_close(fuse(copy.deepcopy(model))(images()), model(images()))
    with pytest.warns(UserWarning, match="their eval output changes"):
        ghostnoise.revert(model)
    torch.testing.assert_close(fuse(model)(images()), model(images()))

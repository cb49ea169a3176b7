import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import ghostnoise
from families import example
from ghostnoise import EvalNorm2d, GhostBatchNorm2d, functional


@pytest.mark.parametrize("alpha", [None, 0.0, 1 / 16, 1.0])
def test_eval_is_the_function(alpha):
    layer = EvalNorm2d(3, ghost_size=4, alpha=alpha)
    layer(example(2))
    layer.eval()
    expected = functional.eval_norm(
        example(2), layer.running_mean, layer.running_var, layer.weight, layer.bias, ghost_size=4, alpha=alpha
    )
    assert torch.equal(layer(example(2)), expected)


def test_a_share_of_nothing_is_plain_batch_norm():
    layer, plain = EvalNorm2d(3, ghost_size=4, alpha=0.0), torch.nn.BatchNorm2d(3)
    layer(example(2))
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(example(2)), plain.eval()(example(2)))


def test_trains_as_ghost_batch_norm():
    layer, ghost = EvalNorm2d(3, ghost_size=4), GhostBatchNorm2d(3, ghost_size=4)
    assert torch.equal(layer(example(2)), ghost(example(2)))
    assert torch.equal(layer.running_var, ghost.running_var)


def test_eval_does_not_look_at_other_samples():
    layer = EvalNorm2d(3, ghost_size=4).eval()
    torch.testing.assert_close(layer(example(2))[:1], layer(example(2)[:1]))


def test_options_are_checked_when_built():
    with pytest.raises(ValueError, match=r"alpha=2: must be a number in \[0, 1\]"):
        EvalNorm2d(3, ghost_size=4, alpha=2)
    with pytest.raises(ValueError, match="ghost_size=0"):
        EvalNorm2d(3, ghost_size=0)


def test_without_ghosts_the_share_is_given():
    assert EvalNorm2d(3, ghost_size=None, alpha=0.5).ghost_size is None
    with pytest.raises(ValueError, match="alpha=None with ghost_size=None"):
        EvalNorm2d(3, ghost_size=None)


def test_folding_into_a_convolution_raises():
    """It would drop the sample's own moments silently: torch reads the layer's attributes alone."""
    for fold, first, layer in (
        (fuse_conv_bn_eval, nn.Conv2d(3, 4, 1), ghostnoise.EvalNorm2d(4, ghost_size=8)),
        (fuse_linear_bn_eval, nn.Linear(3, 4), ghostnoise.EvalNorm1d(4, ghost_size=8)),
    ):
        with pytest.raises(ValueError, match="depends on each sample"):
            fold(first.eval(), layer.eval())
    layer.eps = 1e-3
    assert layer.eps == copy.deepcopy(layer).eps == 1e-3


def test_the_layers_around_it_still_fold():
    conv, norm = nn.Conv2d(3, 4, 1).eval(), ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=8)
    norm(torch.randn(9, 4, 2, 2))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fuse_conv_bn_eval(conv, norm.eval())(x), norm(conv(x)))

"""Networks in channels_last: the same results, and the format is kept."""

import copy

import pytest
import torch
from torch import nn

import ghostnoise
from support.converted import METHODS, assert_same, step
from support.levels import LEVELS, running
from support.models import SIZES, images


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("level", LEVELS)
def test_channels_last(method, level):
    model = ghostnoise.convert(network(), method, **SIZES[method])
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = images().double()
    with running(level):
        ours, theirs = step(last, last, x.to(memory_format=torch.channels_last)), step(model, model, x)
    assert_same(ours, theirs, rtol=1e-9, atol=1e-9)
    for key in ("y", "x", "0.weight", "3.weight"):
        assert ours[key].is_contiguous(memory_format=torch.channels_last), key
    y = last.eval()(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, model.eval()(x))

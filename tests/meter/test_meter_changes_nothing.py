"""Outputs, gradients, weights, buffers and random number generators are the same with and without a meter."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import Meter
from support.models import convolutional, images, state, tokens, transformer


def with_dropout(method=None, **options):
    model = convolutional()
    model.insert(3, nn.Dropout2d(0.2))
    model[5].insert(1, nn.Dropout(0.1))
    return ghostnoise.convert(model, method, **options) if method else model


def tokens_with_noise():
    model = transformer()
    model.append(nn.Dropout(0.3))
    return ghostnoise.convert(model, "gni", ghost_size=8, after=nn.LayerNorm)


MODELS = {
    "plain": (with_dropout, images(16)),
    "gni": (lambda: with_dropout("gni", ghost_size=4), images(16)),
    "gbn": (lambda: with_dropout("gbn", ghost_size=4), images(16)),
    "xbn": (lambda: with_dropout("xbn", ghost_size=4), images(16)),
    "agni": (lambda: with_dropout("agni-conv", ghost_size=4), images(16)),
    "tokens": (tokens_with_noise, tokens(16)),
}


def trained(make, x, metered, steps=10):
    """Everything that a meter could change: outputs, gradients, weights, buffers and generator states."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    meter = Meter(model, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        if metered:
            with meter:
                y = model(x)
                y.square().mean().backward()
        else:
            y = model(x)
            y.square().mean().backward()
        kept += [y.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    kept += [tensor.clone() for tensor in model.state_dict().values()]
    model.eval()
    if metered:
        with meter:
            kept.append(model(x))
        assert meter.result().layers[0].batches >= steps
    else:
        kept.append(model(x))
    kept += [tensor.clone() for tensor in model.state_dict().values()]
    return kept, torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_identical(name):
    make, x = MODELS[name]
    (plain, *streams), (metered, *metered_streams) = (trained(make, x, metered) for metered in (False, True))
    assert len(plain) == len(metered)
    assert all(torch.equal(one, other) for one, other in zip(plain, metered, strict=True))
    assert torch.equal(streams[0], metered_streams[0])
    assert (streams[1] == metered_streams[1]).all()
    assert streams[2] == metered_streams[2]


def test_hooks_are_removed():
    model = with_dropout("gni", ghost_size=4)
    before = state(model)
    with Meter(model, 4):
        model(images())
        assert state(model) != before
    assert state(model) == before
    with pytest.raises(RuntimeError, match="channels"), Meter(model, 4):
        model(torch.randn(8, 5, 6, 6))
    assert state(model) == before


def test_later_in_place_operations_are_allowed():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.LayerNorm(3))
    x = torch.randn(8, 3, requires_grad=True)
    with Meter(model, 4) as meter:
        model(x).sum().backward()
    assert list(meter.result()) == ["0", "2"]

"""A training step does not synchronize with the device; buffers are updated in place; the seed decides the draws."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ghostnoise
from support.converted import METHODS, NOISY, assert_same, converted, step
from support.levels import LEVELS, running
from support.models import SIZES, convolutional, images, tokens, transformer

WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2")
every_method = pytest.mark.parametrize("method", METHODS)


class NoWaiting(TorchDispatchMode):
    """Fails on an operator whose result the host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in WAITING
        return func(*args, **(kwargs or {}))


def test_waiting_is_noticed():
    with NoWaiting(), pytest.raises(AssertionError):
        bool(torch.ones(()) > 0)


@every_method
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_does_not_wait(method, momentum):
    model, x = converted(method), images()
    model[1].momentum = model[4][1].momentum = momentum
    with running("general"), NoWaiting():
        model(x).square().sum().backward()


@every_method
def test_no_value_is_needed_on_the_host(method):
    """Tensors of the meta device have no values."""
    model = ghostnoise.convert(convolutional(), method, **SIZES[method]).to("meta")
    model(images().to("meta")).square().sum().backward()
    assert model[0].weight.grad.device.type == "meta"


@pytest.mark.parametrize("method", NOISY)
def test_inserted_noise_does_not_wait(method):
    model, x = ghostnoise.convert(transformer(), method, **SIZES[method], after=nn.LayerNorm), tokens()
    with running("general"), NoWaiting():
        model(x).square().sum().backward()


@every_method
@pytest.mark.parametrize("level", LEVELS)
def test_buffers_stay_in_their_place(method, level):
    model = converted(method)
    buffers = dict(model.named_buffers())
    before = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in buffers.items()}
    with running(level):
        step(model, model)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert buffer.data_ptr() == before[name][0]
        assert not torch.equal(buffer, before[name][1])


@every_method
def test_the_seed_decides(method):
    steps = []
    for seed in (1, 1, 2):
        model = converted(method)
        steps.append(step(model, model, seed=seed))
    assert_same(steps[0], steps[1])
    assert torch.equal(steps[0]["y"], steps[2]["y"]) != (method in NOISY)

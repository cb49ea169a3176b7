"""Converted networks, and a step of training: what a stack is tested with."""

import copy

import torch

import ghostnoise
from models import SIZES, images, trained

METHODS = list(SIZES)
NOISY = ["gni", "gni-shift", "gni-scale", "agni", "agni-conv"]


def converted(method, dtype=torch.float32, **options):
    """A trained network with batch norms '1' and '4.1' of `method`."""
    return ghostnoise.convert(trained(), method, **SIZES[method], **options).to(dtype)


def twins(method, dtype=torch.float32, **options):
    model = converted(method, dtype, **options)
    return model, copy.deepcopy(model)


def step(run, model, x=None, seed=0):
    """The output of `run`, the gradients, and the state of `model` after a forward and a backward pass."""
    x = (images() if x is None else x).clone().requires_grad_()
    torch.manual_seed(seed)
    y = run(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **{f"after {key}": t for key, t in model.state_dict().items()}}


def assert_same(ours, theirs, **tolerances):
    """Two dictionaries of tensors are equal: to the bit, or within tolerances."""
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if tolerances:
            torch.testing.assert_close(tensor, theirs[key], msg=lambda text, key=key: f"{key}: {text}", **tolerances)
        else:
            assert torch.equal(tensor, theirs[key]), key

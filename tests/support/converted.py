"""Converted networks, and a step of training."""

import copy

import torch

import ghostnoise
from ghostnoise.methods import registry
from support import families
from support.models import SIZES, images, trained

METHODS = list(SIZES)
NOISY = [name for name in METHODS if registry.names()[name][0].name in families.NOISY]
DRAWING = [name for name in METHODS if registry.names()[name][0].name in families.DRAWING]
PLAIN_AT_INFERENCE = [name for name in METHODS if not registry.names()[name][0].changes_inference]


def converted(method, dtype=torch.float32, **options):
    """Return a trained network whose batch norms '1' and '4.1' are those of `method`."""
    return ghostnoise.convert(trained(), method, **SIZES[method], **options).to(dtype)


def twins(method, dtype=torch.float32, **options):
    model = converted(method, dtype, **options)
    return model, copy.deepcopy(model)


def step(run, model, x=None, seed=0):
    """Return the output of `run`, the gradients, and the state of `model` after a forward and a backward pass."""
    x = (images() if x is None else x).clone().requires_grad_()
    torch.manual_seed(seed)
    y = run(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **{f"after {key}": t for key, t in model.state_dict().items()}}


def assert_same(ours, theirs, **tolerances):
    """Assert that two dictionaries of tensors are equal: bit for bit, or within tolerances."""
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if tolerances:
            torch.testing.assert_close(tensor, theirs[key], msg=lambda text, key=key: f"{key}: {text}", **tolerances)
        else:
            assert torch.equal(tensor, theirs[key]), key

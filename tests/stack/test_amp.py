"""Mixed precision: statistics stay accurate and finite, and a step that overflows changes nothing."""

import pytest
import torch
from torch import nn

from support.closeness import assert_close
from support.converted import METHODS, assert_same, converted
from support.families import FAMILIES, build, example
from support.levels import running
from support.models import images

every_method = pytest.mark.parametrize("method", METHODS)


@every_method
def test_autocast_in_bfloat16(method):
    model, seen = converted(method), []
    for norm in (model[1], model[4][1]):
        norm.momentum = 1.0  # running statistics are those of the batch
        norm.register_forward_hook(lambda norm, args, y: seen.append((norm, args[0].detach(), y.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(images()).square().mean()
    loss.backward()
    assert len(seen) == 2
    for norm, x, dtype in seen:
        assert x.dtype == dtype == torch.bfloat16
        assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
        exact = x.double().mean([dim for dim in range(x.ndim) if dim != 1])
        torch.testing.assert_close(norm.running_mean.double(), exact, rtol=1e-6, atol=1e-8)
        assert norm.running_var.isfinite().all()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_not_computed_in_float16(family):
    """Squares and sums of these values overflow in float16, and their variance has no digits in it."""
    half = (example(2) + 600).half()
    layer, exact = build(family, 2, momentum=1.0), build(family, 2, momentum=1.0, dtype=torch.float64)
    inputs = [half.clone().requires_grad_(), half.double().requires_grad_()]
    with running("general"):
        outputs = []
        for each, x in zip((layer, exact), inputs, strict=True):
            torch.manual_seed(0)
            outputs.append(each(x))
            outputs[-1].backward(example(2, outputs[-1].dtype))
    assert_close(outputs[0], outputs[1])
    assert_close(layer.running_mean, exact.running_mean)
    assert_close(layer.running_var, exact.running_var)
    assert inputs[0].grad.dtype == torch.float16
    assert inputs[0].grad.isfinite().all()


@every_method
def test_an_overflow_changes_nothing(method):
    model = converted(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(x):
        optimizer.zero_grad()
        scaler.scale(nn.functional.softplus(model(x)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    overflowing = images()
    overflowing[2, 1, 3, 3] = float("inf")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    train(overflowing)
    assert scaler.get_scale() == 2.0
    assert_same(model.state_dict(), before)
    train(images())
    assert scaler.get_scale() == 2.0
    assert model[1].num_batches_tracked.item() == before["1.num_batches_tracked"].item() + 1
    for key, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), key
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert not torch.equal(model[0].weight, before["0.weight"])

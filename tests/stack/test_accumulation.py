"""Gradient accumulation: a micro-batch is a batch of its own."""

import pytest
import torch

from support.converted import METHODS, converted
from support.models import images


@pytest.mark.parametrize("method", METHODS)
def test_each_micro_batch_has_its_own_statistics_and_noise(method):
    """The gradients are the sum of those of the micro-batches alone, and each of them counts."""
    parts = images(16).split(8)
    model, alone = converted(method), converted(method)
    torch.manual_seed(0)
    for part in parts:
        (model(part).square().sum() / len(parts)).backward()
    torch.manual_seed(0)
    sums = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    for part in parts:
        loss = alone(part).square().sum() / len(parts)
        for total, gradient in zip(sums, torch.autograd.grad(loss, list(alone.parameters())), strict=True):
            total.add_(gradient)
    for parameter, total in zip(model.parameters(), sums, strict=True):
        assert torch.equal(parameter.grad, total)
    assert model[1].num_batches_tracked.item() == 3 + 2


@pytest.mark.parametrize("method", ["bn", "gni", "agni"])
def test_accumulated_batches_are_no_larger_batch(method):
    """As the guide warns: statistics and ghost batches do not extend over micro-batches."""
    torch.manual_seed(0)
    whole = converted(method)(images(16))
    torch.manual_seed(0)
    model = converted(method)
    parts = torch.cat([model(part) for part in images(16).split(8)])
    assert not torch.allclose(whole, parts, rtol=1e-2)


@pytest.mark.parametrize("method", ["gbn", "xbn"])
def test_whole_ghost_batches_are_the_same_in_micro_batches(method):
    whole, parted = converted(method, torch.float64), converted(method, torch.float64)
    x = images(16).double()
    torch.testing.assert_close(whole(x), torch.cat([parted(part) for part in x.split(8)]))
    assert parted[1].num_batches_tracked.item() == whole[1].num_batches_tracked.item() + 1

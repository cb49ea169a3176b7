"""Copies of a model, and averages of its weights: EMA, and SWA with its statistics taken again."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import ghostnoise
from support.converted import METHODS, NOISY, assert_same, converted, step
from support.models import images, trained

every_method = pytest.mark.parametrize("method", METHODS)


def batches():
    return [images() + shift for shift in range(3)]


@every_method
def test_a_copy_trains_on_its_own(method):
    model = converted(method)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    ours = step(twin, twin)
    assert_same(model.state_dict(), before)
    assert_same(step(model, model), ours)


@every_method
@pytest.mark.parametrize("use_buffers", [True, False])
def test_exponential_averages(method, use_buffers):
    model = converted(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
    average.update_parameters(model)  # the first time, it copies
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(model, model)
    optimizer.step()
    average.update_parameters(model)
    after = average.module.state_dict()
    assert list(after) == list(before)
    for key, new in model.state_dict().items():
        mixed = use_buffers or "running" not in key
        if new.is_floating_point():
            torch.testing.assert_close(after[key], 0.75 * before[key] + 0.25 * new if mixed else new)
    trained().load_state_dict(after, strict=True)
    assert torch.isfinite(average.eval()(images())).all()


def test_statistics_are_taken_again_as_by_plain_batch_norm():
    model = AveragedModel(converted("bn"))
    plain = AveragedModel(ghostnoise.revert(converted("bn")))
    update_bn(batches(), model)
    update_bn(batches(), plain)
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert model.module[1].momentum == 0.1


@pytest.mark.parametrize("method", NOISY)
def test_statistics_are_taken_again_under_noise(method):
    """What a noisy layer sees is measured as plain batch norm would; layers after it see its noise."""
    model, plain = converted(method), trained()
    update_bn(batches(), model)
    update_bn(batches(), plain)
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "4.1.num_batches_tracked"):
        torch.testing.assert_close(model.state_dict()[key], plain.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model[4][1].running_mean, plain[4][1].running_mean, rtol=1e-3)
    reverted = ghostnoise.revert(model)  # without noise: the guide's remedy
    update_bn(batches(), reverted)
    assert_same(reverted.state_dict(), plain.state_dict())


@pytest.mark.parametrize("method", ["gbn", "en"])
def test_ghost_variances_are_taken_again(method):
    model = nn.Sequential(converted(method)[1])
    shape = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    update_bn([shape, shape + 1], model)
    ghosts = shape.unflatten(0, (2, 4)).var((1, 3, 4), correction=0).mean(0)
    torch.testing.assert_close(model[0].running_var, ghosts)
    torch.testing.assert_close(model[0].running_mean, shape.mean((0, 2, 3)) + 0.5)

"""Noise in eval mode on padded batches: valid positions as without padding, and 0 at the others."""

import pytest
import torch
from ghostnoise.statistics.laws import Law
from torch import nn

import ghostnoise
from ghostnoise.methods.registry import specs
from support import ragged
from support.calibrating import METHODS

MASK = ragged.lengths_mask([5, 2, 0, 3], 5)


def x(seed=0):
    return torch.randn(4, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.7


def padded(value=torch.nan):
    return x().where(MASK.unsqueeze(1), value)


def built(method):
    torch.manual_seed(0)
    model = ghostnoise.convert(nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)).double(), method, **METHODS[method])
    nn.init.normal_(model[1].weight)
    with ghostnoise.masked(MASK):
        ghostnoise.calibrate(model, [padded()], keep=20)
    return model.eval()


def outputs(model, given, mask=None):
    """The output of a pass with noise, and the gradients of the input and of the batch norm."""
    given = given.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    with ghostnoise.sampling(model, ghost_size=3, generator=generator):
        y = model[1](given, mask)
    return y, *torch.autograd.grad(y.where(MASK.unsqueeze(1), 0).square().sum(), (given, *model[1].parameters()))


@pytest.mark.parametrize("method", [name for name, spec in specs().items() if spec.norm is not None])
def test_no_value_or_gradient_depends_on_the_padding(method):
    model = built(method)
    hidden = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = outputs(model, hidden.clone())
    actual = outputs(model, hidden.where(MASK.unsqueeze(1), torch.nan), MASK)
    for kind, one, other in zip(("y", "dx", "weight", "bias"), actual, expected, strict=True):
        valid = other.where(MASK.unsqueeze(1), 0) if kind in ("y", "dx") else other
        torch.testing.assert_close(one, valid, rtol=0, atol=1e-12)


def test_predict_inside_of_a_block():
    """Masks are repeated with the batch."""
    model = built("gni")
    with ghostnoise.masked(MASK, MASK[:, ::2]):
        mean, variance, found = ghostnoise.predict(
            model, padded(), samples=3, chunk=2, generator=torch.Generator().manual_seed(3)
        )
    expected, generator = [], torch.Generator().manual_seed(3)
    for count in (2, 1):
        with ghostnoise.sampling(model, generator=generator):
            y = model[1](model[0](padded(0.0).repeat(count, 1, 1)))
        expected.append(y.detach().unflatten(0, (count, 4)).where(MASK.unsqueeze(1), 0))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(mean, torch.cat(expected).mean(0))
    assert not variance[~MASK.unsqueeze(1).expand_as(variance)].any()


@pytest.mark.parametrize("lengths", [[5, 2, 0, 3], [3, 3, 3, 3]])
def test_analytical_noise_of_stored_samples_with_valid_positions(lengths):
    """The law is that of ghost batches of the stored samples, whose positions may be others than those of the input."""
    layer, mask = ghostnoise.AnalyticalGhostNoise(4, law="conv"), ragged.lengths_mask(lengths, 5)
    with ghostnoise.masked(mask):
        ghostnoise.calibrate(layer, [x()], keep=20)
    given = torch.randn(6, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with ghostnoise.sampling(layer.eval(), generator=torch.Generator().manual_seed(1)):
        y = layer(given)
    samples = [sample for sample in ragged.unpad(x(), mask) if sample.shape[1]]
    total = sum(sample.shape[1] for sample in samples)
    mean, var = ragged.statistics(samples)
    within = sum(((sample - sample.mean(1, keepdim=True)) ** 2).sum(1) for sample in samples) / (total - len(samples))
    around = sum(sample.shape[1] * (sample.mean(1) - mean) ** 2 for sample in samples) / total
    spatial = torch.tensor(total / len(samples), dtype=torch.float64)
    between = (around - within / spatial).clamp_min(0)
    draws = Law(4, "conv").draw((6, 2), spatial, given.device, torch.Generator().manual_seed(1))
    shift = draws.normal * torch.sqrt(within / (4 * spatial) + between / 4)
    scale = torch.sqrt((within * draws.within + between * draws.between + 1e-3) / (var + 1e-3))
    torch.testing.assert_close(y, (given - shift[:, :, None]) / scale[:, :, None], rtol=0, atol=1e-10)

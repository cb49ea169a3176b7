"""Norms with noise: the order of normalization, noise and affine, compared with the norm without noise."""

import pytest
import torch
from torch import nn

from ghostnoise.lab.models.noisy import NoisyBatchNorm1d, NoisyBatchNorm2d, NoisyGroupNorm, NoisyLayerNorm


class Marker(nn.Module):
    """Deterministic noise that does not commute with an affine."""

    def forward(self, x):
        return x.abs() + 1 if self.training else x


LAYERS = {
    "batch 1d": (NoisyBatchNorm1d, nn.BatchNorm1d, (6,), {"affine": False}, (9, 6)),
    "batch 2d": (NoisyBatchNorm2d, nn.BatchNorm2d, (6,), {"affine": False}, (9, 6, 4, 5)),
    "group": (NoisyGroupNorm, nn.GroupNorm, (2, 6), {"affine": False}, (9, 6, 4, 5)),
    "layer": (NoisyLayerNorm, nn.LayerNorm, (6,), {"elementwise_affine": False}, (9, 5, 6)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    noisy, plain, arguments, without_affine, shape = LAYERS[request.param]
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(2, 6, generator=generator)
    x = 3 * torch.randn(shape, generator=generator) + 1
    along = (-1,) if request.param == "layer" else (-1, *[1] * (len(shape) - 2))

    def affine(y):
        return y * weight.view(along) + bias.view(along)

    def make(inside):
        layer = noisy(*arguments, noise=Marker(), inside=inside)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        return layer

    return make, plain(*arguments), plain(*arguments, **without_affine), affine, x


def test_inside_is_between_normalization_and_affine(case):
    make, _, bare, affine, x = case
    torch.testing.assert_close(make(inside=True)(x), affine(bare(x).abs() + 1))


def test_after_is_after_the_affine(case):
    make, _, bare, affine, x = case
    torch.testing.assert_close(make(inside=False)(x), affine(bare(x)).abs() + 1)


@pytest.mark.parametrize("inside", [True, False])
def test_state_and_eval_are_those_of_the_plain_norm(case, inside):
    make, plain, _, _, x = case
    layer = make(inside)
    layer(x)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("inside", [True, False])
def test_running_statistics_are_those_of_the_plain_norm(inside):
    layer, plain = NoisyBatchNorm2d(3, momentum=0.2, noise=Marker(), inside=inside), nn.BatchNorm2d(3, momentum=0.2)
    for seed in range(3):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + seed
        layer(x)
        plain(x)
    for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)

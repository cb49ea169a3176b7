"""Compare Simple ViT with its formulas, one sample, head and token at a time, in float64."""

import math

import pytest
import torch
from torch import nn

from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.vit import positions
from support.lab_networks import build, images, parameters, trained


def layer_norm(x, norm):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return x * norm.weight + norm.bias


def attention(x, layer, heads):
    x = layer_norm(x, layer.norm)
    mixed = x @ layer.to_qkv.weight.T
    inner = mixed.shape[1] // 3
    size = inner // heads
    seen = torch.empty(len(x), inner, dtype=x.dtype)
    for head in range(heads):
        query, key, value = (mixed[:, at + head * size : at + (head + 1) * size] for at in (0, inner, 2 * inner))
        for token in range(len(x)):
            shares = torch.softmax(torch.stack([query[token] @ other for other in key]) / math.sqrt(size), 0)
            seen[token, head * size : (head + 1) * size] = shares @ value
    return seen @ layer.to_out.weight.T


def perceptron(x, layer):
    norm, up, _, down = layer
    x = layer_norm(x, norm) @ up.weight.T + up.bias
    x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x @ down.weight.T + down.bias


def reference(model, image):
    """Return the scores of one image (C, H, W)."""
    channels, height, width = image.shape
    tokens = [
        torch.stack([image[c, top + i, left + j] for i in range(4) for j in range(4) for c in range(channels)])
        for top in range(0, height, 4)
        for left in range(0, width, 4)
    ]
    return scores(model, torch.stack(tokens), heads=16)


def scores(model, patches, heads):
    """Return the scores of the patches of a sample."""
    _, before, linear, after = model.embedding
    if not isinstance(before, nn.Identity):  # signals have no norm here
        patches = layer_norm(patches, before)
    x = patches @ linear.weight.T + linear.bias
    x = layer_norm(x, after) + model.positions
    for layer in model.layers:
        x = x + attention(x, layer.attention, heads)
        x = x + perceptron(x, layer.perceptron)
    return layer_norm(x, model.norm).mean(0) @ model.head.weight.T + model.head.bias


def signal_reference(model, signal):
    """Return the scores of one signal (C, L)."""
    channels, length = signal.shape
    tokens = [
        torch.stack([signal[c, left + j] for j in range(4) for c in range(channels)]) for left in range(0, length, 4)
    ]
    return scores(model, torch.stack(tokens), heads=8)


def test_the_network_matches_its_formulas():
    model = trained(build("simple-vit", shape=(3, 8, 12))).double()
    x = images(3, (3, 8, 12)).double()
    torch.testing.assert_close(model(x), torch.stack([reference(model, image) for image in x]))


def test_the_network_for_signals_matches_its_formulas():
    model = trained(build("vit1d", shape=(3, 20))).double()
    x = images(3, (3, 20)).double()
    torch.testing.assert_close(model(x), torch.stack([signal_reference(model, signal) for signal in x]))


def test_positions():
    rows, columns, width = 3, 5, 16
    table = positions([rows, columns], width)
    assert table.shape == (rows * columns, width)
    for y in range(rows):
        for x in range(columns):
            angles = [[at / 10_000 ** (k / (width // 4 - 1)) for k in range(width // 4)] for at in (x, y)]
            expected = [wave(angle) for one in angles for wave in (math.sin, math.cos) for angle in one]
            torch.testing.assert_close(table[y * columns + x], torch.tensor(expected))


def test_positions_of_signals():
    length, width = 10, 16
    table = positions([length], width)
    assert table.shape == (length, width)
    for x in range(length):
        angles = [x / 10_000 ** (k / (width // 2 - 1)) for k in range(width // 2)]
        expected = [wave(angle) for wave in (math.sin, math.cos) for angle in angles]
        torch.testing.assert_close(table[x], torch.tensor(expected))


def test_positions_of_images_are_those_of_earlier_runs():
    """Bit for bit the formula before signals were possible, so that the runs of `simple-vit` can be repeated."""
    rows, columns, width = 8, 7, 512
    frequency = 10_000 ** -torch.linspace(0, 1, width // 4)
    y, x = (torch.outer(torch.arange(size).float(), frequency) for size in (rows, columns))
    y, x = y.repeat_interleave(columns, 0), x.repeat(rows, 1)
    assert torch.equal(positions([rows, columns], width), torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1))


def test_size():
    """Depth 6, 16 heads of 64, embedding 512, MLP 1024, patches of 4x4x3."""
    model = models.build(ModelSettings(name="simple-vit"), NormSettings(method="none"), (3, 32, 32), 10)
    layer = 2 * 512 + 512 * 3 * 1024 + 1024 * 512 + 2 * 512 + (512 + 1) * 1024 + (1024 + 1) * 512
    assert parameters(model) == 2 * 48 + (48 + 1) * 512 + 2 * 512 + 6 * layer + 2 * 512 + (512 + 1) * 10
    assert len(model.layers) == 6
    assert model.positions.shape == (64, 512)
    assert sum(isinstance(module, nn.LayerNorm) for module in model.modules()) == 2 + 2 * 6 + 1
    assert "positions" not in model.state_dict()


def test_size_of_the_network_for_signals():
    """Depth 2, 8 heads of 16, embedding 64, MLP 128, patches of 4 points."""
    model = models.build(ModelSettings(name="vit1d"), NormSettings(method="none"), (1, 40), 10)
    layer = 2 * 64 + 64 * 3 * 128 + 128 * 64 + 2 * 64 + (64 + 1) * 128 + (128 + 1) * 64
    assert parameters(model) == (4 + 1) * 64 + 2 * 64 + 2 * layer + 2 * 64 + (64 + 1) * 10
    assert model.positions.shape == (10, 64)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("simple-vit", (3, 30, 32), "30x32"), ("simple-vit", (3, 32, 2), "32x2"), ("vit1d", (3, 42), "42")],
)
def test_sizes_are_multiples_of_the_patch(name, shape, size):
    with pytest.raises(
        UserError, match=f"inputs of {size}: the transformer needs multiples of its patch size, 4; resi"
    ):
        build(name, shape=shape)


def test_widths_are_multiples_of_8():
    for name, shape, heads in (("simple-vit", (3, 8, 8), 16), ("vit1d", (3, 8), 8)):
        rule = f"model.width=12: the transformer needs a multiple of 8, for {heads} heads"
        with pytest.raises(UserError, match=rule):
            models.build(ModelSettings(name=name, width=12), NormSettings(method="none"), shape, 10)

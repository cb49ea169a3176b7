"""Code of a user that type checkers accept, with the types that they must see."""

from typing import assert_type

import torch
from torch import Tensor, nn

import ghostnoise
from ghostnoise import GhostNoise, WSConv2d, functional
from ghostnoise.functional import noisy_dropout

# Converting.
model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8))
assert_type(ghostnoise.convert(model, "gni", ghost_size=32), nn.Sequential)
assert_type(ghostnoise.convert(model, "gni", 32), nn.Sequential)
assert_type(ghostnoise.revert(model), nn.Sequential)
ghostnoise.convert(model, "bn")
ghostnoise.convert(model, "gbn", None, running_var_from="batch", scope="local")
ghostnoise.convert(model, "gni", {"1": 16, "*": ghostnoise.OffAfter(8, steps=100)}, noise_eps=1e-2, history=256)
ghostnoise.convert(model, "en", 32, alpha="1/N^2")
ghostnoise.convert(model, "en", 32, alpha=0.1)
ghostnoise.convert(model, "brn", warmup_steps=100, where=lambda name, module: name != "0")
tokens = nn.Sequential(nn.LayerNorm(8), nn.GELU())
ghostnoise.convert(tokens, "agni", 16, law="conv", components="shift", after=(nn.LayerNorm, nn.GELU), channel_dim=-1)
name: str = "gni"
ghostnoise.convert(model, name, ghost_size=16, generator=torch.Generator())
for row in ghostnoise.summary(model):
    assert_type(row.ghost_size, int | None)
schedule = ghostnoise.LinearSchedule(8, 32, steps=10)
assert_type(schedule.at(3), int)
schedule.step()

# Layers and functions.
layer = ghostnoise.GhostNoiseBatchNorm2d(8, ghost_size=32)
assert_type(layer, ghostnoise.GhostNoiseBatchNorm2d)
assert_type(layer.ghost_size, int | None)
assert_type(layer.weight, nn.Parameter)
norm: nn.BatchNorm2d = layer
assert_type(ghostnoise.GhostBatchNorm1d(8, 1e-5, 0.1, ghost_size=None), ghostnoise.GhostBatchNorm1d)
assert_type(GhostNoise(16, channel_dim=-1, components="scale"), ghostnoise.GhostNoise)
assert_type(WSConv2d(3, 8, kernel_size=3, padding=1).standardized_weight(), Tensor)
x = torch.randn(16, 8, 4, 4)
assert_type(layer.forward(x, mask=None), Tensor)
assert_type(functional.ghost_noise(x, ghost_size=8), Tensor)
assert_type(functional.batch_norm(x, None, None, training=True), Tensor)
assert_type(noisy_dropout(x, 0.1, distribution="gaussian", per="channel"), Tensor)
assert_type(ghostnoise.decompose(x, 4), ghostnoise.Decomposition)

# Everything else.
rows = torch.randn(64, 20)
found = ghostnoise.calibrate(model, [rows], keep=64)
assert_type(found, ghostnoise.Calibration)
assert_type(found.layers, tuple[str, ...])
with ghostnoise.sampling(model, ghost_size=4), ghostnoise.masked(torch.ones(64, dtype=torch.bool)):
    model(rows)
prediction = ghostnoise.predict(model, rows, samples=8, transform=lambda y: y.softmax(-1))
assert_type(prediction, ghostnoise.Prediction)
assert_type(prediction.variance, Tensor)
with ghostnoise.Meter(model, ghost_size=32) as meter:
    model(rows)
assert_type(meter.result(), ghostnoise.meter.Reading)
assert_type(ghostnoise.histories(model), dict[str, ghostnoise.History])


def batch_norm(m: ghostnoise.Moments, weight: Tensor, bias: Tensor) -> ghostnoise.Affine:
    return ghostnoise.tables.normalize(ghostnoise.tables.whole_batch(m)).then(weight, bias)


assert_type(ghostnoise.flex_norm(rows, batch_norm, torch.ones(rows.shape[1]), torch.zeros(rows.shape[1])), Tensor)
assert_type(ghostnoise.__version__, str)

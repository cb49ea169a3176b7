"""Code of a user with a mistake in each line that ends with a comment; type checkers must report these lines alone."""

import torch
from torch import nn

import ghostnoise
from ghostnoise import functional

model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8))
x = torch.randn(16, 8)

ghostnoise.GhostNoiseBatchNorm2d(8, ghost_sice=32)  # refused
ghostnoise.GhostNoiseBatchNorm2d(8)  # refused
ghostnoise.GhostBatchNorm1d(8, ghost_size="32")  # refused
ghostnoise.GhostNoise(16, components="mean")  # refused
ghostnoise.GhostNoise(16, 1e-3, "shift")  # refused
ghostnoise.EvalNorm1d(8, ghost_size=4, alpha="1/N")  # refused
ghostnoise.WSConv2d(3, 8)  # refused
ghostnoise.ExclusiveBatchNorm3d(8, ghost_size=4, clamp=3.0)  # refused
ghostnoise.GhostNoisyBatchNorm2d(8, ghost_size=32)  # refused
functional.ghost_noise(x, ghost_sice=8)  # refused
functional.ghost_noisy(x, 8)  # refused
functional.batch_norm(x)  # refused

ghostnoise.convert(model, "gni", ghost_sice=32)  # refused
ghostnoise.convert(model, "gni", ghost_size=3.5)  # refused
ghostnoise.convert(model, "gni", 32, components="mean")  # refused
ghostnoise.convert(model, "gni", 32, after="LayerNorm")  # refused
ghostnoise.convert(lambda y: y, "gni", 32)  # refused
ghostnoise.converted(model, "gni", 32)  # refused
ghostnoise.OffAfter(8)  # refused
ghostnoise.calibrate(model, [x], keeps=4)  # refused
print(ghostnoise.calibrate(model, [x]).layer)  # refused
ghostnoise.predict(model, x, samples="8")  # refused
print(ghostnoise.predict(model, x).std)  # refused
ghostnoise.sampling(model, size=4)  # refused
ghostnoise.masked()  # refused
ghostnoise.Meter(model, ghost_sizes=4)  # refused
ghostnoise.backend("cuda")  # refused

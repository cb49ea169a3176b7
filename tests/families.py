"""The layers that hold batch-norm state, each with the options it is tested with."""

import torch

import ghostnoise

OPTIONS = {
    "BatchNorm": {},
    "GhostBatchNorm": {"ghost_size": 4},
    "ExclusiveBatchNorm": {"ghost_size": 4},
    "EvalNorm": {"ghost_size": 4},
    "GhostNoiseBatchNorm": {"ghost_size": 5},
    "AnalyticalGhostNoiseBatchNorm": {"ghost_size": 5, "kind": "conv"},
}
SHAPES = {1: (10, 3, 7), 2: (10, 3, 4, 5), 3: (10, 3, 2, 3, 4)}
LAYERS = [(family, dimensions) for family in OPTIONS for dimensions in SHAPES]
NOISY = ("GhostNoiseBatchNorm", "AnalyticalGhostNoiseBatchNorm")


def build(family, dimensions, num_features=3, **options):
    return getattr(ghostnoise, f"{family}{dimensions}d")(num_features, **OPTIONS[family], **options)


def plain(dimensions, num_features=3, **options):
    return getattr(torch.nn, f"BatchNorm{dimensions}d")(num_features, **options)


def example(dimensions, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dimensions)
    return (torch.randn(SHAPES[dimensions], dtype=torch.float64, generator=generator) * 2 + 1).to(dtype)

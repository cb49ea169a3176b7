"""Expected measurements of a meter, as deliberately naive loops over samples, channels and draws in float64.

They are written from the definitions and independent of the library: no per-sample moments, no pooling formulas.
"""

import numpy as np
import torch
from torch import nn

from ghostnoise.meter import Meter
from ghostnoise.meter import layer as layer_module


def measure(batches, ghost_size, channel_dim=1, **options):
    """Measure tensors as the input of a module."""
    model = nn.Sequential(nn.Identity())
    with Meter(model, ghost_size, modules="0", side="input", channel_dim=channel_dim, **options) as meter:
        for x in batches:
            model(x)
    return meter.result()["0"]


def measure_model(model, batches, ghost_size=4, **options):
    """Measure the layers of a model."""
    with torch.no_grad(), Meter(model, ghost_size, **options) as meter:
        for x in batches:
            model(x)
    return meter.result()


class Spy:
    """Record the sample indices that a meter draws for each batch: by method for the noise, and for the gap.

    The gap takes the ghost batches of the batch as it is, and others, of which the order is recorded too.
    """

    def __init__(self, monkeypatch):
        self.noise, self.gap, self.others = [], [], []
        sample, draw = layer_module.sample_ghost_batches, layer_module.GhostBatches.draw

        def record_noise(*args):
            by_sampling = sample(*args)
            methods = {name: spec.meter.sampling for name, spec in layer_module.METHODS.items() if spec.meter.sampling}
            self.noise.append({name: by_sampling[sampling] for name, sampling in methods.items()})
            return by_sampling

        def record_gap(*args, shuffle):
            ghosts = draw(*args, shuffle=shuffle)
            if shuffle:
                self.others.append(ghosts)
            else:
                self.gap.append(ghosts.indices)
            return ghosts

        monkeypatch.setattr(layer_module, "sample_ghost_batches", record_noise)
        monkeypatch.setattr(layer_module.GhostBatches, "draw", record_gap)


def noise_of(x, tables, weighted):
    """Shift (m - μ)/σ and scale s²/σ² of each ghost batch, (R, C) each, from x (B, C, S).

    With `weighted`, each ghost batch is repeated once for each sample in it.
    """
    shift, scale = [], []
    for drawn in (row for table in tables for row in table.tolist()):
        one_shift, one_scale = [], []
        for channel in range(x.shape[1]):
            batch = x[:, channel].flatten().numpy()
            ghost = np.concatenate([x[sample, channel].numpy() for sample in drawn])
            var = np.mean((batch - batch.mean()) ** 2)
            one_shift.append((ghost.mean() - batch.mean()) / np.sqrt(var))
            one_scale.append(np.mean((ghost - ghost.mean()) ** 2) / var)
        times = len(drawn) if weighted else 1
        shift += times * [one_shift]
        scale += times * [one_scale]
    return np.array(shift), np.array(scale)


def variance_fractions(x):
    """σ_I² and σ_B² of each channel of the normalized x (B, C, S)."""
    within, between = [], []
    for channel in range(x.shape[1]):
        values = x[:, channel].numpy()
        hat = (values - values.mean()) / np.sqrt(np.mean((values - values.mean()) ** 2))
        positions = hat.shape[1]
        means = [sample.mean() for sample in hat]
        inside = np.mean([np.mean((sample - sample.mean()) ** 2) for sample in hat])
        around = np.mean((np.array(means) - np.mean(means)) ** 2)
        within.append(positions / (positions - 1) * inside if positions > 1 else 0.0)
        between.append(around - inside / (positions - 1) if positions > 1 else around)
    return np.array(within), np.array(between)


def assert_histogram(distribution, values, rounding):
    """Check that the histogram contains all values, each in a bin that is right up to an error of `rounding`."""
    assert (distribution.n == len(values)).all()
    for channel, counts in enumerate(distribution.counts):
        below = counts.cumsum()[:-1]
        for edge, number in zip(distribution.edges, below, strict=True):
            at_least = (values[:, channel] < edge - rounding).sum()
            at_most = (values[:, channel] < edge + rounding).sum()
            assert at_least <= number <= at_most

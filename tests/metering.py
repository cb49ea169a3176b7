"""What a meter should read, as deliberately naive loops over samples, channels and draws, in float64.

Written from the definitions, and independent of the library: no per-sample moments, no pooling formulas.
"""

import numpy as np
import torch
from torch import nn

from ghostnoise.meter import Meter
from ghostnoise.meter import layer as measured_layer


def measure(batches, ghost_size, channel_dim=1, **options):
    """What a meter reads of these tensors as a module's input."""
    model = nn.Sequential(nn.Identity())
    with Meter(model, ghost_size, modules="0", side="input", channel_dim=channel_dim, **options) as meter:
        for x in batches:
            model(x)
    return meter.result()["0"]


def through(model, batches, ghost_size=4, **options):
    """What a meter reads in the layers of a model."""
    with torch.no_grad(), Meter(model, ghost_size, **options) as meter:
        for x in batches:
            model(x)
    return meter.result()


class Spy:
    """Keeps the tables of drawn samples: by batch those of the noise, and those of the gap."""

    def __init__(self, monkeypatch):
        self.noise, self.gap = [], []
        drawn, outputs = measured_layer._drawn, measured_layer.outputs

        def keep_noise(*args):
            self.noise.append(drawn(*args))
            return self.noise[-1]

        def keep_gap(*args):
            self.gap.append(args[-1])
            return outputs(*args)

        monkeypatch.setattr(measured_layer, "_drawn", keep_noise)
        monkeypatch.setattr(measured_layer, "outputs", keep_gap)


def noise_of(x, tables, weighted):
    """Shift (m - μ)/σ and scale s²/σ² of each ghost batch, (R, C) each, from x (B, C, S).

    `weighted` has each as often as there are samples in it.
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


def shares_of(x):
    """σ_I² and σ_B² of each channel of x̂, from x (B, C, S)."""
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


def assert_counted(found, values, rounding):
    """The histogram has all values, in bins that they fall into by any number within `rounding`."""
    assert (found.n == len(values)).all()
    for channel, counts in enumerate(found.counts):
        below = counts.cumsum()[:-1]
        for edge, number in zip(found.edges, below, strict=True):
            surely = (values[:, channel] < edge - rounding).sum()
            perhaps = (values[:, channel] < edge + rounding).sum()
            assert surely <= number <= perhaps

"""Measure how strong ghost noise is in each layer and channel, which law it follows, and how training and inference
differ.

>>> import torch
>>> from torch import nn
>>> from ghostnoise.meter import Meter
>>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
>>> with torch.no_grad(), Meter(model, ghost_size=32) as meter:
...     _ = model(torch.randn(64, 3, 8, 8))
>>> reading = meter.result()
>>> reading
Reading(1 layer, 8 channels, ghost_size=32, batches=1, samples=64)
>>> reading["1"].effective_size("shift").shape
(8,)
"""

from ghostnoise.meter.advice import Advice, advise
from ghostnoise.meter.gap import Gap
from ghostnoise.meter.meter import Meter
from ghostnoise.meter.reading import Distribution, LayerReading, NoiseReading, Reading

__all__ = ["Advice", "Distribution", "Gap", "LayerReading", "Meter", "NoiseReading", "Reading", "advise"]


def __dir__() -> list[str]:
    return __all__

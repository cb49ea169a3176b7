"""How strong ghost noise is in each layer and channel of a model, what law it follows, and how far training is from
inference.

>>> import torch
>>> from torch import nn
>>> from ghostnoise.meter import Meter
>>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
>>> with torch.no_grad(), Meter(model, ghost_size=32) as meter:
...     _ = model(torch.randn(64, 3, 8, 8))
>>> layer = meter.result()["1"]
>>> layer.effective_size("shift").shape
(8,)
"""

from ghostnoise.meter.advice import Advice, advise
from ghostnoise.meter.gap import Gap
from ghostnoise.meter.histogram import Distribution
from ghostnoise.meter.meter import Meter
from ghostnoise.meter.reading import LayerReading, Noise, Reading

__all__ = ["Advice", "Distribution", "Gap", "LayerReading", "Meter", "Noise", "Reading", "advise"]

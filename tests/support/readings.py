"""Small readings of the noise in real layers, for tests of reports."""

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from ghostnoise.meter import Meter

NASTY = """</script><img src='x' onerror="alert(2)">&amp;$x_{1}$[red]"""


class Named(nn.Sequential):
    """Modules with arbitrary names."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@cache
def connected(seed=0, ghost_size=8, names=("first", "second")):
    """Measure a perceptron with normally distributed input."""
    torch.manual_seed(seed)
    layers = {name: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for name in names}
    return _measure(Named(**layers), torch.randn(4, 64, 6), ghost_size)


@cache
def convolutional(layers=2, seed=0, ghost_size=8):
    """Measure batch norms on 5 x 5 images."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(layers)))
    return _measure(model, torch.randn(3, 32, 4, 5, 5), ghost_size)


def constant(layer):
    """Return a layer of a digest as if nothing in it had varied."""
    components = {
        name: replace(each, counts=0 * each.counts, var=each.var * float("nan"))
        for name, each in layer.components.items()
    }
    return replace(layer, components=components, row={name: _unknown(value) for name, value in layer.row.items()})


def _unknown(value):
    return float("nan") if isinstance(value, float) else value


def _measure(model, batches, ghost_size):
    with torch.no_grad(), Meter(model, ghost_size, draws=64) as meter:
        for batch in batches:
            model(batch)
    return meter.result()


def record(folder, **readings):
    """Write readings into a run folder as a run does; `e12` is the reading of epoch 12."""
    (folder / "noise").mkdir(exist_ok=True)
    for name, reading in readings.items():
        reading.save(folder / "noise" / f"epoch-{int(name[1:]):04}.npz")

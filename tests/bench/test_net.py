import torch
from torch import nn

from ghostnoise.bench import net
from ghostnoise.bench.settings import Settings
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings


def test_the_rows_are_the_promised_ones():
    rows, _ = net.plan(Settings("net", torch.device("cpu")))
    assert [(row.name, row.model.name, row.model.width, row.shape) for row in rows] == [
        ("resnet-20 batch 128 contiguous", "resnet20", None, (128, 3, 32, 32)),
        ("resnet-18 batch 32 contiguous", "resnet18", None, (32, 3, 32, 32)),
        ("resnet-20 batch 128 channels_last", "resnet20", None, (128, 3, 32, 32)),
        ("resnet-18 batch 32 channels_last", "resnet18", None, (32, 3, 32, 32)),
    ]


def test_a_step_trains():
    torch.manual_seed(0)
    model = models.build(ModelSettings(name="resnet20", width=2), NormSettings(method="bn"), (3, 8, 8), 10)
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    step = net.training_step(model, images, labels)
    before = nn.functional.cross_entropy(model(images), labels).item()
    for _ in range(20):
        step()
    assert nn.functional.cross_entropy(model(images), labels).item() < before

"""Small versions of the lab's networks, and all combinations of network, method and placement."""

import torch
from torch import nn

from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.methods import registry

SIGNALS = [name for name, network in models.CATALOG.items() if len(network.shape) == 2]
WIDTHS = dict.fromkeys(models.names(), 4) | {"simple-vit": 16, "convmixer": 8, "vit1d": 16, "convmixer1d": 8}
SHAPES = dict.fromkeys(models.names(), (3, 8, 8)) | dict.fromkeys(SIGNALS, (3, 16))
SHAPES["resnet50"] = (3, 64, 64)  # its last stage reduces the sides by 32
PAPER = {"agni": {}, "dropout": {"p": 0.3}, "eagn": {"std": 0.2}}  # the example of agni is the law of convolutions
SETTINGS = {"none": {}} | {
    name: ({} if spec.ghost_size == "none" else {"ghost_size": 4}) | PAPER.get(name, spec.example)
    for name, spec in registry.specs().items()
}


def registered(method):
    return registry.specs()["bn" if method == "none" else method]


# Every network with every method and placement that it has, except noise that needs several positions, where the last
# stages have one at the shapes above.
CASES = [
    (name, method, place)
    for name, network in models.CATALOG.items()
    for method in network.methods
    for place in network.offered(method) or [None]
    if not (name == "mlp" or "resnet18" in name) or not registered(method).inserts
]


def norm(method, **more):
    return NormSettings(method=method, **SETTINGS[method], **more)


def baseline(name):
    """Return the method without noise, the baseline of a network."""
    return "bn" if models.CATALOG[name].normalization == "batch" else "none"


def build(name, method=None, place=None, shape=None, classes=5, seed=0, **more):
    torch.manual_seed(seed)
    model = ModelSettings(name=name, width=WIDTHS[name])
    return models.build(model, norm(method or baseline(name), placement=place, **more), shape or SHAPES[name], classes)


def images(batch_size=8, shape=(3, 8, 8)):
    return torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(0))


def batch(name):
    """Return eight images or signals for a network."""
    return images(8, SHAPES[name])


@torch.no_grad()
def trained(model):
    """Change every parameter and statistic from its initial value, as training would, and return the model."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        scale = parameter.std() if parameter.ndim > 1 else 0.3
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())

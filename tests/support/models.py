"""Small networks to convert."""

import inspect

import torch
from torch import nn

from ghostnoise.methods import registry

# The names that `convert` accepts for batch norms, each with the options that it needs.
SIZES = {
    name: ({} if spec.ghost_size == "none" else {"ghost_size": 4})
    | {
        option.name: spec.example[option.name]
        for option in spec.options
        if option.default is inspect.Parameter.empty or (option.name == "history" and option.name in spec.example)
    }
    for name, (spec, _) in registry.names().items()
    if spec.norm is not None
}


def images(batch_size=8):
    return torch.randn(batch_size, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def convolutional():
    """A network with a `BatchNorm2d` '1' and a `BatchNorm1d` '4.1'."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), head
    )


def trained():
    model = convolutional()
    for _ in range(3):
        model(images())
    nn.init.normal_(model[1].weight)
    return model


def tokens(batch_size=8):
    return torch.randn(batch_size, 5, 6, generator=torch.Generator().manual_seed(0))


def transformer():
    """A network without batch norm, with layer norms '0' and '3'."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2))


def state(model):
    """Return all that a conversion could change: classes, attributes, children, hooks and tensors."""
    return [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if not key.startswith("_")},
            *({key: id(value) for key, value in getattr(module, table).items()} for table in TABLES),
        )
        for name, module in model.named_modules()
    ]


TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_load_state_dict_pre_hooks",
)  # fmt: skip

"""Parts of a run as users write them: networks, data sets and optimizers, which settings name."""

import numpy as np
import torch
from torch import nn


def network(shape, classes, width=8, norm=True):
    """A perceptron with one hidden layer."""
    hidden = [nn.BatchNorm1d(width)] if norm else [nn.LayerNorm(width)]
    size = int(np.prod(shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, width), *hidden, nn.ReLU(), nn.Linear(width, classes))


def images(folder, split, count=120, classes=3):
    """Images of one brightness for each class."""
    labels = np.arange(count if split == "train" else count // 2) % classes
    noise = np.random.default_rng(split == "train").integers(0, 20, (len(labels), 2, 6, 6))
    return (noise + 60 * labels[:, None, None, None]).astype(np.uint8), labels


def signals(folder, split, kind="float64"):
    """Signals as tensors, of another type than the trainer's."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 2
    return torch.randn(90, 1, 12, generator=generator, dtype=getattr(torch, kind)) + labels[:, None, None], labels


def optimizer(groups, lr, beta=0.5):
    """Gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=lr, momentum=beta)


class Net(nn.Module):
    """A network as a class."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[-1], classes)

    def forward(self, x):
        """Classify the mean over all but the last dimension."""
        return self.layer(x.flatten(1, -2).mean(1))


NUMBER = 3

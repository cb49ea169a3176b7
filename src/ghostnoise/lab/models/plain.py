"""Networks without shortcuts: the MLP of the paper, and small convolutional networks for 8x8 images and for signals."""

import math

from torch import nn

from ghostnoise.lab.models.slots import Slots, Task


def mlp(slots: Slots, task: Task) -> nn.Sequential:
    """Build hidden layers of the given widths (linear, norm, ReLU) and a linear classifier."""
    inputs = math.prod(task.shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for width in task.widths:
        layers += [nn.Linear(inputs, width, bias=False), slots.norm(width, ndim=1), slots.activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, task.classes))


def digits_net(slots: Slots, task: Task) -> nn.Sequential:
    """Build three 3x3 convolutions with norm and ReLU, strides 1, 2 and 2, average pooling and a linear classifier.

    The placement "branch" is after the second norm, although the network has no residual branches.
    """
    channels, (width,) = task.shape[0], task.widths
    layers: list[nn.Module] = []
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        conv = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        layers += [conv, slots.norm(outputs), *([slots.branch()] if channels == width else []), slots.activation()]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, task.classes))


def conv1d(slots: Slots, task: Task, conv: type[nn.Conv1d] = nn.Conv1d) -> nn.Sequential:
    """Build three convolutions with norm and ReLU, kernels 5, 3 and 3, and stride 2, and a linear classifier.

    For signals (B, C, L). The placement "branch" is between each norm and ReLU.
    """
    (channels, length), (width,) = task.shape, task.widths
    layers: list[nn.Module] = []
    for kernel in (5, 3, 3):
        convolution = conv(channels, width, kernel, stride=2, padding=kernel // 2, bias=False)
        layers += [convolution, slots.norm(width, ndim=1), slots.branch(), slots.activation()]
        channels, length = width, -(-length // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * length, task.classes))

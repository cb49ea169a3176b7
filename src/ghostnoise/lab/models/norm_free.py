"""Normalizer-free ResNets (Brock et al., 2021) for small images and for signals. Modules have the names of timm."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ghostnoise.lab.models.slots import Slots, Task
from ghostnoise.methods.weight_standardization import WSConv1d, WSConv2d

ALPHA = 0.2  # a block adds ALPHA² to the variance
RELU_GAMMA = 1.7139588594436646  # the published value, from samples; the exact one is 1.7129: 1 / std(ReLU(N(0, 1)))


class NormFreeBlock(nn.Module):
    """A pre-activation bottleneck with a shortcut: x + alpha · gain · branch(beta · ReLU(x)).

    `beta` is the reciprocal of the standard deviation of x at initialization. The gain is initialized to 0 (SkipInit).
    """

    def __init__(self, slots: Slots, inputs: int, width: int, stride: int, beta: float, ndim: int = 2) -> None:
        super().__init__()
        self.beta = beta
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            average = nn.AvgPool1d if ndim == 1 else nn.AvgPool2d
            pool = average(2, 2, ceil_mode=True, count_include_pad=False) if stride == 2 else nn.Identity()
            self.downsample = nn.Sequential(OrderedDict(pool=pool, conv=convolution(inputs, 4 * width, 1, ndim=ndim)))
        self.act1, self.conv1 = slots.activation(), convolution(inputs, width, 1, ndim=ndim)
        self.act2, self.conv2 = slots.activation(), convolution(width, width, 3, stride, ndim)
        self.act3, self.conv3 = slots.activation(), convolution(width, 4 * width, 1, ndim=ndim)
        self.skipinit_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the shortcut, which starts after the activation if the shape changes."""
        y = self.act1(x) * self.beta
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv3(self.act3(self.conv2(self.act2(self.conv1(y)))))
        total: Tensor = shortcut + ALPHA * self.skipinit_gain * y
        return total


def norm_free_resnet(slots: Slots, task: Task, blocks: Sequence[int]) -> nn.Sequential:
    """Build a stem, stages of bottlenecks that double the channels, average pooling and a linear classifier."""
    (width,), ndim = task.widths, len(task.shape) - 1
    stages, inputs, variance = [], width, 1.0
    for stage, count in enumerate(blocks):
        members = []
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            members.append(NormFreeBlock(slots, inputs, width * 2**stage, stride, 1 / math.sqrt(variance), ndim))
            variance = (1 if index == 0 else variance) + ALPHA**2  # a shortcut after the activation has variance 1
            inputs = 4 * width * 2**stage
        stages.append(nn.Sequential(*members))
    fc = nn.Linear(inputs, task.classes)
    nn.init.normal_(fc.weight, 0, 0.01)
    nn.init.zeros_(fc.bias)
    stem = nn.Sequential(OrderedDict(conv=convolution(task.shape[0], width, 3, ndim=ndim)))
    pool = nn.AdaptiveAvgPool1d(1) if ndim == 1 else nn.AdaptiveAvgPool2d(1)
    head = nn.Sequential(OrderedDict(pool=pool, flatten=nn.Flatten(), fc=fc))
    return nn.Sequential(OrderedDict(stem=stem, stages=nn.Sequential(*stages), final_act=slots.activation(), head=head))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, ndim: int = 2) -> WSConv1d | WSConv2d:
    """Build a weight-standardized convolution with standard deviation gamma/sqrt(fan_in), a gain and a bias."""
    conv = (WSConv1d if ndim == 1 else WSConv2d)(inputs, outputs, kernel, stride, kernel // 2)
    nn.init.kaiming_normal_(conv.weight, mode="fan_in", nonlinearity="linear")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # never None here
    nn.init.constant_(conv.init_std, RELU_GAMMA / math.sqrt(inputs * kernel**ndim))
    return conv

"""ResNets with a norm after each convolution and the ReLU after the sum (He et al., 2016), and pre-activation ones.

Modules have the names of torchvision and timm, so that weights can be exchanged with both.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from ghostnoise.lab.models.slots import Slots, Task
from ghostnoise.methods.weight_standardization import WSConv2d


class Block(nn.Module):
    """A residual block. The shortcut is the identity, or a 1x1 convolution and a norm if the shape changes."""

    expansion = 1
    last_norm = "bn2"
    """The norm at the end of the branch; empty if it ends with a convolution."""
    preactivation = False
    """Whether norms and activations precede the convolutions."""

    def __init__(self, slots: Slots, conv: type[nn.Conv2d], inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.build(slots, conv, inputs, width, stride)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            shortcut = convolution(conv, inputs, outputs, 1, stride)
            layers = [slots.norm(inputs), shortcut] if self.preactivation else [shortcut, slots.norm(outputs)]
            self.downsample = nn.Sequential(*layers)
        self.act = nn.Identity() if self.preactivation else slots.activation()

    def build(self, slots: Slots, conv: type[nn.Conv2d], inputs: int, width: int, stride: int) -> None:
        """Build the branch: two 3x3 convolutions, the first with the stride."""
        self.conv1, self.bn1 = convolution(conv, inputs, width, 3, stride), slots.norm(width)
        self.act1 = slots.activation()
        self.conv2, self.bn2 = convolution(conv, width, width, 3), slots.norm(width)
        self.end = slots.branch()

    def branch(self, x: Tensor) -> Tensor:
        """Compute the residual branch."""
        x = self.act1(self.bn1(self.conv1(x)))
        y: Tensor = self.end(self.bn2(self.conv2(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Add branch and shortcut, and apply the activation."""
        y: Tensor = self.act(self.branch(x) + self.downsample(x))
        return y


class PreactBlock(Block):
    """A residual block whose norms and activations precede the convolutions, without activation after the sum.

    If the shape changes, the shortcut is a norm of its own and a 1x1 convolution, without activation, as in the paper's
    released code. Noise in the branch follows the second activation.
    """

    last_norm = ""
    preactivation = True

    def build(self, slots: Slots, conv: type[nn.Conv2d], inputs: int, width: int, stride: int) -> None:
        """Build the branch: two 3x3 convolutions, the first with the stride."""
        self.bn1, self.act1 = slots.norm(inputs), slots.activation()
        self.conv1 = convolution(conv, inputs, width, 3, stride)
        self.bn2, self.act2, self.end = slots.norm(width), slots.activation(), slots.branch()
        self.conv2 = convolution(conv, width, width, 3)

    def branch(self, x: Tensor) -> Tensor:
        """Compute the residual branch."""
        x = self.conv1(self.act1(self.bn1(x)))
        y: Tensor = self.conv2(self.end(self.act2(self.bn2(x))))
        return y


class Bottleneck(Block):
    """A residual block: a 1x1 convolution to a quarter of the channels, a 3x3 one with the stride, and a 1x1 one."""

    expansion = 4
    last_norm = "bn3"

    def build(self, slots: Slots, conv: type[nn.Conv2d], inputs: int, width: int, stride: int) -> None:
        """Build the branch."""
        self.conv1, self.bn1 = convolution(conv, inputs, width, 1), slots.norm(width)
        self.act1 = slots.activation()
        self.conv2, self.bn2 = convolution(conv, width, width, 3, stride), slots.norm(width)
        self.end, self.act2 = slots.branch(), slots.activation()
        self.conv3, self.bn3 = convolution(conv, width, 4 * width, 1), slots.norm(4 * width)

    def branch(self, x: Tensor) -> Tensor:
        """Compute the residual branch."""
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.end(self.bn2(self.conv2(x))))
        y: Tensor = self.bn3(self.conv3(x))
        return y


def resnet(
    slots: Slots,
    task: Task,
    blocks: Sequence[int],
    block: type[Block] = Block,
    conv: type[nn.Conv2d] = nn.Conv2d,
    large: bool = False,
    weight_std: Literal["init", "fan_in"] = "init",
) -> nn.Sequential:
    """Build a stem, stages that double the channels and halve the image, average pooling and a linear classifier.

    The first stage keeps the size of the image. The stem is a 3x3 convolution, or for `large` images a 7x7 convolution
    with stride 2 and max pooling. With pre-activation blocks, the norm and the activation of the stem are at the end of
    the last stage. `weight_std` is that of weight-standardized convolutions; see `initialize`.
    """
    channels, (width,) = task.shape[0], task.widths
    stem = convolution(conv, channels, width, 7, 2) if large else convolution(conv, channels, width, 3)
    layers: list[tuple[str, nn.Module]] = [("conv1", stem)]
    if not block.preactivation:
        layers += [("bn1", slots.norm(width)), ("act1", slots.activation())]
    if large:
        layers.append(("maxpool", nn.MaxPool2d(3, 2, padding=1)))
    inputs = width
    for stage, count in enumerate(blocks):
        members = []
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            members.append(block(slots, conv, inputs, width * 2**stage, stride))
            inputs = width * 2**stage * block.expansion
        layers.append((f"layer{stage + 1}", nn.Sequential(*members)))
    if block.preactivation:
        layers += [("bn1", slots.norm(inputs)), ("act1", slots.activation())]
    head = [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inputs, task.classes))]
    model = nn.Sequential(OrderedDict([*layers, *head]))
    initialize(model, weight_std)
    return model


def convolution(conv: type[nn.Conv2d], inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution without bias, padded to keep the size of the image at stride 1."""
    return conv(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def initialize(model: nn.Module, weight_std: Literal["init", "fan_in"] = "init") -> None:
    """Initialize convolutions with N(0, 2/fan_out), and set the standard deviation of weight-standardized ones.

    It is that of the initialization, or with "fan_in" 1/sqrt(fan_in), as in the paper's released code.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(layer, WSConv2d):
            variance = 2 / (layer.out_channels * math.prod(layer.kernel_size))
            if weight_std == "fan_in":
                variance = 1 / math.prod(layer.weight.shape[1:])
            nn.init.constant_(layer.init_std, math.sqrt(variance))


def zero_init_last(model: nn.Module) -> bool:
    """Set the weight of the last norm of each residual branch to 0; return whether the network has such norms."""
    blocks = [module for module in model.modules() if isinstance(module, Block) and module.last_norm]
    for block in blocks:
        nn.init.zeros_(getattr(block, block.last_norm).weight)
    return bool(blocks)

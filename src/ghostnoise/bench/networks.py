"""Residual networks for CIFAR-sized images, with any normalization: what a training step is measured on."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def resnet20(norm: Norm, width: int = 16) -> nn.Sequential:
    """Three stages of three blocks, of 16, 32 and 64 channels: 0.27 million weights."""
    return resnet(norm, (width, 2 * width, 4 * width), blocks=3)


def resnet18(norm: Norm, width: int = 64) -> nn.Sequential:
    """Four stages of two blocks, of 64 to 512 channels, and a stem for small images: 11 million weights."""
    return resnet(norm, (width, 2 * width, 4 * width, 8 * width), blocks=2)


def resnet(norm: Norm, widths: Sequence[int], blocks: int, classes: int = 10) -> nn.Sequential:
    """Stem, stages that halve the image from the second on, mean over positions, linear classifier."""
    layers: list[nn.Module] = [convolution(3, widths[0], norm), nn.ReLU()]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(channels, width, 2 if stage > 0 and block == 0 else 1, norm))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def convolution(inputs: int, outputs: int, norm: Norm, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    """A convolution that keeps the size of the image at stride 1, and its normalization."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), norm(outputs))


class Block(nn.Module):
    """Two convolutions beside a shortcut: the identity, or a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(inputs, outputs, norm, stride), nn.ReLU(), convolution(outputs, outputs, norm)
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, norm, stride, kernel=1) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add both, then clip."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out.relu()

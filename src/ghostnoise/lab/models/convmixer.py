"""ConvMixer (Trockman and Kolter, 2022): alternating depthwise and 1x1 convolutions, with GELU and batch norm.

Modules have the names of timm.
"""

from collections import OrderedDict

from torch import Tensor, nn

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.slots import Slots, Task

DEPTH, KERNEL, PATCH = 8, 5, 2


class Residual(nn.Module):
    """A residual connection: x + fn(x)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        """Add `fn(x)` to x."""
        y: Tensor = x + self.fn(x)
        return y


def convmixer(slots: Slots, task: Task) -> nn.Sequential:
    """Build a patch embedding, blocks of a residual depthwise and a 1x1 convolution, pooling, and a classifier."""
    (channels, height, across), (width,) = task.shape, task.widths
    if height % PATCH or across % PATCH:
        raise UserError(
            f"images of {height}x{across}: convmixer needs multiples of its patch size, {PATCH}; resize them, or use "
            "another network"
        )

    def activated(conv: nn.Conv2d) -> list[nn.Module]:
        return [conv, slots.activation(nn.GELU), slots.norm(width)]

    stem = nn.Sequential(*activated(nn.Conv2d(channels, width, PATCH, PATCH)))
    blocks = [
        nn.Sequential(
            Residual(nn.Sequential(*activated(nn.Conv2d(width, width, KERNEL, padding="same", groups=width)))),
            *activated(nn.Conv2d(width, width, 1)),
        )
        for _ in range(DEPTH)
    ]
    pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(width, task.classes)
    return nn.Sequential(OrderedDict(stem=stem, blocks=nn.Sequential(*blocks), pooling=pooling, head=head))

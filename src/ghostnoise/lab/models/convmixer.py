"""ConvMixer (Trockman and Kolter, 2022): convolutions over positions and over channels in turn, GELU, batch norm.

Modules are named as in timm.
"""

from collections import OrderedDict

from torch import Tensor, nn

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.slots import Slots, Task

DEPTH, KERNEL, PATCH = 8, 5, 2


class Residual(nn.Module):
    """Add what `fn` makes of x to x."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        y: Tensor = x + self.fn(x)
        return y


def convmixer(slots: Slots, task: Task) -> nn.Sequential:
    """Patches, blocks of a depthwise convolution beside a shortcut and a 1x1 one, mean, linear classifier."""
    (channels, height, across), (width,) = task.shape, task.widths
    if height % PATCH or across % PATCH:
        raise UserError(
            f"images of {height}x{across}: convmixer takes sizes that are multiples of its patch, {PATCH}; resize "
            "them, or take another network"
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

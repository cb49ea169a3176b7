"""ConvMixer (Trockman and Kolter, 2022): alternating depthwise and 1x1 convolutions, with GELU and batch norm.

Modules have the names of timm.
"""

from collections import OrderedDict

from torch import Tensor, nn

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.slots import Slots, Task

KERNEL, PATCH = 5, 2


class Residual(nn.Module):
    """A residual connection: x + fn(x)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        """Add `fn(x)` to x."""
        y: Tensor = x + self.fn(x)
        return y


def convmixer(slots: Slots, task: Task, depth: int) -> nn.Sequential:
    """Build a patch embedding, blocks of a residual depthwise and a 1x1 convolution, pooling, and a classifier.

    For images or signals.
    """
    (channels, *positions), (width,) = task.shape, task.widths
    if any(size % PATCH for size in positions):
        raise UserError(
            f"inputs of {'x'.join(map(str, positions))}: a ConvMixer needs multiples of its patch size, {PATCH}; "
            "resize them, or use another network"
        )
    conv = nn.Conv1d if len(positions) == 1 else nn.Conv2d
    pool = nn.AdaptiveAvgPool1d if len(positions) == 1 else nn.AdaptiveAvgPool2d

    def activated(convolution: nn.Module) -> list[nn.Module]:
        return [convolution, slots.activation(nn.GELU), slots.norm(width, len(positions))]

    stem = nn.Sequential(*activated(conv(channels, width, PATCH, PATCH)))
    blocks = [
        nn.Sequential(
            Residual(nn.Sequential(*activated(conv(width, width, KERNEL, padding="same", groups=width)))),
            *activated(conv(width, width, 1)),
        )
        for _ in range(depth)
    ]
    pooling = nn.Sequential(pool(1), nn.Flatten())
    head = nn.Linear(width, task.classes)
    return nn.Sequential(OrderedDict(stem=stem, blocks=nn.Sequential(*blocks), pooling=pooling, head=head))

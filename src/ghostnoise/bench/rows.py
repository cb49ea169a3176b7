"""The inputs that layers are measured on: shapes and memory formats."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ghostnoise.bench.settings import Settings

IMAGES = ((256, 64, 32, 32), (256, 128, 16, 16), (256, 256, 8, 8), (256, 512, 4, 4))
FEATURES = ((1024, 1024), (256, 512))
SMALL = (64, 8, 4, 4)  # its time is the fixed cost of a call
TOKENS = (256, 64, 512)
QUICK = ((64, 8, 4, 4), (64, 16), (64, 4, 16))


@dataclass(frozen=True)
class Row:
    """Images (B, C, H, W), features (B, C), or tokens (B, T, C)."""

    shape: tuple[int, ...]
    memory_format: str = "contiguous"
    fixed_cost: bool = False

    @property
    def size(self) -> str:
        """Return the shape as text."""
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """Return the name of the row in tables."""
        return f"{self.size} {self.memory_format}" if self.images else self.size

    @property
    def images(self) -> bool:
        """Return whether x is (B, C, H, W)."""
        return len(self.shape) == 4

    @property
    def tokens(self) -> bool:
        """Return whether x is (B, T, C), with the channels last."""
        return len(self.shape) == 3

    @property
    def channels(self) -> int:
        """Return the number of channels."""
        return self.shape[-1 if self.tokens else 1]

    @property
    def ghost_size(self) -> int:
        """Return the ghost size of all methods: 32, or the paper's 12 for tokens."""
        return 12 if self.tokens else 32

    def baseline(self) -> tuple[str, Callable[[int], nn.Module]]:
        """Return the name and the class of the layer of `torch.nn` that the row is compared with."""
        if self.tokens:
            return "nn.LayerNorm", nn.LayerNorm
        return ("nn.BatchNorm2d", nn.BatchNorm2d) if self.images else ("nn.BatchNorm1d", nn.BatchNorm1d)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw x, with mean 1 and standard deviation 2, and the gradient of y; always the same numbers."""
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(self.shape, generator=generator).to(device) for _ in range(2))
        form = torch.channels_last if self.memory_format == "channels_last" else torch.contiguous_format
        x = (1 + 2 * x).contiguous(memory_format=form)
        return x.requires_grad_(), dy.contiguous(memory_format=form)


def rows(settings: Settings) -> list[Row]:
    """Return the selected rows."""
    shapes = QUICK if settings.quick else (*IMAGES, *FEATURES, TOKENS)
    formats = [form for form in ("contiguous", "channels_last") if form in settings.formats]
    every = [Row(shape, form) for form in formats for shape in shapes if len(shape) == 4]
    every += [Row(shape) for shape in shapes if len(shape) != 4]
    every += [] if settings.quick else [Row(SMALL, fixed_cost=True)]
    return [row for row in every if settings.selects(row.name)]

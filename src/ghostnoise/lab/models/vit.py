"""Simple ViT (Beyer et al., 2022): a vision transformer with fixed position embeddings and mean pooling."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.slots import Slots, Task

DEPTH, HEADS, PATCH = 6, 16, 4


class Patches(nn.Module):
    """Split images (B, C, H, W) into patches (B, T, P·P·C), row by row."""

    def forward(self, x: Tensor) -> Tensor:
        """Split the images."""
        samples, channels, height, width = x.shape
        patches = x.reshape(samples, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return patches.permute(0, 2, 4, 3, 5, 1).reshape(samples, -1, PATCH * PATCH * channels)


class Attention(nn.Module):
    """Layer norm and multi-head self-attention; the heads together have twice the width."""

    def __init__(self, slots: Slots, width: int) -> None:
        super().__init__()
        self.norm = slots.norm(width)
        self.to_qkv = nn.Linear(width, 3 * 2 * width, bias=False)
        self.to_out = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply self-attention."""
        query, key, value = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        y: Tensor = self.to_out(attended.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    """A transformer layer: attention and an MLP with twice the width, each with a residual connection."""

    def __init__(self, slots: Slots, width: int) -> None:
        super().__init__()
        self.attention = Attention(slots, width)
        self.perceptron = nn.Sequential(
            slots.norm(width), nn.Linear(width, 2 * width), slots.activation(nn.GELU), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP."""
        x = x + self.attention(x)
        y: Tensor = x + self.perceptron(x)
        return y


class SimpleViT(nn.Module):
    """Patch embedding with a norm before and after it, positions, layers, a norm, mean pooling, linear classifier."""

    positions: Tensor

    def __init__(self, slots: Slots, task: Task) -> None:
        super().__init__()
        (channels, height, across), (width,) = task.shape, task.widths
        if height % PATCH or across % PATCH:
            raise UserError(
                f"images of {height}x{across}: simple-vit needs multiples of its patch size, {PATCH}; "
                "resize them, or use a convolutional network"
            )
        if width % 8:
            raise UserError(
                f"model.width={width}: simple-vit needs a multiple of 8, for {HEADS} heads and 4 parts of the position "
                f"embedding; try {max(8, round(width / 8) * 8)}"
            )
        patch = PATCH * PATCH * channels
        self.embedding = nn.Sequential(Patches(), slots.norm(patch), nn.Linear(patch, width), slots.norm(width))
        self.register_buffer("positions", positions(height // PATCH, across // PATCH, width), persistent=False)
        self.layers = nn.Sequential(*(Layer(slots, width) for _ in range(DEPTH)))
        self.norm = slots.norm(width)
        self.head = nn.Linear(width, task.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores of the classes."""
        x = self.layers(self.embedding(x) + self.positions)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


def positions(rows: int, columns: int, width: int) -> Tensor:
    """Return sines and cosines of both coordinates at width/4 frequencies from 1 to 1/10000, (rows·columns, width)."""
    frequency = 10_000 ** -torch.linspace(0, 1, width // 4)
    y, x = (torch.outer(torch.arange(size).float(), frequency) for size in (rows, columns))
    y, x = y.repeat_interleave(columns, 0), x.repeat(rows, 1)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1)

"""Simple ViT (Beyer et al., 2022): a vision transformer with fixed position embeddings and mean pooling.

It also takes signals, as images with one row.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models.slots import Slots, Task

PATCH = 4


class Patches(nn.Module):
    """Split images (B, C, H, W) into patches (B, T, P·P·C), row by row, or signals (B, C, L) into (B, T, P·C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Split the images or signals."""
        if x.ndim == 3:
            samples, channels, length = x.shape
            return x.reshape(samples, channels, length // PATCH, PATCH).permute(0, 2, 3, 1).flatten(2)
        samples, channels, height, width = x.shape
        patches = x.reshape(samples, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return patches.permute(0, 2, 4, 3, 5, 1).reshape(samples, -1, PATCH * PATCH * channels)


class Attention(nn.Module):
    """Layer norm and multi-head self-attention; the heads together have twice the width."""

    def __init__(self, slots: Slots, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = slots.norm(width)
        self.to_qkv = nn.Linear(width, 3 * 2 * width, bias=False)
        self.to_out = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply self-attention."""
        query, key, value = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        y: Tensor = self.to_out(attended.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    """A transformer layer: attention and an MLP with twice the width, each with a residual connection."""

    def __init__(self, slots: Slots, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(slots, width, heads)
        self.perceptron = nn.Sequential(
            slots.norm(width), nn.Linear(width, 2 * width), slots.activation(nn.GELU), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP."""
        x = x + self.attention(x)
        y: Tensor = x + self.perceptron(x)
        return y


class SimpleViT(nn.Module):
    """Patch embedding with a norm before and after it, positions, layers, a norm, mean pooling, linear classifier.

    For signals, there is no norm before the embedding.
    """

    positions: Tensor

    def __init__(self, slots: Slots, task: Task, depth: int, heads: int) -> None:
        super().__init__()
        (channels, *sizes), (width,) = task.shape, task.widths
        if any(size % PATCH for size in sizes):
            raise UserError(
                f"inputs of {'x'.join(map(str, sizes))}: the transformer needs multiples of its patch size, {PATCH}; "
                "resize them, or use a convolutional network"
            )
        if width % 8:
            raise UserError(
                f"model.width={width}: the transformer needs a multiple of 8, for {heads} heads and 4 parts of the "
                f"position embedding; try {max(8, round(width / 8) * 8)}"
            )
        patch = channels * PATCH ** len(sizes)
        # A norm over the few values of a signal's patch would remove most of its information.
        first = slots.norm(patch) if len(sizes) == 2 else nn.Identity()
        self.embedding = nn.Sequential(Patches(), first, nn.Linear(patch, width), slots.norm(width))
        self.register_buffer("positions", positions([size // PATCH for size in sizes], width), persistent=False)
        self.layers = nn.Sequential(*(Layer(slots, width, heads) for _ in range(depth)))
        self.norm = slots.norm(width)
        self.head = nn.Linear(width, task.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores of the classes."""
        x = self.layers(self.embedding(x) + self.positions)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


def positions(sizes: Sequence[int], width: int) -> Tensor:
    """Return sines and cosines of the column, then of the row if there are rows, (positions, width).

    Each coordinate has frequencies from 1 to 1/10000.
    """
    frequency = 10_000 ** -torch.linspace(0, 1, width // (2 * len(sizes)))
    coordinates = torch.meshgrid(*(torch.arange(size).float() for size in sizes), indexing="ij")
    angles = [torch.outer(each.flatten(), frequency) for each in reversed(coordinates)]
    return torch.cat([part for each in angles for part in (each.sin(), each.cos())], 1)

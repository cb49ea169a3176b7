"""From stored pixels to what a network sees: random crops and flips of whole batches, then normalization."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise.lab.data.draws import Purpose, words


class Moves(NamedTuple):
    """For each image of a batch: where its crop begins in the padded image, and whether it is flipped."""

    top: Tensor
    left: Tensor
    flip: Tensor


def draw_moves(count: int, padding: int, seed: int, epoch: int, step: int) -> Moves:
    """Uniform moves for a batch of `count` images, on the CPU."""
    drawn = words(count, seed, Purpose.AUGMENT, epoch, step)
    places = np.uint64(2 * padding + 1)
    top = ((drawn >> np.uint64(32) & np.uint64(2**31 - 1)) * places) >> np.uint64(31)
    left = ((drawn & np.uint64(2**32 - 1)) * places) >> np.uint64(32)
    flip = drawn >> np.uint64(63)
    return Moves(*(torch.from_numpy(each.astype(np.int64)) for each in (top, left, flip)))


class Pixels:
    """Images in uint8 on a device, in the memory order of their batches, with room around them for crops."""

    def __init__(self, images: Tensor, device: torch.device, channels_last: bool = False, padding: int = 0) -> None:
        """Keep `images` (N, C, H, W) with `padding` black pixels on each side."""
        height, width = images.shape[-2:]
        stored = F.pad(images, [padding] * 4) if padding else images
        rows = 1 if channels_last else 2
        stored = (stored.permute(0, 2, 3, 1) if channels_last else stored).contiguous().to(device)
        # (N, top, left, then an image in memory order): a view, and an index into it is a crop
        windows = stored.unfold(rows, height, 1).unfold(rows + 1, width, 1)
        self._windows = windows.permute(0, 1, 2, 4, 5, 3) if channels_last else windows.permute(0, 2, 3, 1, 4, 5)
        self._width = 2 if channels_last else 3
        self._padding = padding

    def plain(self, rows: Tensor | slice) -> Tensor:
        """The images of `rows` as they are, in memory order."""
        middle = self._windows[:, self._padding, self._padding]
        return middle[rows] if isinstance(rows, slice) else middle.index_select(0, rows)

    def moved(self, rows: Tensor, moves: Moves) -> Tensor:
        """The images of `rows`, cropped and then flipped (flipped first, the distribution is the same)."""
        top, left, flip = (each.to(rows.device) for each in moves)
        crops = self._windows[rows, top, left].contiguous()
        return torch.where(flip.bool()[:, None, None, None], crops.flip(self._width), crops)


class Normalization:
    """Turns images in uint8 into float32 with the set's mean 0 and standard deviation 1 in each channel."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        def constant(values: list[float]) -> Tensor:
            # A whole image, not a value per channel: with 3 channels last, broadcasting would work on 3 numbers a time.
            image = torch.tensor(values, dtype=torch.float64).float()[:, None, None].expand(shape)
            return (image.permute(1, 2, 0) if channels_last else image).contiguous().to(device)

        self._shift = constant([255 * value for value in mean])
        self._scale = constant([1 / (255 * value) for value in std])
        self._channels_last = channels_last

    def __call__(self, pixels: Tensor) -> Tensor:
        """Images (B, C, H, W) from `pixels`, which are in memory order: (B, H, W, C) if channels are last."""
        # Two roundings for each pixel, wherever it stands: a fused multiply-add may round otherwise at a tensor's end.
        images = pixels.to(torch.float32).sub_(self._shift).mul_(self._scale)
        return images.permute(0, 3, 1, 2) if self._channels_last else images

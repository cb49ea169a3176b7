"""Data sets that fit into the memory of the device: random crops and flips of whole batches, and normalization."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ghostnoise.lab.data.catalog import Entry
from ghostnoise.lab.data.files import Arrays
from ghostnoise.lab.data.source import Batch, DatasetInfo, Indices, Purpose, Shard, permutation, random_words


class Images(NamedTuple):
    """Pixels (N, C, H, W) in uint8, or signals (N, C, L) in float32, and labels (N,) in int64."""

    pixels: Tensor
    labels: Tensor


def select(arrays: Arrays, indices: Indices) -> Images:
    """Return a copy of the images at `indices` as tensors."""
    return Images(torch.from_numpy(arrays.pixels[indices]), torch.from_numpy(arrays.labels[indices]))


class Crops(NamedTuple):
    """For each image of a batch: the position of its crop in the padded image, and whether it is flipped."""

    top: Tensor
    left: Tensor
    flip: Tensor


def draw_crops(count: int, padding: int, seed: int, epoch: int, step: int) -> Crops:
    """Draw uniform crops and flips for a batch of `count` images, on the CPU."""
    drawn = random_words(count, seed, Purpose.AUGMENT, epoch, step)
    positions = np.uint64(2 * padding + 1)
    top = ((drawn >> np.uint64(32) & np.uint64(2**31 - 1)) * positions) >> np.uint64(31)
    left = ((drawn & np.uint64(2**32 - 1)) * positions) >> np.uint64(32)
    flip = drawn >> np.uint64(63)
    return Crops(*(torch.from_numpy(each.astype(np.int64)) for each in (top, left, flip)))


class PaddedImages:
    """Images in uint8 on a device, in the memory order of their batches, with padding for random crops."""

    def __init__(self, images: Tensor, device: torch.device, channels_last: bool = False, padding: int = 0) -> None:
        """Store `images` (N, C, H, W) with `padding` black pixels on each side."""
        height, width = images.shape[-2:]
        stored = F.pad(images, [padding] * 4) if padding else images
        rows = 1 if channels_last else 2
        stored = (stored.permute(0, 2, 3, 1) if channels_last else stored).contiguous().to(device)
        # A view (N, top, left, then an image in memory order): indexing it returns crops.
        windows = stored.unfold(rows, height, 1).unfold(rows + 1, width, 1)
        self._windows = windows.permute(0, 1, 2, 4, 5, 3) if channels_last else windows.permute(0, 2, 3, 1, 4, 5)
        self._width = 2 if channels_last else 3
        self._padding = padding

    def uncropped(self, indices: Tensor | slice) -> Tensor:
        """Return the images at `indices` without padding, in memory order."""
        center = self._windows[:, self._padding, self._padding]
        return center[indices] if isinstance(indices, slice) else center.index_select(0, indices)

    def cropped(self, indices: Tensor, crops: Crops) -> Tensor:
        """Return the images at `indices`, cropped and then flipped (the reverse order has the same distribution)."""
        top, left, flip = (each.to(indices.device) for each in crops)
        images = self._windows[indices, top, left].contiguous()
        return torch.where(flip.bool()[:, None, None, None], images.flip(self._width), images)


class Signals:
    """Values in float32 on a device, which batches contain as they are."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self._values = values.to(device)

    def uncropped(self, indices: Tensor | slice) -> Tensor:
        """Return a copy of the values at `indices`."""
        return self._values[indices].clone() if isinstance(indices, slice) else self._values.index_select(0, indices)


class Normalization:
    """Converts images from uint8 to float32, and normalizes each channel with the constants of the data set."""

    def __init__(
        self,
        shape: tuple[int, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        def constant(values: list[float]) -> Tensor:
            # A full image instead of one value per channel: with channels last, broadcasting would work on 3 values at
            # a time.
            image = torch.tensor(values, dtype=torch.float64).float()[:, None, None].expand(shape)
            return (image.permute(1, 2, 0) if channels_last else image).contiguous().to(device)

        self._shift = constant([255 * value for value in mean])
        self._scale = constant([1 / (255 * value) for value in std])
        self._channels_last = channels_last

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return images (B, C, H, W) from `pixels` in memory order, which is (B, H, W, C) for channels last."""
        # Exactly two roundings per pixel: a fused multiply-add could round differently at the end of a tensor.
        images = pixels.to(torch.float32).sub_(self._shift).mul_(self._scale)
        return images.permute(0, 3, 1, 2) if self._channels_last else images


class InMemorySource:
    """A source with all images in the memory of the device, which crops, flips and normalizes them batch by batch."""

    def __init__(
        self,
        entry: Entry,
        train: Images,
        held_out: Images,
        shard: Shard,
        seed: int,
        device: torch.device,
        channels_last: bool = False,
        padding: int | None = None,
    ) -> None:
        """`padding` is that of random crops with flips; None disables both."""
        self.info = DatasetInfo(entry.shape, entry.classes, len(train.labels), len(held_out.labels))
        self.steps = shard.steps(self.info.train_size)
        self._shard, self._seed, self._padding = shard, seed, padding
        self._train: PaddedImages | Signals
        self._held_out: PaddedImages | Signals
        self._normalize: Callable[[Tensor], Tensor]
        if train.pixels.dtype == torch.uint8:
            self._train = PaddedImages(train.pixels, device, channels_last, padding or 0)
            self._held_out = PaddedImages(held_out.pixels, device, channels_last)
            self._normalize = Normalization(entry.shape, entry.mean, entry.std, device, channels_last)
        else:
            self._train, self._held_out = Signals(train.pixels, device), Signals(held_out.pixels, device)
            self._normalize = _unchanged
        self._train_labels, self._held_out_labels = train.labels.to(device), held_out.labels.to(device)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's part of the training batches of an epoch, from step `start`."""
        shuffled = torch.from_numpy(permutation(self.info.train_size, self._seed, Purpose.EPOCH, epoch))
        shuffled = shuffled.to(self._train_labels.device)
        for step in range(start, self.steps):
            indices = shuffled[self._shard.step_slice(step)]
            yield self._normalize(self._augment(indices, epoch, step)), self._train_labels[indices]

    def evaluation(self) -> Iterator[Batch]:
        """Iterate over this rank's part of the held-out images, without augmentation."""
        for indices in self._shard.evaluation_slices(self.info.eval_size):
            yield self._normalize(self._held_out.uncropped(indices)), self._held_out_labels[indices].clone()

    def _augment(self, indices: Tensor, epoch: int, step: int) -> Tensor:
        if self._padding is None or isinstance(self._train, Signals):
            return self._train.uncropped(indices)
        # Drawn for the whole batch, so that it does not depend on the number of ranks.
        crops = draw_crops(self._shard.batch_size, self._padding, self._seed, epoch, step)
        mine = self._shard.batch_slice
        return self._train.cropped(indices, Crops(*(each[mine] for each in crops)))


def _unchanged(signals: Tensor) -> Tensor:
    """Return signals as they are: they are generated with mean 0 and standard deviation 1."""
    return signals

"""Sets that are small enough to lie on the device as a whole."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ghostnoise.lab.data.augment import Normalization, Pixels, draw_moves
from ghostnoise.lab.data.catalog import Entry
from ghostnoise.lab.data.draws import Purpose, order
from ghostnoise.lab.data.readers import Arrays
from ghostnoise.lab.data.source import Batch, Facts, Share
from ghostnoise.lab.data.splits import Rows


class Images(NamedTuple):
    """Pixels (N, C, H, W) in uint8 and labels (N,) in int64."""

    pixels: Tensor
    labels: Tensor


def chosen(arrays: Arrays, rows: Rows) -> Images:
    """The images of `rows`, as tensors of their own."""
    return Images(torch.from_numpy(arrays.pixels[rows]), torch.from_numpy(arrays.labels[rows]))


class Resident:
    """A source whose images lie on the device, and are cropped, flipped and normalized there, batch by batch."""

    def __init__(
        self,
        entry: Entry,
        train: Images,
        held_out: Images,
        share: Share,
        seed: int,
        device: torch.device,
        channels_last: bool = False,
        padding: int | None = None,
    ) -> None:
        """`padding` is that of random crops and flips, or None for neither."""
        self.facts = Facts(entry.shape, entry.classes, len(train.labels), len(held_out.labels))
        self.steps = share.steps(self.facts.train_size)
        self._share, self._seed, self._padding = share, seed, padding
        self._train = Pixels(train.pixels, device, channels_last, padding or 0)
        self._held_out = Pixels(held_out.pixels, device, channels_last)
        self._train_labels, self._held_out_labels = train.labels.to(device), held_out.labels.to(device)
        self._normalize = Normalization(entry.shape, entry.mean, entry.std, device, channels_last)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's part of the training batches of an epoch, from step `start` on."""
        shuffled = torch.from_numpy(order(self.facts.train_size, self._seed, Purpose.EPOCH, epoch))
        shuffled = shuffled.to(self._train_labels.device)
        for step in range(start, self.steps):
            rows = shuffled[self._share.of_step(step)]
            yield self._normalize(self._look(rows, epoch, step)), self._train_labels[rows]

    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of the held-out images, as they are."""
        for rows in self._share.held_out(self.facts.eval_size):
            yield self._normalize(self._held_out.plain(rows)), self._held_out_labels[rows].clone()

    def _look(self, rows: Tensor, epoch: int, step: int) -> Tensor:
        if self._padding is None:
            return self._train.plain(rows)
        # Drawn for all ranks, so that a batch does not depend on how many there are.
        moves = draw_moves(self._share.batch_size, self._padding, self._seed, epoch, step)
        mine = self._share.of_batch
        return self._train.moved(rows, type(moves)(*(each[mine] for each in moves)))

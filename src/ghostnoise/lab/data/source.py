"""The interface of a data set to the trainer, and how the ranks of a distributed run divide the batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from ghostnoise.lab.errors import UserError

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Normalized images (B, C, H, W) or signals (B, C, L) in float32, and labels (B,) in int64."""


@dataclass(frozen=True)
class DatasetInfo:
    """The shape (C, H, W) of the images or (C, L) of the signals, the number of classes, the sizes after the split."""

    shape: tuple[int, ...]
    classes: int
    train_size: int
    eval_size: int


class Source(Protocol):
    """Batches of a data set, as a pure function of the seed, the epoch, the step and the rank."""

    @property
    def info(self) -> DatasetInfo:
        """The shape and the sizes of the data set."""

    @property
    def steps(self) -> int:
        """The number of steps per epoch. The last incomplete batch is dropped; its images vary between epochs."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's part of the training batches of an epoch, from step `start`."""

    def evaluation(self) -> Iterator[Batch]:
        """Iterate over this rank's part of the held-out images; over all ranks, each image occurs exactly once."""


@dataclass(frozen=True)
class Shard:
    """The part of every batch, and of the held-out images, that one of `world` ranks processes."""

    batch_size: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise UserError(
                f"batch_size={self.batch_size} with {self.world} processes: must be a multiple of their number; "
                f"try {max(1, self.batch_size // self.world) * self.world}"
            )

    @property
    def size(self) -> int:
        """The number of samples per batch and rank."""
        return self.batch_size // self.world

    @property
    def batch_slice(self) -> slice:
        """This rank's samples of a batch."""
        return slice(self.rank * self.size, (self.rank + 1) * self.size)

    def step_slice(self, step: int) -> slice:
        """Return this rank's samples of a step, as positions in the order of the epoch."""
        first = step * self.batch_size
        return slice(first + self.batch_slice.start, first + self.batch_slice.stop)

    def evaluation_slices(self, count: int) -> list[slice]:
        """Return this rank's part of `count` held-out images, in batches."""
        first, end = count * self.rank // self.world, count * (self.rank + 1) // self.world
        return [slice(at, min(at + self.size, end)) for at in range(first, end, self.size)]

    def steps(self, train_size: int) -> int:
        """Return the number of full batches in `train_size` images; raise a UserError if there is none."""
        if self.batch_size > train_size:
            raise UserError(
                f"batch_size={self.batch_size}: must be at most the number of training images, {train_size}; "
                "lower it, or use more images"
            )
        return train_size // self.batch_size

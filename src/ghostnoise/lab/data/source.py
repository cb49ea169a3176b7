"""What a trainer sees of a data set."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from ghostnoise.lab.errors import UserError

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images (B, C, H, W) in float32, normalized, and labels (B,) in int64."""


@dataclass(frozen=True)
class Facts:
    """A set's shape (C, H, W), and how many classes and images it has, after the split."""

    shape: tuple[int, int, int]
    classes: int
    train_size: int
    eval_size: int


class Source(Protocol):
    """Batches of a set, as a pure function of the seed, the epoch, the step and the rank."""

    @property
    def facts(self) -> Facts:
        """Its shape and sizes."""

    @property
    def steps(self) -> int:
        """Steps in an epoch; images that fill no batch are left out, and others in each epoch."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's part of the training batches of an epoch, from step `start` on."""

    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of the held-out images; all ranks together have each of them once."""


@dataclass(frozen=True)
class Share:
    """What one of `world` ranks takes: a block of each batch, and a block of the held-out images."""

    batch_size: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise UserError(
                f"batch_size={self.batch_size} over {self.world} processes: must be a multiple of their number; "
                f"try {max(1, self.batch_size // self.world) * self.world}"
            )

    @property
    def each(self) -> int:
        """Images in a batch of one rank."""
        return self.batch_size // self.world

    @property
    def of_batch(self) -> slice:
        """Its rows of a batch."""
        return slice(self.rank * self.each, (self.rank + 1) * self.each)

    def of_step(self, step: int) -> slice:
        """Its rows of a step, in the order of the epoch."""
        first = step * self.batch_size
        return slice(first + self.of_batch.start, first + self.of_batch.stop)

    def held_out(self, count: int) -> list[slice]:
        """Its rows of `count` held-out images, in batches."""
        first, end = count * self.rank // self.world, count * (self.rank + 1) // self.world
        return [slice(at, min(at + self.each, end)) for at in range(first, end, self.each)]

    def steps(self, train_size: int) -> int:
        """Whole batches in `train_size` images, of which there must be one."""
        if self.batch_size > train_size:
            raise UserError(
                f"batch_size={self.batch_size}: larger than the training set of {train_size} images; "
                f"lower it, or use more images"
            )
        return train_size // self.batch_size

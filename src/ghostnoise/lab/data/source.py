"""The interface of a data set to the trainer, how ranks divide the batches, and reproducible random numbers.

Random numbers are a pure function of a seed and their purpose; no global state is used. They are derived from the raw
output of PCG64, which numpy keeps stable; its `permutation` and `integers` may change between versions. They are always
generated on the CPU, so that every device uses the same data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ghostnoise.lab.errors import UserError

Indices = NDArray[np.int64]
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


class Purpose(IntEnum):
    """The purpose of random numbers; numbers for different purposes are independent, even with the same seed."""

    LIMIT = 0
    VALIDATION = 1
    EPOCH = 2
    AUGMENT = 3
    STAND_IN = 4
    DIGITS = 5


def random_words(count: int, seed: int, purpose: Purpose, *key: int) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit words for a seed, a purpose and a key."""
    # The key is a spawn key, not entropy: seeds are then padded to one length, and no two keys give the same words.
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *key))
    return np.random.PCG64(sequence).random_raw(count)


def permutation(count: int, seed: int, purpose: Purpose, *key: int) -> Indices:
    """Return a uniform random permutation of `range(count)` for a seed, a purpose and a key."""
    return np.argsort(random_words(count, seed, purpose, *key), kind="stable")


def limited_indices(count: int, limit: int | None, setting: str) -> Indices:
    """Return the first `limit` indices of a random order that does not depend on any seed; all if it is None."""
    if limit is None:
        return np.arange(count)
    if limit > count:
        raise UserError(f"{setting}={limit}: there are only {count} images; lower it or leave it out")
    return permutation(count, 0, Purpose.LIMIT)[:limit]


def split_validation(indices: Indices, split_seed: int) -> tuple[Indices, Indices]:
    """Split `indices` into training images and a tenth (rounded, at least 1) that is held out for validation."""
    held_out = max(1, (len(indices) + 5) // 10)
    shuffled = indices[permutation(len(indices), split_seed, Purpose.VALIDATION)]
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])

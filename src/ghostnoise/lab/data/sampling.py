"""Reproducible random numbers, and the subsets of images that are drawn with them. No global state is used.

Random numbers are a pure function of a seed and their purpose. They are derived from the raw output of PCG64, which
numpy keeps stable; its `permutation` and `integers` may change between versions. They are always generated on the CPU,
so that every device uses the same data.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.errors import UserError

Indices = NDArray[np.int64]


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

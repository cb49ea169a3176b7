"""Random numbers as a pure function of what they are for. No global state is read or changed.

Everything comes from the raw words of PCG64, which numpy promises to keep; its `permutation` and `integers` may change
from version to version. All draws are made on the CPU, so that every device sees the same data.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What the numbers are for: each purpose has its own, whatever the seed."""

    LIMIT = 0
    VALIDATION = 1
    EPOCH = 2
    AUGMENT = 3
    STAND_IN = 4
    DIGITS = 5


def words(count: int, seed: int, purpose: Purpose, *key: int) -> NDArray[np.uint64]:
    """`count` uniform words of 64 bits, given by the seed, the purpose and the key."""
    # As a spawn key, not as more entropy: seeds are then padded to one length, and no two keys give the same words.
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *key))
    return np.random.PCG64(sequence).random_raw(count)


def order(count: int, seed: int, purpose: Purpose, *key: int) -> NDArray[np.int64]:
    """A uniform permutation of `count` numbers, given by the seed, the purpose and the key."""
    return np.argsort(words(count, seed, purpose, *key), kind="stable")

"""Which images are trained on, and which are held out."""

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.data.draws import Purpose, order
from ghostnoise.lab.errors import UserError

Rows = NDArray[np.int64]


def limited(count: int, limit: int | None, setting: str) -> Rows:
    """The first `limit` of `count` images in a random order that no seed changes; all of them if None."""
    if limit is None:
        return np.arange(count)
    if limit > count:
        raise UserError(f"{setting}={limit}: there are {count} images; lower it or leave it out")
    return order(count, 0, Purpose.LIMIT)[:limit]


def validation(rows: Rows, split_seed: int) -> tuple[Rows, Rows]:
    """`rows` in two: those to train on, and a tenth (rounded, 1 or more) to validate with."""
    held_out = max(1, (len(rows) + 5) // 10)
    shuffled = rows[order(len(rows), split_seed, Purpose.VALIDATION)]
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])

"""The digits that scikit-learn brings: 1,797 images of 8 x 8 pixels, for a first look without a download."""

import numpy as np

from ghostnoise.lab.data.catalog import CATALOG, Part
from ghostnoise.lab.data.draws import Purpose, order
from ghostnoise.lab.data.readers import Arrays
from ghostnoise.lab.errors import UserError

SEED = 0  # of the split, which has no official form


def load(part: Part) -> Arrays:
    """One part of the digits, split in a fixed random order; values 0 to 16 become 0 to 255, rounded."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("digits: scikit-learn, which has them, is missing; pip install 'ghostnoise[lab]'") from None
    images, labels = load_digits(return_X_y=True)
    train_size = CATALOG["digits"].train_size
    rows = order(len(images), SEED, Purpose.DIGITS)
    rows = rows[:train_size] if part == "train" else rows[train_size:]
    pixels = np.rint(images[rows] * (255 / 16)).astype(np.uint8)
    return Arrays(pixels.reshape(-1, *CATALOG["digits"].shape), labels[rows].astype(np.int64))

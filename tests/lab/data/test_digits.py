import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from ghostnoise.lab.data import digits
from ghostnoise.lab.errors import UserError


def test_the_two_parts_are_all_digits_once():
    train, test = digits.load("train"), digits.load("test")
    assert train.pixels.shape == (1437, 1, 8, 8)
    assert test.pixels.shape == (360, 1, 8, 8)
    assert train.labels.dtype == np.int64
    images, labels = load_digits(return_X_y=True)
    scaled = np.round(images / 16 * 255)
    official = sorted((*image, label) for image, label in zip(scaled.tolist(), labels.tolist(), strict=True))
    pixels = np.concatenate([train.pixels, test.pixels]).reshape(1797, 64).tolist()
    assert (
        sorted(
            (*row, label) for row, label in zip(pixels, [*train.labels.tolist(), *test.labels.tolist()], strict=True)
        )
        == official
    )


def test_the_split_never_changes():
    assert digits.load("train").labels[:12].tolist() == TRAIN_LABELS
    assert digits.load("test").labels[:12].tolist() == TEST_LABELS


def test_both_parts_have_every_class_about_equally_often():
    """Of n drawn labels, each class within 4 standard deviations of its share."""
    labels = load_digits().target
    for part in ("train", "test"):
        counts = np.bincount(digits.load(part).labels, minlength=10)
        share = np.bincount(labels) / len(labels)
        n = counts.sum()
        assert np.all(np.abs(counts - n * share) < 4 * np.sqrt(n * share * (1 - share)))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'ghostnoise\[lab\]'"):
        digits.load("train")


TRAIN_LABELS = [9, 2, 2, 3, 1, 5, 6, 7, 5, 2, 8, 8]
TEST_LABELS = [0, 5, 9, 9, 7, 0, 2, 1, 0, 4, 1, 8]

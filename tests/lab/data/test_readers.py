import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ghostnoise.lab.data import readers
from ghostnoise.lab.data.readers import read_digits, unpickle
from ghostnoise.lab.errors import UserError
from support.datasets import binary, coarse_fine, encode, idx, python2_pickle, random_arrays, small

PATH = Path("folder/file")
SHAPE = (3, 32, 32)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 99))
def test_idx_round_trip(shape, seed):
    array = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert np.array_equal(readers.idx(idx(array), len(shape), PATH), array)


def test_idx_raises_for_other_types_ranks_and_lengths():
    good = idx(np.zeros((2, 3, 3), np.uint8))
    for bad, text in (
        (b"\x00\x00\x0d\x03" + good[4:], "begins with 00 00 0d 03"),
        (idx(np.zeros(4, np.uint8)), "begins with 00 00 08 01"),
        (b"", "begins with ;"),
        (good[:10], "begins with 00 00 08 03"),
        (good[:-1], r"17 values, but its header specifies \(2, 3, 3\)"),
        (good + b"\x00", "19 values"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, "0 values, but its header specifies"),
    ):
        with pytest.raises(UserError, match=f"folder/file: .*{text}.*replace the file"):
            readers.idx(bad, 3, PATH)


@given(st.integers(1, 5), st.integers(0, 99))
def test_cifar_round_trips(count, seed):
    ten, hundred = random_arrays(SHAPE, 10, count, seed), random_arrays(SHAPE, 100, count, seed)
    for found, arrays in (
        (readers.cifar_binary(binary(ten.pixels, ten.labels.tolist()), PATH, SHAPE, 1), ten),
        (readers.cifar_binary(coarse_fine(hundred.pixels, hundred.labels.tolist()), PATH, SHAPE, 2), hundred),
        (readers.cifar_pickle(python2_pickle(ten.pixels, ten.labels.tolist()), PATH, SHAPE), ten),
        (readers.cifar_pickle(python2_pickle(hundred.pixels, [99] + [0] * (count - 1)), PATH, SHAPE), hundred),
    ):
        assert found.pixels.dtype == np.uint8
        assert found.labels.dtype == np.int64
        assert np.array_equal(found.pixels, arrays.pixels)
        if found.labels[0] != 99:
            assert np.array_equal(found.labels, arrays.labels)


def test_planes_are_red_green_blue_row_by_row():
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    found = readers.cifar_binary(record, PATH, SHAPE, 1)
    assert found.labels.tolist() == [7]
    assert np.unique(found.pixels[0, 0]).tolist() == [1]
    assert np.unique(found.pixels[0, 1]).tolist() == [2]
    assert found.pixels[0, 2, 1, :3].tolist() == [32, 33, 34]


def test_binary_files_must_consist_of_complete_records():
    with pytest.raises(UserError, match="3074 bytes; must be a multiple of 3073"):
        readers.cifar_binary(bytes(3074), PATH, SHAPE, 1)


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.uint8)},
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [1]},
        {b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1.0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [2**70]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": 3},
    ],
)
def test_pickles_of_other_objects_raise(batch):
    with pytest.raises(UserError, match="folder/file: not a CIFAR batch"):
        readers.cifar_pickle(pickle.dumps(batch, 2), PATH, SHAPE)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_counts_and_labels_are_checked(name):
    entry, arrays = small(name)
    layout = entry.layouts[0]

    def read(arrays):
        contents = encode(layout.format, arrays, len(layout.train))
        return readers.read(entry, "train", layout.format, [(PATH, data) for data in contents])

    assert np.array_equal(read(arrays["train"]).pixels, arrays["train"].pixels)
    with pytest.raises(UserError, match=r"folder: train images of shape \(45, .* with 45 labels; .* has \(50, "):
        read(readers.Arrays(*(each[:45] for each in arrays["train"])))
    arrays["train"].labels[3] = entry.classes
    with pytest.raises(UserError, match=r"folder: labels from 0 to 10; .* has 0 to 9"):
        read(arrays["train"])


def test_the_two_splits_contain_every_digit_once():
    train, test = read_digits("train"), read_digits("test")
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
    assert read_digits("train").labels[:12].tolist() == TRAIN_LABELS
    assert read_digits("test").labels[:12].tolist() == TEST_LABELS


def test_both_splits_have_every_class_about_equally_often():
    """With n labels, the count of each class is within 4 standard deviations of its expectation."""
    labels = load_digits().target
    for split in ("train", "test"):
        counts = np.bincount(read_digits(split).labels, minlength=10)
        share = np.bincount(labels) / len(labels)
        n = counts.sum()
        assert np.all(np.abs(counts - n * share) < 4 * np.sqrt(n * share * (1 - share)))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'ghostnoise\[lab\]'"):
        read_digits("train")


TRAIN_LABELS = [9, 2, 2, 3, 1, 5, 6, 7, 5, 2, 8, 8]
TEST_LABELS = [0, 5, 9, 9, 7, 0, 2, 1, 0, 4, 1, 8]


PICKLE_PATH = Path("data_batch_1")
ARRAYS = random_arrays((3, 2, 2), 10, 7, seed=0)
OFFICIAL = python2_pickle(ARRAYS.pixels, ARRAYS.labels.tolist())


class Runs:
    """Requests a call when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_like_the_official_ones():
    found = unpickle(OFFICIAL, PICKLE_PATH)
    assert found[b"labels"] == ARRAYS.labels.tolist()
    assert found[b"batch_label"] == b"one"
    assert found[b"data"].dtype == np.uint8
    assert np.array_equal(found[b"data"], ARRAYS.pixels.reshape(7, 12))


@pytest.mark.parametrize("protocol", range(3))
def test_a_pickle_of_python_3(protocol):
    batch = {b"data": ARRAYS.pixels, b"labels": [1, 2]}
    found = unpickle(pickle.dumps(batch, protocol), PICKLE_PATH)
    assert np.array_equal(found[b"data"], ARRAYS.pixels)
    assert found[b"labels"] == [1, 2]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_requested_functions_are_not_executed(tmp_path, protocol):
    trace = tmp_path / "ran"
    for asked in (
        Runs(os.system, f"touch {trace}"),
        Runs(subprocess.getoutput, f"touch {trace}"),
        Runs(eval, f"open({str(trace)!r}, 'w')"),
        Runs(getattr, Path(trace), "touch"),
        Runs(np.load, str(trace)),
        Runs(np.fromfile, str(trace)),
    ):
        with pytest.raises(UserError, match=r"data_batch_1: requests [\w.]+, which .* was not executed; replace"):
            unpickle(pickle.dumps({b"data": asked}, protocol), PICKLE_PATH)
        assert not trace.exists()


def test_the_error_names_the_requested_function():
    with pytest.raises(UserError, match=r"requests posix\.system"):
        unpickle(b"cposix\nsystem\n(S'true'\ntR.", PICKLE_PATH)
    with pytest.raises(UserError, match=r"requests numpy\.testing\._private"):
        unpickle(b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR.", PICKLE_PATH)


def test_bytes_in_another_encoding_raise():
    with pytest.raises(UserError, match="not a CIFAR pickle"):
        unpickle(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-7\x86R.", PICKLE_PATH)


@given(st.integers(0, len(OFFICIAL) - 1))
def test_a_truncated_file_raises(length):
    with pytest.raises(UserError, match=r"data_batch_1: not a CIFAR pickle \(.*replace the file") as raised:
        unpickle(OFFICIAL[:length], PICKLE_PATH)
    assert "\n" not in str(raised.value)

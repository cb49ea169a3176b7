import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data import readers
from ghostnoise.lab.errors import UserError
from lab.data.writing import binary, coarse_fine, encode, idx, python2_pickle, random_arrays, small

PATH = Path("folder/file")
SHAPE = (3, 32, 32)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 99))
def test_idx_round_trip(shape, seed):
    array = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert np.array_equal(readers.idx(idx(array), len(shape), PATH), array)


def test_idx_refuses_other_types_ranks_and_lengths():
    good = idx(np.zeros((2, 3, 3), np.uint8))
    for bad, text in (
        (b"\x00\x00\x0d\x03" + good[4:], "begins with 00 00 0d 03"),
        (idx(np.zeros(4, np.uint8)), "begins with 00 00 08 01"),
        (b"", "begins with ;"),
        (good[:10], "begins with 00 00 08 03"),
        (good[:-1], r"17 values, and its head says \(2, 3, 3\)"),
        (good + b"\x00", "19 values"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, "0 values, and its head says"),
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


def test_binary_files_are_whole_records():
    with pytest.raises(UserError, match="3074 bytes are no multiple of 3073"):
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
def test_pickles_of_something_else_are_refused(batch):
    with pytest.raises(UserError, match="folder/file: not a batch of CIFAR's"):
        readers.cifar_pickle(pickle.dumps(batch, 2), PATH, SHAPE)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_counts_and_labels_are_checked(name):
    entry, arrays = small(name)
    layout = entry.layouts[0]

    def read(arrays):
        contents = encode(layout.kind, arrays, len(layout.train))
        return readers.read(entry, "train", layout.kind, [(PATH, data) for data in contents])

    assert np.array_equal(read(arrays["train"]).pixels, arrays["train"].pixels)
    with pytest.raises(UserError, match=r"folder: train images of shape \(45, .* with 45 labels; .* has \(50, "):
        read(readers.Arrays(*(each[:45] for each in arrays["train"])))
    arrays["train"].labels[3] = entry.classes
    with pytest.raises(UserError, match=r"folder: labels from 0 to 10; .* has 0 to 9"):
        read(arrays["train"])

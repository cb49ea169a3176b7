import gzip
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ghostnoise.lab.data import files
from ghostnoise.lab.data.catalog import CATALOG
from ghostnoise.lab.data.files import read_digits, unpickle
from ghostnoise.lab.errors import UserError
from support.datasets import described, encode, idx, python2_pickle, random_arrays, small, write

PLACES = [
    (entry.name, folder, zipped)
    for entry in CATALOG.values()
    if entry.layout
    for folder in entry.layout.folders
    for zipped in ((False, True) if entry.layout.archive is None else (False,))
]


@pytest.mark.parametrize(("name", "folder", "zipped"), PLACES)
def test_every_layout_is_found_and_read(tmp_path, name, folder, zipped):
    entry, arrays = small(name)
    assert not files.has_files(entry, tmp_path, files.BOTH)
    write(entry.layout, arrays, tmp_path / folder, zipped)
    assert files.has_files(entry, tmp_path, files.BOTH)
    for part in files.BOTH:
        found = files.load(entry, tmp_path, part)
        assert np.array_equal(found.pixels, arrays[part].pixels)
        assert np.array_equal(found.labels, arrays[part].labels)
        assert found.labels.dtype == np.int64


def test_missing_files_are_named_with_the_remedy(tmp_path):
    entry, arrays = small("cifar10")
    with pytest.raises(UserError) as raised:
        files.load(entry, tmp_path, "train")
    text = str(raised.value)
    assert text.startswith(f"cifar10: no train images in {tmp_path}; expected data_batch_1, ")
    assert "data_batch_5 in cifar-10-batches-py/; run" in text
    assert f"run `ghostnoise data get cifar10 --data-dir {tmp_path}`, or copy the official files there" in text
    assert "test_batch" not in text
    assert "\n" not in text
    write(entry.layout, arrays, tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(UserError, match=r"cifar-10-batches-py: data_batch_3 not found; run `ghostnoise"):
        files.load(entry, tmp_path, "train")
    assert not files.has_files(entry, tmp_path, ("train",))
    assert files.has_files(entry, tmp_path, ("test",))
    assert len(files.load(entry, tmp_path, "test").labels) == entry.test_size


def test_the_error_lists_the_folders_of_idx_files(tmp_path):
    names = "train-images-idx3-ubyte, train-labels-idx1-ubyte (or .gz) in mnist/ or MNIST/raw/ or MNIST/"
    with pytest.raises(UserError, match=re.escape(names)):
        files.load(CATALOG["mnist"], tmp_path, "train")


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (flip, "damaged, has md5 [0-9a-f]{32} instead of {md5}"),
        (lambda data: data[:-5], "damaged, has {less} bytes instead of {size}"),
        (lambda data: data + b"x", "damaged, has more than {size} bytes instead of {size}"),
        (lambda data: b"", "damaged, has 0 bytes instead of {size}"),
    ],
)
def test_damage_is_named(tmp_path, spoil, text):
    entry, arrays = small("cifar100")
    layout = entry.layout
    write(layout, arrays, tmp_path / layout.folders[0])
    path, file = tmp_path / layout.folders[0] / layout.train[0].name, layout.train[0]
    path.write_bytes(spoil(path.read_bytes()))
    expected = text.replace("{md5}", file.md5).replace("{size}", str(file.size)).replace("{less}", str(file.size - 5))
    with pytest.raises(UserError, match=f"{path}: {expected}; run `ghostnoise data get cifar100 "):
        files.load(entry, tmp_path, "train")
    assert files.has_files(entry, tmp_path, ("train",))  # present, but not intact
    assert len(files.load(entry, tmp_path, "test").labels) == entry.test_size


def test_an_intact_folder_is_preferred_to_a_damaged_one(tmp_path):
    entry, arrays = small("mnist")
    folders = [tmp_path / "mnist", tmp_path / "MNIST" / "raw"]
    for folder in folders:
        write(entry.layout, arrays, folder)
    for damaged, intact in (folders, folders[::-1]):
        path = damaged / "train-images-idx3-ubyte"
        good = path.read_bytes()
        path.write_bytes(flip(good))
        assert files.find_intact(entry, tmp_path).folder == intact
        assert np.array_equal(files.load(entry, tmp_path, "train").pixels, arrays["train"].pixels)
        path.write_bytes(good)


@pytest.mark.parametrize(("name", "zipped"), [("mnist", False), ("mnist", True), ("cifar10", False)])
def test_sizes_are_compared_without_reading(tmp_path, name, zipped, monkeypatch):
    entry, arrays = small(name)
    layout = entry.layout
    write(layout, arrays, folder := tmp_path / layout.folders[0], zipped)
    monkeypatch.setattr(files, "_verified", lambda path, file: pytest.fail(f"{path} was read"))
    (found,) = files.search(entry, tmp_path, read=False)
    assert found.intact
    path = sorted(folder.iterdir())[0]
    content = gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()
    path.write_bytes(gzip.compress(content + b"x") if zipped else content + b"x")
    (found,) = files.search(entry, tmp_path, read=False)
    assert found.damaged == [f"{path}: damaged, has {len(content) + 1} bytes instead of {len(content)}"]
    path.write_bytes(b"")
    (found,) = files.search(entry, tmp_path, read=False)
    assert "has 0 bytes" in found.damaged[0]
    path.unlink()
    (found,) = files.search(entry, tmp_path, read=False)
    assert found.missing == [path.name.removesuffix(".gz")]


def test_an_intact_gz_is_preferred_to_a_damaged_plain_file(tmp_path):
    entry, arrays = small("mnist")
    place = tmp_path / "MNIST" / "raw"
    write(entry.layout, arrays, place)
    path = place / "train-labels-idx1-ubyte"
    good = path.read_bytes()
    path.write_bytes(flip(good))
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: damaged"):
        files.load(entry, tmp_path, "train")
    path.with_suffix(".gz").write_bytes(gzip.compress(good))
    assert np.array_equal(files.load(entry, tmp_path, "train").labels, arrays["train"].labels)


def test_the_uncompressed_content_of_a_gz_is_verified(tmp_path):
    entry, arrays = small("fashion-mnist")
    write(entry.layout, arrays, tmp_path / "fashion-mnist", zipped=True)
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    plain = gzip.decompress(path.read_bytes())
    for bad, text in (
        (gzip.compress(flip(plain)), "damaged, unpacks to md5"),
        (gzip.compress(plain + bytes(10**6)), f"damaged, unpacks to more than {len(plain)} bytes"),
        (gzip.compress(plain)[:-20], "cannot be read"),
        (b"no gzip", "cannot be read"),
        (flip(gzip.compress(plain)), "cannot be read|damaged"),
    ):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=f"train-images-idx3-ubyte.gz: ({text})"):
            files.load(entry, tmp_path, "train")


def test_the_bytes_that_are_read_are_those_that_were_verified(tmp_path, monkeypatch):
    """A file that changes after verification does not affect the result."""
    entry, arrays = small("cifar10")
    layout = entry.layout
    write(layout, arrays, tmp_path / layout.folders[0])
    parse = files.parse

    def spoilt_then_parsed(*given):
        for file in layout.train:
            (tmp_path / layout.folders[0] / file.name).write_bytes(b"")
        return parse(*given)

    monkeypatch.setattr(files, "parse", spoilt_then_parsed)
    assert np.array_equal(files.load(entry, tmp_path, "train").pixels, arrays["train"].pixels)


def test_a_pickle_with_the_right_md5_is_still_not_executed(tmp_path):
    entry, arrays = small("cifar100")
    layout, evil = entry.layout, b"cposix\nsystem\n(S'true'\ntR."
    layout = replace(layout, train=(described("train", evil),))
    write(entry.layout, arrays, tmp_path / "cifar-100-python")
    (tmp_path / "cifar-100-python" / "train").write_bytes(evil)
    with pytest.raises(UserError, match=r"requests posix\.system"):
        files.load(replace(entry, layout=layout), tmp_path, "train")


def test_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GHOSTNOISE_DATA", raising=False)
    assert files.data_folder(None) == tmp_path / ".cache" / "ghostnoise-data"
    monkeypatch.setenv("GHOSTNOISE_DATA", "~/images")
    assert files.data_folder(None) == tmp_path / "images"
    assert files.data_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("GHOSTNOISE_DATA", "")
    assert files.data_folder(None) == tmp_path / ".cache" / "ghostnoise-data"


def test_md5_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"ghost" * 10**6)
    assert files.md5_of(tmp_path / "file") == described("file", b"ghost" * 10**6).md5


PATH = Path("folder/file")
SHAPE = (3, 32, 32)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 99))
def test_idx_round_trip(shape, seed):
    array = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert np.array_equal(files.idx(idx(array), len(shape), PATH), array)


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
            files.idx(bad, 3, PATH)


@given(st.integers(1, 5), st.sampled_from([10, 100]), st.integers(0, 99))
def test_cifar_round_trips(count, classes, seed):
    arrays = random_arrays(SHAPE, classes, count, seed)
    found = files.cifar_pickle(python2_pickle(arrays.pixels, arrays.labels.tolist()), PATH, SHAPE)
    assert (found.pixels.dtype, found.labels.dtype) == (np.uint8, np.int64)
    assert np.array_equal(found.pixels, arrays.pixels)
    assert np.array_equal(found.labels, arrays.labels)


def test_planes_are_red_green_blue_row_by_row():
    image = np.frombuffer(bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4, np.uint8)
    found = files.cifar_pickle(python2_pickle(image.reshape(1, -1), [7]), PATH, SHAPE)
    assert found.labels.tolist() == [7]
    assert np.unique(found.pixels[0, 0]).tolist() == [1]
    assert np.unique(found.pixels[0, 1]).tolist() == [2]
    assert found.pixels[0, 2, 1, :3].tolist() == [32, 33, 34]


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
        files.cifar_pickle(pickle.dumps(batch, 2), PATH, SHAPE)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_counts_and_labels_are_checked(name):
    entry, arrays = small(name)
    layout = entry.layout

    def read(arrays):
        contents = encode(layout, arrays, len(layout.train))
        return files.parse(entry, "train", [(PATH, data) for data in contents])

    assert np.array_equal(read(arrays["train"]).pixels, arrays["train"].pixels)
    with pytest.raises(UserError, match=r"folder: train images of shape \(45, .* with 45 labels; .* has \(50, "):
        read(files.Arrays(*(each[:45] for each in arrays["train"])))
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
    with pytest.raises(UserError, match=r"pip install .*\[lab\]'"):
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

import gzip
import re
from dataclasses import replace

import numpy as np
import pytest

from ghostnoise.lab.data import files
from ghostnoise.lab.data.catalog import CATALOG
from ghostnoise.lab.errors import UserError
from support.datasets import described, small, write

PLACES = [
    (entry.name, number, folder, zipped)
    for entry in CATALOG.values()
    for number, layout in enumerate(entry.layouts)
    for folder in layout.folders
    for zipped in ((False, True) if layout.format == "idx" else (False,))
]


@pytest.mark.parametrize(("name", "number", "folder", "zipped"), PLACES)
def test_every_layout_is_found_and_read(tmp_path, name, number, folder, zipped):
    entry, arrays = small(name)
    assert not files.has_files(entry, tmp_path, files.BOTH)
    write(entry.layouts[number], arrays, tmp_path / folder, zipped)
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
    assert text.startswith(f"cifar10: no train images in {tmp_path}; expected data_batch_1.bin, ")
    assert "data_batch_5.bin in cifar-10-batches-bin/, or data_batch_1, " in text
    assert "cifar-10-batches-py/" in text
    assert f"run `ghostnoise data get cifar10 --data-dir {tmp_path}`, or copy the official files there" in text
    assert "test_batch" not in text
    assert "\n" not in text
    write(entry.layouts[0], arrays, tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"cifar-10-batches-bin: data_batch_3.bin not found; run `ghostnoise"):
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
@pytest.mark.parametrize("number", [0, 1])
def test_damage_is_named(tmp_path, spoil, text, number):
    entry, arrays = small("cifar100")
    layout = entry.layouts[number]
    write(layout, arrays, tmp_path / layout.folders[0])
    path, file = tmp_path / layout.folders[0] / layout.train[0].name, layout.train[0]
    path.write_bytes(spoil(path.read_bytes()))
    expected = text.replace("{md5}", file.md5).replace("{size}", str(file.size)).replace("{less}", str(file.size - 5))
    with pytest.raises(UserError, match=f"{path}: {expected}; run `ghostnoise data get cifar100 "):
        files.load(entry, tmp_path, "train")
    assert files.has_files(entry, tmp_path, ("train",))  # present, but not intact
    assert len(files.load(entry, tmp_path, "test").labels) == entry.test_size


def test_an_intact_layout_is_preferred_to_a_damaged_one(tmp_path):
    entry, arrays = small("cifar10")
    for layout in entry.layouts:
        write(layout, arrays, tmp_path / layout.folders[0])
    for first, second in (entry.layouts, entry.layouts[::-1]):
        path = tmp_path / first.folders[0] / first.train[2].name
        good = path.read_bytes()
        path.write_bytes(flip(good))
        assert files.find_intact(entry, tmp_path).layout == second
        assert np.array_equal(files.load(entry, tmp_path, "train").pixels, arrays["train"].pixels)
        path.write_bytes(good)


def test_an_intact_gz_is_preferred_to_a_damaged_plain_file(tmp_path):
    entry, arrays = small("mnist")
    place = tmp_path / "MNIST" / "raw"
    write(entry.layouts[0], arrays, place)
    path = place / "train-labels-idx1-ubyte"
    good = path.read_bytes()
    path.write_bytes(flip(good))
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: damaged"):
        files.load(entry, tmp_path, "train")
    path.with_suffix(".gz").write_bytes(gzip.compress(good))
    assert np.array_equal(files.load(entry, tmp_path, "train").labels, arrays["train"].labels)


def test_the_uncompressed_content_of_a_gz_is_verified(tmp_path):
    entry, arrays = small("fashion-mnist")
    write(entry.layouts[0], arrays, tmp_path / "fashion-mnist", zipped=True)
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
    layout = entry.layouts[0]
    write(layout, arrays, tmp_path / layout.folders[0])
    parse = files.read

    def spoilt_then_parsed(*given):
        for file in layout.train:
            (tmp_path / layout.folders[0] / file.name).write_bytes(b"")
        return parse(*given)

    monkeypatch.setattr(files, "read", spoilt_then_parsed)
    assert np.array_equal(files.load(entry, tmp_path, "train").pixels, arrays["train"].pixels)


def test_a_pickle_with_the_right_md5_is_still_not_executed(tmp_path):
    entry, arrays = small("cifar100")
    layout, evil = entry.layouts[0], b"cposix\nsystem\n(S'true'\ntR."
    layout = replace(layout, train=(described("train", evil),))
    write(entry.layouts[0], arrays, tmp_path / "cifar-100-python")
    (tmp_path / "cifar-100-python" / "train").write_bytes(evil)
    with pytest.raises(UserError, match=r"requests posix\.system"):
        files.load(replace(entry, layouts=(layout,)), tmp_path, "train")


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

"""Small data sets in the official layouts, written byte by byte, and catalog entries that describe them."""

import gzip
import hashlib
import struct
from dataclasses import replace

import numpy as np

from ghostnoise.lab.data.catalog import CATALOG, File
from ghostnoise.lab.data.files import Arrays

TRAIN, TEST = 50, 20  # five CIFAR batches of ten


def random_arrays(shape, classes, count, seed):
    rng = np.random.default_rng(seed)
    return Arrays(rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, classes, count))


def small(name, train=TRAIN, test=TEST):
    """Return a small version of the data set `name`: its catalog entry and its arrays."""
    official = CATALOG[name]
    arrays = {
        part: random_arrays(official.shape, official.classes, count, seed)
        for seed, (part, count) in enumerate((("train", train), ("test", test)))
    }
    layout = official.layout
    parts = {
        part: tuple(map(described, [file.name for file in files], encode(layout, arrays[part], len(files))))
        for part, files in (("train", layout.train), ("test", layout.test))
    }
    return replace(official, train_size=train, test_size=test, layout=replace(layout, **parts)), arrays


def described(name, data):
    return File(name, len(data), hashlib.md5(data).hexdigest())


def write(layout, arrays, folder, zipped=False):
    """Write all files of a layout into `folder`."""
    folder.mkdir(parents=True)
    for part, files in (("train", layout.train), ("test", layout.test)):
        for file, data in zip(files, encode(layout, arrays[part], len(files)), strict=True):
            if zipped:
                (folder / f"{file.name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / file.name).write_bytes(data)


def encode(layout, arrays, count):
    """Return the contents of the `count` files of a split."""
    if layout.archive is None:
        return [idx(arrays.pixels[:, 0]), idx(arrays.labels.astype(np.uint8))]
    blocks = zip(np.split(arrays.pixels, count), np.split(arrays.labels, count), strict=True)
    return [python2_pickle(pixels, labels.tolist()) for pixels, labels in blocks]


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def python2_pickle(pixels, labels):
    """Return a batch as Python 2's cPickle wrote it: protocol 2, with all strings as bytes."""
    rows = pixels.reshape(len(pixels), -1)
    items = [
        ("data", _array(rows)),
        ("coarse_labels", _list([label // 5 for label in labels])),
        ("batch_label", _text(b"one")),
    ]
    items.append(("fine_labels" if max(labels) > 9 else "labels", _list(labels)))
    return b"\x80\x02}(" + b"".join(_text(key.encode()) + value for key, value in items) + b"u."


def _text(data):
    return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<i", len(data)) + data


def _list(values):
    return b"](" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"e"


def _array(rows):
    integers = [b"J" + struct.pack("<i", value) for value in rows.shape]
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _text(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + _text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + _text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    return empty + b"(K\x01" + b"".join(integers) + b"\x86" + dtype + b"\x89" + _text(rows.tobytes()) + b"tb"

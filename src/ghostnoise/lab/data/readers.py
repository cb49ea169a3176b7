"""Parse the official formats: from a file's bytes to pixels (N, C, H, W) in uint8 and labels (N,) in int64."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.data.catalog import Entry, Kind, Part
from ghostnoise.lab.data.pickles import unpickle
from ghostnoise.lab.errors import UserError


class Arrays(NamedTuple):
    """Images as they are stored, and the class of each."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def read(entry: Entry, part: Part, kind: Kind, contents: list[tuple[Path, bytes]]) -> Arrays:
    """All images of a part, from its files' contents in their official order; their number and labels are checked."""
    if kind == "idx":
        (images_path, images), (labels_path, labels) = contents
        found = [Arrays(idx(images, 3, images_path)[:, None], idx(labels, 1, labels_path).astype(np.int64))]
    elif kind == "pickle":
        found = [cifar_pickle(data, path, entry.shape) for path, data in contents]
    else:
        label_bytes = 2 if kind == "binary-coarse-fine" else 1
        found = [cifar_binary(data, path, entry.shape, label_bytes) for path, data in contents]
    arrays = Arrays(np.concatenate([each.pixels for each in found]), np.concatenate([each.labels for each in found]))
    return _checked(entry, part, arrays, contents[0][0].parent)


def _checked(entry: Entry, part: Part, arrays: Arrays, folder: Path) -> Arrays:
    wanted = (entry.size(part), *entry.shape)
    if arrays.pixels.shape != wanted or arrays.labels.shape != wanted[:1]:
        raise UserError(
            f"{folder}: {part} images of shape {arrays.pixels.shape} with {len(arrays.labels)} labels; {entry.title} "
            f"has {wanted}; replace the files by the official ones"
        )
    if len(arrays.labels) and not 0 <= arrays.labels.min() <= arrays.labels.max() < entry.classes:
        raise UserError(
            f"{folder}: labels from {arrays.labels.min()} to {arrays.labels.max()}; {entry.title} has 0 to "
            f"{entry.classes - 1}; replace the files by the official ones"
        )
    return arrays


def idx(data: bytes, dimensions: int, path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: a magic number, the big-endian sizes, the values."""
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes((0, 0, 8, dimensions)):
        raise UserError(
            f"{path}: begins with {data[:4].hex(' ')}; an idx file of bytes in {dimensions} dimensions begins with "
            f"00 00 08 0{dimensions}; replace the file by the official one"
        )
    shape = tuple(np.frombuffer(data, ">u4", dimensions, offset=4).tolist())
    values = np.frombuffer(data, np.uint8, offset=head)
    if values.size != np.prod(shape, dtype=object):
        raise UserError(
            f"{path}: {values.size} values, and its head says {shape}; replace the file by the official one"
        )
    return values.reshape(shape)


def cifar_binary(data: bytes, path: Path, shape: tuple[int, int, int], label_bytes: int) -> Arrays:
    """The records of a binary file: the label, the finest one last, then the red, green and blue planes."""
    length = label_bytes + int(np.prod(shape))
    if len(data) % length:
        raise UserError(f"{path}: {len(data)} bytes are no multiple of {length}; replace the file by the official one")
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    return Arrays(records[:, label_bytes:].reshape(-1, *shape), records[:, label_bytes - 1].astype(np.int64))


def cifar_pickle(data: bytes, path: Path, shape: tuple[int, int, int]) -> Arrays:
    """The images of a pickled batch: a dictionary with `data`, and `labels` or `fine_labels`."""
    batch = unpickle(data, path)
    found = batch if isinstance(batch, dict) else {}
    pixels, labels = found.get(b"data"), found.get(b"fine_labels", found.get(b"labels"))
    length = int(np.prod(shape))
    if (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.shape[1:] == (length,)
        and isinstance(labels, list)
        and len(labels) == len(pixels)
        and all(type(label) is int and abs(label) < 2**31 for label in labels)
    ):
        return Arrays(pixels.reshape(-1, *shape), np.array(labels, np.int64))
    raise UserError(
        f"{path}: not a batch of CIFAR's (data of shape (N, {length}) in uint8, and N labels); "
        "replace the file by the official one"
    )

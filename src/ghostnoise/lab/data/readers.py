"""Parse the official file formats into pixels (N, C, H, W) in uint8 and labels (N,) in int64.

CIFAR's Python files are pickles, which can request the execution of any program; they are read without executing
anything.
"""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.data.catalog import CATALOG, Entry, FileFormat, Split
from ghostnoise.lab.data.sampling import Purpose, permutation
from ghostnoise.lab.errors import UserError

DIGITS_SPLIT_SEED = 0  # the digits have no official split


class Arrays(NamedTuple):
    """Images as they are stored (uint8) or signals (float32), and their labels."""

    pixels: NDArray[np.generic]
    labels: NDArray[np.int64]


def read(entry: Entry, split: Split, file_format: FileFormat, contents: list[tuple[Path, bytes]]) -> Arrays:
    """Parse the files of a split, given in their official order, and check the number of images and the labels."""
    if file_format == "idx":
        (images_path, images), (labels_path, labels) = contents
        found = [Arrays(idx(images, 3, images_path)[:, None], idx(labels, 1, labels_path).astype(np.int64))]
    elif file_format == "pickle":
        found = [cifar_pickle(data, path, entry.shape) for path, data in contents]
    else:
        label_bytes = 2 if file_format == "binary-coarse-fine" else 1
        found = [cifar_binary(data, path, entry.shape, label_bytes) for path, data in contents]
    arrays = Arrays(np.concatenate([each.pixels for each in found]), np.concatenate([each.labels for each in found]))
    return _checked(entry, split, arrays, contents[0][0].parent)


def _checked(entry: Entry, split: Split, arrays: Arrays, folder: Path) -> Arrays:
    expected = (entry.size(split), *entry.shape)
    if arrays.pixels.shape != expected or arrays.labels.shape != expected[:1]:
        raise UserError(
            f"{folder}: {split} images of shape {arrays.pixels.shape} with {len(arrays.labels)} labels; {entry.title} "
            f"has {expected}; replace the files with the official ones"
        )
    if len(arrays.labels) and not 0 <= arrays.labels.min() <= arrays.labels.max() < entry.classes:
        raise UserError(
            f"{folder}: labels from {arrays.labels.min()} to {arrays.labels.max()}; {entry.title} has 0 to "
            f"{entry.classes - 1}; replace the files with the official ones"
        )
    return arrays


def read_digits(split: Split) -> Arrays:
    """Return a split of scikit-learn's digits: 1,797 images of 8x8 pixels, split in a fixed random order.

    The values from 0 to 16 are scaled to 0 to 255 and rounded.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "digits: included in scikit-learn, which is not installed; pip install 'ghostnoise[lab]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    train_size = CATALOG["digits"].train_size
    indices = permutation(len(images), DIGITS_SPLIT_SEED, Purpose.DIGITS)
    indices = indices[:train_size] if split == "train" else indices[train_size:]
    pixels = np.rint(images[indices] * (255 / 16)).astype(np.uint8)
    return Arrays(pixels.reshape(-1, *CATALOG["digits"].shape), labels[indices].astype(np.int64))


def idx(data: bytes, dimensions: int, path: Path) -> NDArray[np.uint8]:
    """Parse an idx file of unsigned bytes: a magic number, the big-endian sizes, and the values."""
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes((0, 0, 8, dimensions)):
        raise UserError(
            f"{path}: begins with {data[:4].hex(' ')}; an idx file of bytes in {dimensions} dimensions begins with "
            f"00 00 08 0{dimensions}; replace the file with the official one"
        )
    shape = tuple(np.frombuffer(data, ">u4", dimensions, offset=4).tolist())
    values = np.frombuffer(data, np.uint8, offset=header)
    if values.size != np.prod(shape, dtype=object):
        raise UserError(
            f"{path}: {values.size} values, but its header specifies {shape}; replace the file with the official one"
        )
    return values.reshape(shape)


def cifar_binary(data: bytes, path: Path, shape: tuple[int, ...], label_bytes: int) -> Arrays:
    """Parse a binary file of CIFAR. A record is the label (the fine label last), then red, green and blue planes."""
    length = label_bytes + int(np.prod(shape))
    if len(data) % length:
        raise UserError(
            f"{path}: {len(data)} bytes; must be a multiple of {length}; replace the file with the official one"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    return Arrays(records[:, label_bytes:].reshape(-1, *shape), records[:, label_bytes - 1].astype(np.int64))


def cifar_pickle(data: bytes, path: Path, shape: tuple[int, ...]) -> Arrays:
    """Parse a pickled batch of CIFAR: a dictionary with `data`, and `labels` or `fine_labels`."""
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
        f"{path}: not a CIFAR batch; must have data of shape (N, {length}) in uint8, and N labels; "
        "replace the file with the official one"
    )


def unpickle(data: bytes, path: Path) -> Any:
    """Return the object in `data`, the contents of `path`: only containers, numbers, bytes and numpy arrays."""
    try:
        return _RestrictedUnpickler(data, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path}: not a CIFAR pickle ({type(error).__name__}: {error}); replace the file with the official one"
        ) from None


class _RestrictedUnpickler(pickle.Unpickler):
    """Builds containers, numbers, bytes and numpy arrays, and nothing else."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")  # strings of Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(
                f"{self.path}: requests {module}.{name}, which no CIFAR file needs; it was not executed; "
                "replace the file with the official one"
            )
        return _ALLOWED[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode` in pickles of Python 3, which store bytes as latin-1 text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding}")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # numpy renamed the module of this function
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}

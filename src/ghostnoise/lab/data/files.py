"""Find the files of a data set in the data folder, verify every byte before it is used, and parse them.

CIFAR's files are pickles, which can request the execution of any program; they are read without executing anything.
"""

import gzip
import hashlib
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.data.catalog import CATALOG, Entry, File, Layout, Split
from ghostnoise.lab.data.source import Purpose, permutation
from ghostnoise.lab.errors import UserError
from ghostnoise.text import install_command

BOTH: tuple[Split, ...] = ("train", "test")
DIGITS_SPLIT_SEED = 0  # the digits have no official split


class Arrays(NamedTuple):
    """Images as they are stored (uint8) or signals (float32), and their labels."""

    pixels: NDArray[np.generic]
    labels: NDArray[np.int64]


class DamagedFile(Exception):
    """A file differs from the published one; the message describes the difference."""


@dataclass(frozen=True)
class Finding:
    """A folder with files of a data set: their contents, if they were read, and which are missing or damaged."""

    layout: Layout
    folder: Path
    contents: list[tuple[Path, bytes]]
    missing: list[str]
    damaged: list[str]

    @property
    def intact(self) -> bool:
        """Whether every file is present and identical to the published one."""
        return not self.missing and not self.damaged


def data_folder(given: Path | None) -> Path:
    """Return the data folder: the given one, or else $GHOSTNOISE_DATA, or else ~/.cache/ghostnoise-data."""
    return Path(given or os.environ.get("GHOSTNOISE_DATA") or "~/.cache/ghostnoise-data").expanduser()


def load(entry: Entry, folder: Path, split: Split) -> Arrays:
    """Read a split of a data set from the first folder in which it is intact."""
    found = find_intact(entry, folder, (split,))
    return parse(entry, split, found.contents)


def find_intact(entry: Entry, folder: Path, splits: tuple[Split, ...] = BOTH) -> Finding:
    """Return the first folder in which these splits are intact; raise a UserError if there is none."""
    findings, layout = [], entry.layout
    assert layout is not None, f"{entry.name} has no files"
    for finding in search(entry, folder, splits):
        if finding.intact:
            return finding
        findings.append(finding)
    remedy = f"run `ghostnoise data get {entry.name} --data-dir {folder}`, or copy the official files there"
    for finding in findings:
        if finding.damaged:
            raise UserError(f"{'; '.join(finding.damaged)}; {remedy}")
    for finding in findings:
        raise UserError(f"{finding.folder}: {', '.join(finding.missing)} not found; {remedy}")
    raise UserError(
        f"{entry.name}: no {' or '.join(splits)} images in {folder}; expected {_expected(layout, splits)}; {remedy}"
    )


def search(entry: Entry, folder: Path, splits: tuple[Split, ...] = BOTH, *, read: bool = True) -> Iterator[Finding]:
    """Iterate over the folders that contain files of these splits, intact or not, as `examine` finds them."""
    for name in entry.layout.folders if entry.layout else ():
        finding = examine(entry.layout, folder / name, splits, read=read)  # type: ignore[arg-type]
        if finding.contents or finding.damaged:
            yield finding


def examine(layout: Layout, folder: Path, splits: tuple[Split, ...] = BOTH, *, read: bool = True) -> Finding:
    """Read and verify the files of these splits in one folder; without `read`, look at their sizes only."""
    finding, check = Finding(layout, folder, [], [], []), _verified if read else _sized
    for file in layout.files(splits):
        try:
            if (content := _content(layout, folder, file, check)) is None:
                finding.missing.append(file.name)
            else:
                finding.contents.append(content)
        except DamagedFile as damage:
            finding.damaged.append(str(damage))
    return finding


def has_files(entry: Entry, folder: Path, splits: tuple[Split, ...]) -> bool:
    """Return whether one folder contains all files of these splits, damaged or not; they are not read."""
    return any(not finding.missing for finding in search(entry, folder, splits, read=False))


def md5_of(path: Path) -> str:
    """Return the MD5 checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def _md5(data: bytes = b"") -> "hashlib._Hash":
    return hashlib.md5(data, usedforsecurity=False)


def _paths(layout: Layout, folder: Path, file: File) -> list[Path]:
    plain = folder / file.name
    return [plain, folder / f"{file.name}.gz"] if layout.archive is None else [plain]


def _content(
    layout: Layout, folder: Path, file: File, check: Callable[[Path, File], bytes]
) -> tuple[Path, bytes] | None:
    """Return a file after a check, or None if it is missing; raise DamagedFile if no copy is intact."""
    damage = None
    for path in _paths(layout, folder, file):
        if path.is_file():
            try:
                return path, check(path, file)
            except DamagedFile as found:
                damage = damage or found
    if damage:
        raise damage
    return None


def _verified(path: Path, file: File) -> bytes:
    """Return the contents of `path`, uncompressed and verified. The file is read only once."""
    compressed = path.suffix == ".gz"
    try:
        with gzip.open(path) if compressed else path.open("rb") as stream:
            data = stream.read(file.size + 1)  # limits how much a compressed file can expand to
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(f"{path}: cannot be read ({error})") from None
    contents = "unpacks to" if compressed else "has"
    if len(data) != file.size:
        length = f"more than {file.size}" if len(data) > file.size else str(len(data))
        raise DamagedFile(f"{path}: damaged, {contents} {length} bytes instead of {file.size}")
    if (found := _md5(data).hexdigest()) != file.md5:
        raise DamagedFile(f"{path}: damaged, {contents} md5 {found} instead of {file.md5}")
    return data


def _sized(path: Path, file: File) -> bytes:
    """Compare the size of a file with that of the published one; a compressed file ends with the size of its contents.

    Returns no contents: the file is not read.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if path.suffix == ".gz":
                stream.seek(max(size - 4, 0))
                size = int.from_bytes(stream.read(4), "little")
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read ({error})") from None
    if size != file.size:
        raise DamagedFile(f"{path}: damaged, has {size} bytes instead of {file.size}")
    return b""


def _expected(layout: Layout, splits: tuple[Split, ...]) -> str:
    names = ", ".join(file.name for file in layout.files(splits))
    compressed = " (or .gz)" if layout.archive is None else ""
    return f"{names}{compressed} in {' or '.join(f'{name}/' for name in layout.folders)}"


def parse(entry: Entry, split: Split, contents: list[tuple[Path, bytes]]) -> Arrays:
    """Parse the files of a split, given in their official order, into pixels (N, C, H, W) and labels (N,)."""
    if entry.layout and entry.layout.archive is None:  # idx files
        (images_path, images), (labels_path, labels) = contents
        found = [Arrays(idx(images, 3, images_path)[:, None], idx(labels, 1, labels_path).astype(np.int64))]
    else:
        found = [cifar_pickle(data, path, entry.shape) for path, data in contents]
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
            f"digits: included in scikit-learn, which is not installed; run {install_command('lab')}"
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

"""Open the data set that the settings select."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostnoise.lab.config import own
from ghostnoise.lab.config.schema import DataSettings, ImageFolder, Images, OwnData, Signals
from ghostnoise.lab.data import catalog, files, signals
from ghostnoise.lab.data.catalog import Entry, Split
from ghostnoise.lab.data.files import Arrays
from ghostnoise.lab.data.image_folder import ImageFolderSource, class_names, split_folder
from ghostnoise.lab.data.in_memory import InMemorySource, select
from ghostnoise.lab.data.source import Purpose, Shard, Source, limited_indices, random_words, split_validation
from ghostnoise.lab.errors import UserError

RANDOM_SIZES: dict[Split, int] = {"train": 512, "test": 128}  # of random images in place of a data set


def open_source(
    data: DataSettings, folder: Path, *, batch_size: int, seed: int, device: torch.device, channels_last: bool = False,
    rank: int = 0, world: int = 1, workers: int | None = None,
) -> Source:  # fmt: skip
    """Open a data set. `batch_size` is over all `world` ranks; `workers` are processes that read image folders.

    Test images are read only if the run evaluates on them.
    """
    shard = Shard(batch_size, rank, world)
    if isinstance(data, ImageFolder) and not data.stand_in:
        return ImageFolderSource(data, folder / data.folder, shard, seed, device, channels_last, workers)
    entry, arrays = _train(data, folder)
    train = limited_indices(len(arrays.labels), _limit(data, "train"), "limit")
    if isinstance(data, Signals) and data.evaluate == "validation" and not data.stand_in:
        further = signals.load(folder, "validation")
        held_out = select(further, limited_indices(len(further.labels), data.test_limit, "test_limit"))
    elif data.evaluate == "test":
        test = _read(data, entry, folder, "test")
        held_out = select(test, limited_indices(len(test.labels), _limit(data, "test"), "test_limit"))
    else:
        train, validation = split_validation(train, seed if data.split_seed == "run" else data.split_seed)
        held_out = select(arrays, validation)
    padding = data.padding if isinstance(data, Images) else None
    return InMemorySource(entry, select(arrays, train), held_out, shard, seed, device, channels_last, padding)


def present(data: DataSettings, folder: Path) -> bool:
    """Return whether the files that the settings need are in `folder`, by their sizes; contents are not checked."""
    splits: tuple[Split, ...] = ("train", "test") if data.evaluate == "test" else ("train",)
    if data.stand_in or isinstance(data, OwnData):
        return True
    if not isinstance(data, ImageFolder):
        entry = catalog.find(data.name)
        return not entry.layout or files.has_files(entry, folder, splits)
    try:
        for split in splits:
            split_folder(folder / data.folder, split)
    except UserError:
        return False
    return True


def shape_and_classes(data: DataSettings, folder: Path) -> tuple[tuple[int, ...], int]:
    """Return the shape (C, H, W) or (C, L) of a sample and the number of classes.

    They are read from the images of folders and of the user's own data sets.
    """
    if isinstance(data, ImageFolder) and not data.stand_in:
        return (3, data.image_size, data.image_size), len(class_names(folder / data.folder))
    entry = _train(data, folder)[0] if isinstance(data, OwnData) else _entry(data)
    return entry.shape, entry.classes


def _train(data: DataSettings, folder: Path) -> tuple[Entry, Arrays]:
    """Return the description of a data set, and its training images."""
    if isinstance(data, OwnData):
        arrays = _own(data, folder, "train")
        return _described(data, arrays), arrays
    entry = _entry(data)
    return entry, _read(data, entry, folder, "train")


def _entry(data: DataSettings) -> Entry:
    """Return the entry of the data set; with `stand_in`, it has the sizes of the random images."""
    if isinstance(data, ImageFolder):
        shape = (3, data.image_size, data.image_size)
        constants = catalog.IMAGENET_MEAN, catalog.IMAGENET_STD
        entry = Entry(data.name, "images in folders", shape, catalog.FOLDER_CLASSES, *constants, 0, 0)
    else:
        entry = catalog.find(data.name)
    if data.stand_in:
        return replace(entry, train_size=RANDOM_SIZES["train"], test_size=RANDOM_SIZES["test"])
    return entry


def _read(data: DataSettings, entry: Entry, folder: Path, split: Split) -> Arrays:
    if data.stand_in:
        return _random(entry, split)
    if isinstance(data, Signals):
        return signals.load(folder, split)
    if isinstance(data, OwnData):
        return _own(data, folder, split, entry)
    return files.read_digits(split) if data.name == "digits" else files.load(entry, folder, split)


def _own(data: OwnData, folder: Path, split: Split, entry: Entry | None = None) -> Arrays:
    """Return what the function of the user returns, as arrays; raises a UserError if it is no data set.

    `entry` describes the training images, which those of another split must fit.
    """
    returned = own.call(data.name, "data", data.args, folder, split)
    rule = f"data.name={data.name!r}: returned {{}} for the split {split!r}; must return a pair (images, labels)"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UserError(rule.format(type(returned).__name__))
    pixels, labels = map(np.asarray, returned)
    if pixels.ndim not in (3, 4) or pixels.dtype.kind not in "uf" or (pixels.dtype.kind == "u" and pixels.itemsize > 1):
        raise UserError(
            f"{rule.format(f'images of shape {pixels.shape} in {pixels.dtype}')} with images (N, C, H, W) in uint8 or "
            "float32, or signals (N, C, L) in float32"
        )
    if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise UserError(
            f"{rule.format(f'labels of shape {labels.shape} in {labels.dtype}')} with a label, an integer of 0 or "
            f"more, for each of the {len(pixels)} images"
        )
    if entry is not None and (pixels.shape[1:] != entry.shape or labels.max() >= entry.classes):
        raise UserError(
            f"{rule.format(f'images of shape {pixels.shape[1:]} with labels up to {labels.max()}')} that fits the "
            f"training images, of shape {entry.shape} with labels up to {entry.classes - 1}"
        )
    if data.augment == "flip-crop" and pixels.dtype != np.uint8:
        raise UserError(f"data.augment='flip-crop' for {data.name!r}: needs images in uint8, not {pixels.dtype}")
    return Arrays(pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32), labels.astype(np.int64))


def _described(data: OwnData, train: Arrays) -> Entry:
    """Describe a data set of the user by its training images, which are normalized if they are in uint8."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if train.pixels.dtype == np.uint8:
        pixels: Any = train.pixels
        channels = [pixels[:, channel] / 255 for channel in range(pixels.shape[1])]
        mean, std = (tuple(float(getattr(each, name)()) for each in channels) for name in ("mean", "std"))
        if min(std) == 0:
            raise UserError(f"data.name={data.name!r}: a channel of its images is constant; leave this channel out")
    classes = int(train.labels.max()) + 1
    return Entry(data.name, data.name, train.pixels.shape[1:], classes, mean, std, len(train.labels), 0)


def _random(entry: Entry, split: Split) -> Arrays:
    """Return random images or signals and labels with the shape of the data set; they are the same in every run."""
    count, key = entry.size(split), 0 if split == "train" else 1
    pixels = count * int(np.prod(entry.shape))
    drawn = random_words(-(-pixels // 8) + count, 0, Purpose.STAND_IN, key)
    labels = (drawn[:count] % np.uint64(entry.classes)).astype(np.int64)
    values = drawn[count:].astype("<u8").view(np.uint8)[:pixels].reshape(count, *entry.shape)
    return Arrays(values if entry.mean else ((values - 127.5) / 73.9).astype(np.float32), labels)


def _limit(data: DataSettings, split: Split) -> int | None:
    """Return the limit; it is capped for random images, which are fewer than those of the data set."""
    limit = data.limit if split == "train" else data.test_limit
    return min(limit, RANDOM_SIZES[split]) if limit and data.stand_in else limit

"""Open the data set that the settings select."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data import catalog, files, signals
from ghostnoise.lab.data.catalog import Entry, Split
from ghostnoise.lab.data.image_folder import ImageFolderSource, class_names, split_folder
from ghostnoise.lab.data.in_memory import InMemorySource, select
from ghostnoise.lab.data.readers import Arrays, read_digits
from ghostnoise.lab.data.sampling import Purpose, limited_indices, random_words, split_validation
from ghostnoise.lab.data.source import Shard, Source
from ghostnoise.lab.errors import UserError

GENERATED = ("mnist1d", "digits")  # never missing
RANDOM_SIZES: dict[Split, int] = {"train": 512, "test": 128}  # of random images in place of a data set


def open_source(
    data: DataSettings, folder: Path, *, batch_size: int, seed: int, device: torch.device, channels_last: bool = False,
    rank: int = 0, world: int = 1, workers: int | None = None,
) -> Source:  # fmt: skip
    """Open a data set. `batch_size` is over all `world` ranks; `workers` are processes that read image folders.

    Test images are read only if the run evaluates on them.
    """
    shard = Shard(batch_size, rank, world)
    if data.name == "imagefolder" and not data.stand_in:
        return ImageFolderSource(data, _root(data, folder), shard, seed, device, channels_last, workers)
    entry = _entry(data)
    arrays = _read(data, entry, folder, "train")
    train = limited_indices(len(arrays.labels), _limit(data, "train"), "limit")
    if data.name == "mnist1d" and data.evaluate == "validation" and not data.stand_in:
        further = signals.load(folder, "validation")
        held_out = select(further, limited_indices(len(further.labels), data.test_limit, "test_limit"))
    elif data.evaluate == "test":
        test = _read(data, entry, folder, "test")
        held_out = select(test, limited_indices(len(test.labels), _limit(data, "test"), "test_limit"))
    else:
        train, validation = split_validation(train, seed if data.split_seed == "run" else data.split_seed)
        held_out = select(arrays, validation)
    return InMemorySource(
        entry, select(arrays, train), held_out, shard, seed, device, channels_last,
        data.padding if data.augment == "flip-crop" else None,
    )  # fmt: skip


def present(data: DataSettings, folder: Path) -> bool:
    """Return whether the files that the settings need are in `folder`; their contents are not checked."""
    splits: tuple[Split, ...] = ("train", "test") if data.evaluate == "test" else ("train",)
    if data.stand_in or data.name in GENERATED:
        return True
    if data.name != "imagefolder":
        return files.has_files(catalog.find(data.name), folder, splits)
    try:
        for split in splits:
            split_folder(_root(data, folder), split)
    except UserError:
        return False
    return True


def shape_and_classes(data: DataSettings, folder: Path) -> tuple[tuple[int, ...], int]:
    """Return the shape (C, H, W) or (C, L) of a sample and the number of classes, which image folders are read for."""
    if data.name == "imagefolder" and not data.stand_in:
        size = data.image_size or 224
        return (3, size, size), len(class_names(_root(data, folder)))
    entry = _entry(data)
    return entry.shape, entry.classes


def _root(data: DataSettings, folder: Path) -> Path:
    return folder / (data.folder or "")


def _entry(data: DataSettings) -> Entry:
    """Return the entry of the data set; with `stand_in`, it has the sizes of the random images."""
    if data.name == "imagefolder":
        size = data.image_size or 224
        entry = Entry(
            data.name, "images in folders", (3, size, size), catalog.FOLDER_CLASSES, catalog.IMAGENET_MEAN,
            catalog.IMAGENET_STD, 0, 0,
        )  # fmt: skip
    else:
        entry = catalog.find(data.name)
    if data.stand_in:
        return replace(entry, train_size=RANDOM_SIZES["train"], test_size=RANDOM_SIZES["test"])
    return entry


def _read(data: DataSettings, entry: Entry, folder: Path, split: Split) -> Arrays:
    if data.stand_in:
        return _random(entry, split)
    if data.name == "mnist1d":
        return signals.load(folder, split)
    return read_digits(split) if data.name == "digits" else files.load(entry, folder, split)


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

"""Open a data set as the settings say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data import catalog, digits, files
from ghostnoise.lab.data.catalog import Entry, Part
from ghostnoise.lab.data.draws import Purpose, words
from ghostnoise.lab.data.folder import Folder, class_names, part_folder
from ghostnoise.lab.data.readers import Arrays
from ghostnoise.lab.data.resident import Resident, chosen
from ghostnoise.lab.data.source import Share, Source
from ghostnoise.lab.data.splits import limited, validation
from ghostnoise.lab.errors import UserError

STAND_IN_SIZES: dict[Part, int] = {"train": 512, "test": 128}


def open_source(
    data: DataSettings, folder: Path, *, batch_size: int, seed: int, device: torch.device, channels_last: bool = False,
    rank: int = 0, world: int = 1, workers: int | None = None,
) -> Source:  # fmt: skip
    """Open a set: `batch_size` is over all `world` ranks, and `workers` are processes that read image folders.

    Test images are read if they are evaluated on, and not otherwise.
    """
    share = Share(batch_size, rank, world)
    if data.name == "imagefolder" and not data.stand_in:
        return Folder(data, _root(data, folder), share, seed, device, channels_last, workers)
    entry = _entry(data)
    arrays = _read(data, entry, folder, "train")
    rows = limited(len(arrays.labels), _limit(data, "train"), "limit")
    if data.evaluate == "test":
        unseen = _read(data, entry, folder, "test")
        held_out = chosen(unseen, limited(len(unseen.labels), _limit(data, "test"), "test_limit"))
    else:
        rows, held_out_rows = validation(rows, data.split_seed)
        held_out = chosen(arrays, held_out_rows)
    return Resident(
        entry, chosen(arrays, rows), held_out, share, seed, device, channels_last,
        data.padding if data.augment == "flip-crop" else None,
    )  # fmt: skip


def present(data: DataSettings, folder: Path) -> bool:
    """Whether the files that the settings need are there; not whether they are whole."""
    parts: tuple[Part, ...] = ("train", "test") if data.evaluate == "test" else ("train",)
    if data.stand_in or data.name == "digits":
        return True
    if data.name != "imagefolder":
        return files.there(catalog.find(data.name), folder, parts)
    try:
        for part in parts:
            part_folder(_root(data, folder), part)
    except UserError:
        return False
    return True


def facts(data: DataSettings, folder: Path) -> tuple[tuple[int, int, int], int]:
    """The shape (C, H, W) of the images and the number of classes; of an image folder, those that it has now."""
    if data.name == "imagefolder" and not data.stand_in:
        size = data.image_size or 224
        return (3, size, size), len(class_names(_root(data, folder)))
    entry = _entry(data)
    return entry.shape, entry.classes


def _root(data: DataSettings, folder: Path) -> Path:
    return folder / (data.folder or "")


def _entry(data: DataSettings) -> Entry:
    """The set, with the sizes of its stand-in where that is asked for."""
    if data.name == "imagefolder":
        size = data.image_size or 224
        entry = Entry(
            data.name, "images in folders", (3, size, size), catalog.FOLDER_CLASSES, catalog.IMAGENET_MEAN,
            catalog.IMAGENET_STD, 0, 0,
        )  # fmt: skip
    else:
        entry = catalog.find(data.name)
    if data.stand_in:
        return replace(entry, train_size=STAND_IN_SIZES["train"], test_size=STAND_IN_SIZES["test"])
    return entry


def _read(data: DataSettings, entry: Entry, folder: Path, part: Part) -> Arrays:
    if data.stand_in:
        return _random(entry, part)
    return digits.load(part) if data.name == "digits" else files.load(entry, folder, part)


def _random(entry: Entry, part: Part) -> Arrays:
    """Random images and labels of the set's shape, always the same ones."""
    count, which = entry.size(part), 0 if part == "train" else 1
    pixels = count * int(np.prod(entry.shape))
    drawn = words(-(-pixels // 8) + count, 0, Purpose.STAND_IN, which)
    labels = (drawn[:count] % np.uint64(entry.classes)).astype(np.int64)
    return Arrays(drawn[count:].astype("<u8").view(np.uint8)[:pixels].reshape(count, *entry.shape), labels)


def _limit(data: DataSettings, part: Part) -> int | None:
    """The limit, which may be of the set that a smaller stand-in is for."""
    limit = data.limit if part == "train" else data.test_limit
    return min(limit, STAND_IN_SIZES[part]) if limit and data.stand_in else limit

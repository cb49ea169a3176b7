"""Images in folders, one folder a class: read, cropped and resized by worker processes."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ghostnoise import doctor
from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data.augment import Normalization
from ghostnoise.lab.data.catalog import IMAGENET_MEAN, IMAGENET_STD, Part
from ghostnoise.lab.data.draws import Purpose, order, words
from ghostnoise.lab.data.source import Batch, Facts, Share
from ghostnoise.lab.data.splits import Rows, limited, validation
from ghostnoise.lab.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
LAYOUT = "train/CLASS/*.jpg, and for tests val/CLASS/*.jpg or test/CLASS/*.jpg"


class Listing(NamedTuple):
    """Paths of images, and the class of each."""

    paths: list[str]
    labels: list[int]


def part_folder(root: Path, part: Part) -> Path:
    """Where a part lies: train/, or val/ or else test/."""
    names = ("train",) if part == "train" else ("val", "test")
    for name in names:
        if (root / name).is_dir():
            return root / name
    looked_for = " or ".join(f"{root / name}/" for name in names)
    raise UserError(f"{looked_for}: no such folder; lay the images out as {LAYOUT}")


def class_names(root: Path) -> list[str]:
    """The classes: the names of the folders in train/, sorted."""
    train = part_folder(root, "train")
    names = sorted(entry.name for entry in os.scandir(train) if entry.is_dir())
    if not names:
        raise UserError(f"{train}: no folder in it; lay the images out as {LAYOUT}")
    return names


def list_images(root: Path, part: Part) -> Listing:
    """All images of a part, in the order of their paths; every class must have one to train on."""
    classes, place = class_names(root), part_folder(root, part)
    unknown = {entry.name for entry in os.scandir(place) if entry.is_dir()} - set(classes)
    if unknown:
        raise UserError(f"{place / min(unknown)}: no such class in train/; remove it, or add its training images")
    listing = Listing([], [])
    for label, name in enumerate(classes):
        paths = sorted(str(path) for path in (place / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not paths and part == "train":
            raise UserError(f"{place / name}: no image in it ({', '.join(sorted(SUFFIXES))}); add some or remove it")
        listing.paths.extend(paths)
        listing.labels.extend([label] * len(paths))
    if not listing.paths:
        raise UserError(f"{place}: no image in it; lay the images out as {LAYOUT}")
    return listing


class _Pictures(Dataset[tuple[Tensor, int] | str]):
    """Decoded images, each with random draws of its own, by (epoch, index); text where one cannot be read."""

    def __init__(self, listing: Listing, look: Callable[[Any], Any], seed: int) -> None:
        self.listing, self.look, self.seed = listing, look, seed

    def __getitem__(self, at: tuple[int, int]) -> tuple[Tensor, int] | str:
        from PIL import Image, UnidentifiedImageError

        epoch, index = at
        path = self.listing.paths[index]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            return f"{path}: cannot be read as an image ({error}); replace or remove it"
        with _seeded(int(words(1, self.seed, Purpose.AUGMENT, epoch, index)[0] >> 1)):
            return self.look(picture), self.listing.labels[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Lend torchvision, which draws from the global generator of the CPU, one that is seeded; then put it back."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _collate(items: list[tuple[Tensor, int] | str]) -> Batch | str:
    """A batch, or the first item's complaint: an exception of a worker would arrive with its traceback."""
    good = []
    for item in items:
        if isinstance(item, str):
            return item
        good.append(item)
    return torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good])


class _Plan:
    """The batches of an epoch as (epoch, index), made one at a time: a large set's would fill the memory."""

    def __init__(self, batches: Sequence[Rows], epoch: int) -> None:
        self.batches, self.epoch = batches, epoch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self.epoch, row) for row in rows.tolist()] for rows in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Folder:
    """A source that reads images from disk as they are needed."""

    def __init__(
        self, data: DataSettings, root: Path, share: Share, seed: int, device: torch.device,
        channels_last: bool = False, workers: int | None = None,
    ) -> None:  # fmt: skip
        """`workers` are processes that read; by default one for each core, up to 8."""
        size, resize = data.image_size or 224, data.resize or 256
        listing = list_images(root, "train")
        rows = limited(len(listing.paths), data.limit, "limit")
        if data.evaluate == "test":
            unseen = list_images(root, "test")
            held_out = limited(len(unseen.paths), data.test_limit, "test_limit")
        else:
            unseen = listing
            rows, held_out = validation(rows, data.split_seed)
        plain, cropped = _looks(size, resize)
        self._train = _Pictures(listing, cropped if data.augment == "resized-crop" else plain, seed)
        self._unseen = _Pictures(unseen, plain, seed)
        self._rows, self._held_out = rows, held_out
        self._share, self._seed, self._device = share, seed, device
        self._channels_last, self._workers = channels_last, workers
        shape = (3, size, size)
        self._normalize = Normalization(shape, IMAGENET_MEAN, IMAGENET_STD, device, channels_last)
        self.facts = Facts(shape, len(class_names(root)), len(rows), len(held_out))
        self.steps = share.steps(len(rows))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's part of the training batches of an epoch, from step `start` on."""
        shuffled = self._rows[order(len(self._rows), self._seed, Purpose.EPOCH, epoch)]
        return self._load(
            self._train, [shuffled[self._share.of_step(step)] for step in range(start, self.steps)], epoch
        )

    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of the held-out images, resized and cropped in the centre."""
        return self._load(self._unseen, [self._held_out[rows] for rows in self._share.held_out(len(self._held_out))], 0)

    def _load(self, pictures: _Pictures, batches: Sequence[Rows], epoch: int) -> Iterator[Batch]:
        workers = _workers(self._share.world) if self._workers is None else self._workers
        loader: DataLoader[Any] = DataLoader(
            pictures,
            batch_sampler=_Plan(batches, epoch),
            num_workers=min(workers, len(batches)),
            collate_fn=_collate,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # from which it seeds its workers; by default the global one
        )
        for batch in loader:
            if isinstance(batch, str):
                raise UserError(batch)
            images, labels = (each.to(self._device, non_blocking=True) for each in batch)
            yield self._normalize(images.permute(0, 2, 3, 1).contiguous() if self._channels_last else images), labels


def _workers(world: int) -> int:
    """Processes to read with: the cores that this rank has for itself, up to 8; none where there is but one core."""
    cores = doctor.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return min(8, cores) if cores > 1 else 0


def _looks(size: int, resize: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What is done to an image for evaluation, and for training with random crops; both give uint8 (3, size, size)."""
    try:
        vision = importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError) as error:  # a RuntimeError where it does not fit the torch beside it
        raise UserError(
            f"imagefolder needs torchvision, which cannot be imported ({error}); pip install 'ghostnoise[imagenet]'"
        ) from None
    plain = vision.Compose([vision.Resize(resize), vision.CenterCrop(size), vision.PILToTensor()])
    random = [vision.RandomResizedCrop(size), vision.RandomHorizontalFlip(), vision.PILToTensor()]
    return plain, vision.Compose(random)

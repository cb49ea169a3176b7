"""Image folders with one folder per class, which worker processes read, resize and crop."""

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
from ghostnoise.lab.config.schema import ImageFolder
from ghostnoise.lab.data.catalog import IMAGENET_MEAN, IMAGENET_STD, Split
from ghostnoise.lab.data.in_memory import Normalization
from ghostnoise.lab.data.source import (
    Batch,
    DatasetInfo,
    Indices,
    Purpose,
    Shard,
    limited_indices,
    permutation,
    random_words,
    split_validation,
)
from ghostnoise.lab.errors import UserError, import_failure
from ghostnoise.text import install_command

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
LAYOUT = "train/CLASS/*.jpg and, for evaluate=test, val/CLASS/*.jpg or test/CLASS/*.jpg"


class Listing(NamedTuple):
    """Paths of images, and their labels."""

    paths: list[str]
    labels: list[int]


def split_folder(root: Path, split: Split) -> Path:
    """Return the folder of a split: train/ for training images, val/ or else test/ for test images."""
    names = ("train",) if split == "train" else ("val", "test")
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = " or ".join(f"{root / name}/" for name in names)
    raise UserError(f"{expected}: folder not found; arrange the images as {LAYOUT}")


def class_names(root: Path) -> list[str]:
    """Return the classes: the names of the folders in train/, sorted."""
    train = split_folder(root, "train")
    names = sorted(entry.name for entry in os.scandir(train) if entry.is_dir())
    if not names:
        raise UserError(f"{train}: contains no folders; arrange the images as {LAYOUT}")
    return names


def list_images(root: Path, split: Split) -> Listing:
    """List the images of a split, sorted by class and path; every class must have training images."""
    classes, folder = class_names(root), split_folder(root, split)
    unknown = {entry.name for entry in os.scandir(folder) if entry.is_dir()} - set(classes)
    if unknown:
        raise UserError(f"{folder / min(unknown)}: no such class in train/; remove it, or add its training images")
    listing = Listing([], [])
    for label, name in enumerate(classes):
        paths = sorted(str(path) for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not paths and split == "train":
            raise UserError(
                f"{folder / name}: contains no images ({', '.join(sorted(SUFFIXES))}); add some, or remove the folder"
            )
        listing.paths.extend(paths)
        listing.labels.extend([label] * len(paths))
    if not listing.paths:
        raise UserError(f"{folder}: contains no images; arrange the images as {LAYOUT}")
    return listing


class _Decoded(Dataset[tuple[Tensor, int] | str]):
    """Decoded and transformed images by (epoch, index), each seeded separately; an error message if unreadable."""

    def __init__(self, listing: Listing, transform: Callable[[Any], Any], seed: int) -> None:
        self.listing, self.transform, self.seed = listing, transform, seed

    def __getitem__(self, at: tuple[int, int]) -> tuple[Tensor, int] | str:
        from PIL import Image, UnidentifiedImageError

        epoch, index = at
        path = self.listing.paths[index]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            return f"{path}: cannot be read as an image ({error}); replace or remove it"
        with _seeded(int(random_words(1, self.seed, Purpose.AUGMENT, epoch, index)[0] >> 1)):
            return self.transform(picture), self.listing.labels[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Temporarily seed the global CPU generator, which torchvision draws from, and restore its state afterwards."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _collate(items: list[tuple[Tensor, int] | str]) -> Batch | str:
    """Return a batch, or the first error message: an exception in a worker would include its traceback."""
    good = []
    for item in items:
        if isinstance(item, str):
            return item
        good.append(item)
    return torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good])


class _BatchSampler:
    """The batches of an epoch as lists of (epoch, index), created lazily since large data sets have many."""

    def __init__(self, batches: Sequence[Indices], epoch: int) -> None:
        self.batches, self.epoch = batches, epoch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self.epoch, index) for index in indices.tolist()] for indices in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class ImageFolderSource:
    """A source that reads images from disk when they are needed."""

    def __init__(
        self, data: ImageFolder, root: Path, shard: Shard, seed: int, device: torch.device,
        channels_last: bool = False, workers: int | None = None,
    ) -> None:  # fmt: skip
        """`workers` is the number of reading processes; by default one per core, at most 8."""
        size, resize = data.image_size, data.resize
        train = list_images(root, "train")
        indices = limited_indices(len(train.paths), data.limit, "limit")
        if data.evaluate == "test":
            evaluated = list_images(root, "test")
            held_out = limited_indices(len(evaluated.paths), data.test_limit, "test_limit")
        else:
            evaluated = train
            indices, held_out = split_validation(indices, seed if data.split_seed == "run" else data.split_seed)
        plain, random_crop = _transforms(size, resize)
        self._train = _Decoded(train, random_crop if data.augment == "resized-crop" else plain, seed)
        self._evaluated = _Decoded(evaluated, plain, seed)
        self._indices, self._held_out = indices, held_out
        self._shard, self._seed, self._device = shard, seed, device
        self._channels_last, self._workers = channels_last, workers
        shape = (3, size, size)
        self._normalize = Normalization(shape, IMAGENET_MEAN, IMAGENET_STD, device, channels_last)
        self.info = DatasetInfo(shape, len(class_names(root)), len(indices), len(held_out))
        self.steps = shard.steps(len(indices))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's part of the training batches of an epoch, from step `start`."""
        shuffled = self._indices[permutation(len(self._indices), self._seed, Purpose.EPOCH, epoch)]
        steps = range(start, self.steps)
        return self._load(self._train, [shuffled[self._shard.step_slice(step)] for step in steps], epoch)

    def evaluation(self) -> Iterator[Batch]:
        """Iterate over this rank's part of the held-out images, resized and cropped in the center."""
        slices = self._shard.evaluation_slices(len(self._held_out))
        return self._load(self._evaluated, [self._held_out[each] for each in slices], 0)

    def _load(self, images: _Decoded, batches: Sequence[Indices], epoch: int) -> Iterator[Batch]:
        workers = _workers(self._shard.world) if self._workers is None else self._workers
        loader: DataLoader[Any] = DataLoader(
            images,
            batch_sampler=_BatchSampler(batches, epoch),
            num_workers=min(workers, len(batches)),
            collate_fn=_collate,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # seeds the workers; the default is the global generator
        )
        for batch in loader:
            if isinstance(batch, str):
                raise UserError(batch)
            pixels, labels = (each.to(self._device, non_blocking=True) for each in batch)
            yield self._normalize(pixels.permute(0, 2, 3, 1).contiguous() if self._channels_last else pixels), labels


def _workers(world: int) -> int:
    """Return the default number of reading processes: the cores of this rank, at most 8; 0 with a single core."""
    cores = doctor.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return min(8, cores) if cores > 1 else 0


def _transforms(size: int, resize: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the transforms for evaluation and for training with random crops, to (3, size, size) in uint8."""
    try:
        vision = importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError) as error:  # RuntimeError if it was built for another torch
        why = import_failure(error, install_command("imagenet"))
        raise UserError(f"imagefolder: needs torchvision, which cannot be imported {why}") from None
    plain = vision.Compose([vision.Resize(resize), vision.CenterCrop(size), vision.PILToTensor()])
    random = [vision.RandomResizedCrop(size), vision.RandomHorizontalFlip(), vision.PILToTensor()]
    return plain, vision.Compose(random)

"""The known data sets: shape, constants of the normalization, and the official files with their checksums."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ghostnoise.lab.errors import UserError
from ghostnoise.text import did_you_mean

Split: TypeAlias = Literal["train", "test"]


@dataclass(frozen=True)
class File:
    """The name, size in bytes and MD5 checksum of a published file."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Layout:
    """A folder structure of a data set, and the downloads that provide it."""

    folders: tuple[str, ...]
    """Possible names of its folder in the data folder; downloads are stored in the first."""
    train: tuple[File, ...]
    test: tuple[File, ...]
    downloads: tuple[File, ...]
    addresses: tuple[str, ...]
    """URL prefixes of the downloads, in the order in which they are tried."""

    @property
    def archive(self) -> File | None:
        """The download that contains all files, or None if each file is a separate download."""
        return self.downloads[0] if self.downloads[0].name.endswith(".tar.gz") else None

    def files(self, splits: tuple[Split, ...]) -> tuple[File, ...]:
        """Return the files of these splits."""
        return tuple(file for split in splits for file in (self.train if split == "train" else self.test))


@dataclass(frozen=True)
class Entry:
    """A data set. `mean` and `std` are the constants of its normalization per channel, for pixels divided by 255.

    They are those of the training pixels, except for the std of CIFAR-10: as in much published code, it is the mean of
    the std of each training image, about 0.8 times that of the pixels.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_size: int
    test_size: int
    layout: Layout | None = None
    """Its files; None if it has none: it is part of a package, or generated."""

    def size(self, split: Split) -> int:
        """Return the number of images of a split."""
        return self.train_size if split == "train" else self.test_size


def _idx(folders: tuple[str, ...], addresses: tuple[str, ...], plain: list[str], gz: list[tuple[int, str]]) -> Layout:
    """Return the layout of MNIST's four files, which Fashion-MNIST shares."""
    names = [
        ("train-images-idx3-ubyte", 47_040_016), ("train-labels-idx1-ubyte", 60_008),
        ("t10k-images-idx3-ubyte", 7_840_016), ("t10k-labels-idx1-ubyte", 10_008),
    ]  # fmt: skip
    files = tuple(File(name, size, md5) for (name, size), md5 in zip(names, plain, strict=True))
    zipped = tuple(File(f"{name}.gz", size, md5) for (name, _), (size, md5) in zip(names, gz, strict=True))
    return Layout(folders, files[:2], files[2:], zipped, addresses)


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10 = Layout(
    ("cifar-10-batches-py",),
    (
        File("data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
        File("data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    (File("test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),),
    (File("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),),
    _TORONTO,
)
_CIFAR100 = Layout(
    ("cifar-100-python",),
    (File("train", 155_249_918, "16019d7e3df5f24257cddd939b257f8d"),),
    (File("test", 31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
    (File("cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),),
    _TORONTO,
)
_MNIST = _idx(
    ("mnist", "MNIST/raw", "MNIST"),
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    [
        "6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637",
    ],
    [
        (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"), (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        (1_648_877, "9fb629c4189551a2d022fa330f9573f3"), (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ],
)  # fmt: skip
_FASHION = _idx(
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
    [
        "f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965",
    ],
    [
        (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"), (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        (4_422_102, "bef4ecab320f06d8554ea6380940ec79"), (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ],
)  # fmt: skip

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FOLDER_CLASSES = 10  # of random images in place of an image folder

CATALOG = {
    entry.name: entry
    for entry in (
        Entry("mnist1d", "MNIST-1D", (1, 40), 10, (), (), 2_000, 8_000),
        Entry("digits", "scikit-learn's handwritten digits", (1, 8, 8), 10, (0.3057,), (0.3761,), 1_437, 360),
        Entry("mnist", "MNIST", (1, 28, 28), 10, (0.1307,), (0.3081,), 60_000, 10_000, _MNIST),
        Entry("fashion-mnist", "Fashion-MNIST", (1, 28, 28), 10, (0.2860,), (0.3530,), 60_000, 10_000, _FASHION),
        Entry(
            "cifar10", "CIFAR-10", (3, 32, 32), 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010),
            50_000, 10_000, _CIFAR10,
        ),
        Entry(
            "cifar100", "CIFAR-100", (3, 32, 32), 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761),
            50_000, 10_000, _CIFAR100,
        ),
    )
}  # fmt: skip


def find(name: str) -> Entry:
    """Return the data set called `name`."""
    if name in CATALOG:
        return CATALOG[name]
    known = ", ".join([*CATALOG, "imagefolder"])
    suggestion = did_you_mean(name, CATALOG, cutoff=0.4)
    raise UserError(f"{name}: unknown data set; must be one of {known}" + (f"; {suggestion}" if suggestion else ""))

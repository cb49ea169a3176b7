import importlib
import random
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data import image_folder, open_source
from ghostnoise.lab.data.source import Purpose, random_words
from ghostnoise.lab.errors import UserError
from support.batches import global_numpy, same

importlib.import_module("startup.sitecustomize")
vision = importlib.import_module("torchvision.transforms")

CPU = torch.device("cpu")
CLASSES = ["ant", "bee", "cat"]
SIZE = 12
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core


def picture(seed, size=(20, 16), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images of various sizes, modes and names; the number in the name is the seed."""
    made = tmp_path_factory.mktemp("images")
    for part, first, count in (("train", 0, 24), ("val", 100, 10)):
        for at in range(count):
            place = made / "set" / part / CLASSES[at % 3] / ("more" if at % 5 == 0 else "")
            place.mkdir(parents=True, exist_ok=True)
            name = f"{first + at:03}{('.png', '.PNG', '.bmp')[at % 3]}"
            picture(first + at, (14 + at % 4, 13 + at % 6), ("RGB", "L", "P")[at % 7 % 3]).save(place / name)
    (made / "set" / "train" / "ant" / "notes.txt").write_text("no image")
    return made


def settings(**given):
    return DataSettings(name="imagefolder", **{"folder": "set", "image_size": SIZE, "resize": 14, **given})


def source(root, batch_size=4, *, data=None, **options):
    options = {"seed": 3, "device": CPU, "workers": 0, **options}
    return open_source(data or settings(augment="resized-crop"), root, batch_size=batch_size, **options)


def pixels(x):
    return (x * STD[:, None, None] + MEAN[:, None, None]).mul(255).round().to(torch.uint8)


def test_images_are_listed_by_class_and_path(root):
    listing = image_folder.list_images(root / "set", "train")
    assert image_folder.class_names(root / "set") == CLASSES
    assert len(listing.paths) == 24
    assert listing.labels == sorted(listing.labels)
    assert listing.labels == [CLASSES.index(path.split("/train/")[1].split("/")[0]) for path in listing.paths]
    assert listing.paths == sorted(listing.paths)
    assert len(image_folder.list_images(root / "set", "test").paths) == 10


def test_info(root):
    made = source(root)
    assert made.info.shape == (3, SIZE, SIZE)
    assert (made.info.classes, made.info.train_size, made.info.eval_size) == (3, 22, 2)
    assert made.steps == 5
    made = source(root, data=settings(evaluate="test", limit=20, test_limit=5))
    assert (made.info.train_size, made.info.eval_size, made.steps) == (20, 5, 5)


def test_evaluation_resizes_and_crops_the_center(root):
    """Compare with torchvision's transforms of each file, in order."""
    listing = image_folder.list_images(root / "set", "test")
    look = vision.Compose([vision.Resize(14), vision.CenterCrop(SIZE), vision.PILToTensor()])
    made = source(root, data=settings(evaluate="test"))
    x, y = (torch.cat(parts) for parts in zip(*made.evaluation(), strict=True))
    assert y.tolist() == listing.labels
    for image, path in zip(x, listing.paths, strict=True):
        assert torch.equal(pixels(image), look(Image.open(path).convert("RGB")))


def test_training_without_augmentation_uses_the_transform_of_evaluation(root):
    data = settings(evaluate="test")
    look = vision.Compose([vision.Resize(14), vision.CenterCrop(SIZE), vision.PILToTensor()])
    listing = image_folder.list_images(root / "set", "train")
    looks = {
        look(Image.open(path).convert("RGB")).numpy().tobytes(): label for path, label in zip(*listing, strict=True)
    }
    seen = [
        (pixels(image).numpy().tobytes(), int(label))
        for x, y in source(root, data=data).batches(0)
        for image, label in zip(x, y, strict=True)
    ]
    assert sorted(seen) == sorted(looks.items())  # all 24, each once, with its own label


def test_random_crops_are_those_of_torchvision_with_a_seed_for_each_image(root):
    made, listing = (
        source(root, data=settings(augment="resized-crop", evaluate="test")),
        image_folder.list_images(root / "set", "train"),
    )
    look = vision.Compose([vision.RandomResizedCrop(SIZE), vision.RandomHorizontalFlip(), vision.PILToTensor()])
    expected = {}
    with torch.random.fork_rng(devices=[]):
        for index, path in enumerate(listing.paths):
            torch.manual_seed(int(random_words(1, 3, Purpose.AUGMENT, 1, index)[0] >> 1))
            expected[look(Image.open(path).convert("RGB")).numpy().tobytes()] = listing.labels[index]
    seen = {
        pixels(image).numpy().tobytes(): int(label)
        for x, y in made.batches(1)
        for image, label in zip(x, y, strict=True)
    }
    assert seen == expected


def test_workers_and_resuming_do_not_affect_batches(root):
    whole = list(source(root).batches(2))
    assert len(whole) == 5
    same(source(root, workers=2).batches(2), whole)
    same(source(root).batches(2, start=3), whole[3:])
    same(source(root, workers=2).batches(2, start=1), whole[1:])
    same(source(root, workers=2).evaluation(), source(root).evaluation())
    assert list(source(root, workers=2).batches(2, start=5)) == []


def test_ranks_partition_the_batches_of_one_process(root):
    data = settings(augment="resized-crop", evaluate="test")
    ranks = [source(root, data=data, rank=rank, world=2) for rank in range(2)]
    joined = [
        tuple(map(torch.cat, zip(*parts, strict=True)))
        for parts in zip(*(each.batches(0) for each in ranks), strict=True)
    ]
    same(joined, source(root, data=data).batches(0))
    labels = [label for each in ranks for _, y in each.evaluation() for label in y.tolist()]
    assert labels == image_folder.list_images(root / "set", "test").labels


def test_epochs_and_seeds_differ(root):
    first, epoch, seed = (
        next(made) for made in (source(root).batches(0), source(root).batches(1), source(root, seed=4).batches(0))
    )
    assert not torch.equal(first[0], epoch[0])
    assert not torch.equal(first[0], seed[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_no_global_generator_is_used(root, workers):
    torch.manual_seed(5)
    made = source(root, workers=workers)
    before = torch.get_rng_state(), global_numpy(), random.getstate()
    list(made.batches(0))
    list(made.evaluation())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert global_numpy() == before[1]
    assert random.getstate() == before[2]


def test_channels_last(root):
    found, expected = list(source(root, channels_last=True).batches(0)), list(source(root).batches(0))
    same(found, expected)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in found)
    assert all(x.dtype == torch.float32 and y.dtype == torch.int64 for x, y in found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_an_unreadable_image_is_named(tmp_path, workers, content):
    for name in CLASSES:
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
        picture(1).save(tmp_path / "set" / "train" / name / "1.png")
    path = tmp_path / "set" / "train" / "bee" / "2.png"
    whole = (path.parent / "1.png").read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    made = source(tmp_path, 3, workers=workers)
    with pytest.raises(UserError) as raised:
        [*made.batches(0), *made.evaluation()]
    assert str(raised.value).startswith(f"{path}: cannot be read as an image (")
    assert "\n" not in str(raised.value)


def test_folders_that_are_missing_empty_or_unknown(tmp_path):
    data = settings(evaluate="test")
    with pytest.raises(UserError, match=f"{tmp_path}/set/train/: folder not found; arrange the images as train/CLASS"):
        source(tmp_path, data=data)
    (tmp_path / "set" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="set/train: contains no folders; arrange"):
        source(tmp_path, data=data)
    (tmp_path / "set" / "train" / "ant").mkdir()
    with pytest.raises(UserError, match="set/train/ant: contains no images"):
        source(tmp_path, data=data)
    picture(1).save(tmp_path / "set" / "train" / "ant" / "1.png")
    with pytest.raises(UserError, match=f"{tmp_path}/set/val/ or {tmp_path}/set/test/: folder not found"):
        source(tmp_path, 1, data=data)
    (tmp_path / "set" / "test" / "wasp").mkdir(parents=True)
    with pytest.raises(UserError, match="set/test/wasp: no such class in train/; remove it"):
        source(tmp_path, 1, data=data)
    (tmp_path / "set" / "test" / "wasp").rename(tmp_path / "set" / "test" / "ant")
    with pytest.raises(UserError, match="set/test: contains no images"):
        source(tmp_path, 1, data=data)
    picture(2).save(tmp_path / "set" / "test" / "ant" / "2.png")
    assert source(tmp_path, 1, data=data).info.eval_size == 1


def test_without_torchvision(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(UserError, match=r"imagefolder: needs torchvision.*pip install .*\[imagenet\]'"):
        source(root)


def test_default_number_of_workers(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, world, expected in ((1, 1, 0), (2, 1, 2), (64, 1, 8), (8, 4, 2), (4, 4, 0)):
        monkeypatch.setattr(image_folder.os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert image_folder._workers(world) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert image_folder._workers(64) == 2

import numpy as np
import pytest
import torch

from ghostnoise.lab.config.schema import DataSettings
from ghostnoise.lab.data import DatasetInfo, catalog, files, open_source, present, shape_and_classes
from ghostnoise.lab.data.in_memory import PaddedImages
from ghostnoise.lab.errors import UserError
from support.datasets import small, write

CPU = torch.device("cpu")
NAMES = [*catalog.CATALOG, "imagefolder"]


def opened(data, folder, batch_size=5, **options):
    return open_source(data, folder, **{"batch_size": batch_size, "seed": 0, "device": CPU, **options})


def settings(name, **given):
    return DataSettings(
        name=name, **({"folder": "set", "image_size": 8, "resize": 8} if name == "imagefolder" else {}), **given
    )


@pytest.fixture(params=["mnist", "fashion-mnist", "cifar10", "cifar100"])
def written(request, tmp_path, monkeypatch):
    """A small data set, written to disk, in place of the real one."""
    entry, arrays = small(request.param, train=200)
    monkeypatch.setitem(catalog.CATALOG, request.param, entry)
    write(entry.layout, arrays, tmp_path / entry.layout.folders[0])
    return entry, arrays, tmp_path


def raw(source, entry):
    """Return all images of an epoch or of the evaluation, converted back to pixels."""
    std, mean = (torch.tensor(each)[:, None, None] for each in (entry.std, entry.mean))
    x, y = (torch.cat(parts) for parts in zip(*source, strict=True))
    pixels = ((x * std + mean) * 255).round().to(torch.uint8).numpy()
    return sorted((label, image.tobytes()) for label, image in zip(y.tolist(), pixels, strict=True))


def stored(arrays):
    return sorted((label, image.tobytes()) for label, image in zip(arrays.labels.tolist(), arrays.pixels, strict=True))


def test_validation_and_training_are_the_training_set(written):
    entry, arrays, folder = written
    source = opened(settings(entry.name), folder)
    assert source.info == DatasetInfo(entry.shape, entry.classes, 180, 20)
    assert source.steps == 36
    seen = [*raw(source.batches(0), entry), *raw(source.evaluation(), entry)]
    assert sorted(seen) == stored(arrays["train"])


def test_evaluate_test_trains_on_all_and_evaluates_on_the_test_set(written):
    entry, arrays, folder = written
    source = opened(settings(entry.name, evaluate="test"), folder)
    assert source.info == DatasetInfo(entry.shape, entry.classes, 200, 20)
    assert raw(source.batches(0), entry) == stored(arrays["train"])
    assert raw(source.evaluation(), entry) == stored(arrays["test"])


def test_test_images_are_read_only_if_needed(written):
    entry, _, folder = written
    for file in entry.layout.test:
        (folder / entry.layout.folders[0] / file.name).unlink()
    assert present(settings(entry.name), folder)
    assert opened(settings(entry.name), folder).info.eval_size == 20
    assert not present(settings(entry.name, evaluate="test"), folder)
    with pytest.raises(UserError, match=f"{entry.name}: no test images in {folder}; expected t"):
        opened(settings(entry.name, evaluate="test"), folder)


def test_limits(written):
    entry, arrays, folder = written

    def seen(**given):
        source = opened(settings(entry.name, **given), folder)
        return raw(source.batches(0), entry), raw(source.evaluation(), entry)

    train, held_out = seen(limit=50)
    again, other = seen(limit=50, split_seed=1)
    assert (len(train), len(held_out)) == (45, 5)
    assert sorted([*train, *held_out]) == sorted([*again, *other])  # the limit is applied before the split
    assert held_out != other
    all_of_it, tested = seen(limit=50, test_limit=7, evaluate="test")
    assert all_of_it == sorted([*train, *held_out])
    assert len(tested) == 7
    assert set(tested) <= set(stored(arrays["test"]))
    with pytest.raises(UserError, match="limit=201: there are only 200 images"):
        seen(limit=201)
    with pytest.raises(UserError, match="test_limit=21: there are only 20 images"):
        seen(test_limit=21, evaluate="test")


def test_the_split_does_not_depend_on_the_seed(written):
    entry, _, folder = written
    first, second = (opened(settings(entry.name), folder, seed=seed) for seed in (0, 1))
    assert raw(first.evaluation(), entry) == raw(second.evaluation(), entry)
    assert raw(first.batches(0), entry) == raw(second.batches(0), entry)
    assert not torch.equal(next(first.batches(0))[0], next(second.batches(0))[0])


def test_a_split_can_be_seeded_by_the_run(written):
    entry, _, folder = written
    own = [opened(settings(entry.name, split_seed="run"), folder, seed=seed) for seed in (0, 1)]
    fixed = [opened(settings(entry.name, split_seed=seed), folder, seed=seed) for seed in (0, 1)]
    held_out = [raw(source.evaluation(), entry) for source in own]
    assert held_out == [raw(source.evaluation(), entry) for source in fixed]
    assert held_out[0] != held_out[1]


def test_settings_reach_the_batches(written, monkeypatch):
    entry, _, folder = written
    paddings = []
    make = PaddedImages.__init__

    def remembered(self, images, device, channels_last=False, padding=0):
        paddings.append(padding)
        make(self, images, device, channels_last, padding)

    monkeypatch.setattr(PaddedImages, "__init__", remembered)
    plain = opened(settings(entry.name), folder)
    moved = opened(settings(entry.name, augment="flip-crop", padding=2), folder, channels_last=True)
    opened(settings(entry.name, augment="flip-crop"), folder)
    assert paddings == [0, 0, 2, 0, 4, 0]
    (x, y), (other_x, other_y) = next(plain.batches(0)), next(moved.batches(0))
    assert torch.equal(y, other_y)
    assert not torch.equal(x, other_x)
    assert other_x.is_contiguous(memory_format=torch.channels_last)


def test_batches_that_do_not_fit(written):
    entry, _, folder = written
    with pytest.raises(UserError, match="batch_size=181: must be at most the number of training images, 180"):
        opened(settings(entry.name), folder, 181)
    with pytest.raises(UserError, match="batch_size=5 with 2 processes"):
        opened(settings(entry.name), folder, world=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("evaluate", ["validation", "test"])
def test_random_images_need_no_files(name, evaluate, tmp_path):
    absent = tmp_path / "absent"
    data = settings(name, evaluate=evaluate, stand_in=True, limit=400, test_limit=10_000)
    assert present(data, absent)
    source = opened(data, absent, 50)
    shape, classes = shape_and_classes(data, absent)
    sizes = (400, 128) if evaluate == "test" else (360, 40)
    assert source.info == DatasetInfo(shape, classes, *sizes)
    x, y = (torch.cat(parts) for parts in zip(*source.batches(0), strict=True))
    assert x.shape == (sizes[0] // 50 * 50, *shape)
    assert 0 <= y.min() <= y.max() < classes
    assert len(torch.unique(y)) > 0.9 * classes
    assert torch.equal(next(opened(data, absent, 50).batches(0))[0], x[:50])
    assert not absent.exists()


def test_the_number_of_random_images(tmp_path):
    data = settings("cifar10", stand_in=True, evaluate="test", augment="flip-crop")
    made = opened(data, tmp_path)
    assert (made.info.train_size, made.info.eval_size) == (512, 128)
    x = torch.cat([x for x, _ in opened(settings("cifar10", stand_in=True, evaluate="test"), tmp_path, 512).batches(0)])
    std, mean = (
        torch.tensor(each)[:, None, None] for each in (catalog.CATALOG["cifar10"].std, catalog.CATALOG["cifar10"].mean)
    )
    counts = np.bincount(((x * std + mean) * 255).round().long().flatten().numpy(), minlength=256)
    n = counts.sum()  # uniform in 0 to 255: 256 counts within 5 standard deviations
    assert np.abs(counts - n / 256).max() < 5 * (n / 256) ** 0.5


def test_digits_need_no_files(tmp_path):
    data = settings("digits")
    assert present(data, tmp_path / "absent")
    source = opened(data, tmp_path / "absent", 64)
    assert source.info == DatasetInfo((1, 8, 8), 10, 1293, 144)
    assert opened(settings("digits", evaluate="test"), tmp_path).info == DatasetInfo((1, 8, 8), 10, 1437, 360)
    assert next(source.batches(0))[1][:12].tolist() == FIRST_LABELS  # the same data in every version


def test_random_signals_have_mean_0_and_standard_deviation_1(tmp_path):
    (x, _), *_ = opened(settings("mnist1d", stand_in=True, evaluate="test"), tmp_path, 512).batches(0)
    assert x.dtype == torch.float32
    n = x.numel()  # a uniform distribution: the variance of the mean is 1/n, that of the variance is 0.8/n
    assert abs(x.mean()) < 5 * n**-0.5
    assert abs(x.var() - 1) < 5 * (0.8 / n) ** 0.5 + 1e-3


def test_missing_files(tmp_path):
    for name in ("mnist", "fashion-mnist", "cifar10", "cifar100"):
        assert not present(settings(name), tmp_path)
        with pytest.raises(UserError, match=f"{name}: no train images in {tmp_path}; .*ghostnoise data get {name}"):
            opened(settings(name), tmp_path)
        assert shape_and_classes(settings(name), tmp_path) == (
            catalog.CATALOG[name].shape,
            catalog.CATALOG[name].classes,
        )


def test_shape_classes_and_presence_of_image_folders(tmp_path):
    data = settings("imagefolder")
    assert not present(data, tmp_path)
    with pytest.raises(UserError, match="folder not found"):
        shape_and_classes(data, tmp_path)
    for name in ("ant", "bee"):
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
    assert present(data, tmp_path)
    assert shape_and_classes(data, tmp_path) == ((3, 8, 8), 2)
    assert not present(settings("imagefolder", evaluate="test"), tmp_path)
    (tmp_path / "set" / "test").mkdir()
    assert present(settings("imagefolder", evaluate="test"), tmp_path)


def test_a_damaged_file_raises(written):
    entry, _, folder = written
    path = folder / entry.layout.folders[0] / entry.layout.train[0].name
    path.write_bytes(path.read_bytes()[:-1])
    assert present(settings(entry.name), folder)
    with pytest.raises(UserError, match=f"{path}: damaged"):
        opened(settings(entry.name), folder)
    assert files.has_files(entry, folder, files.BOTH)


FIRST_LABELS = [2, 8, 6, 3, 9, 0, 9, 8, 5, 2, 7, 9]

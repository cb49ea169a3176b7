"""MNIST-1D: the signals of the authors' package, their copy in the data folder, and batches of them."""

import multiprocessing
import os
import random

import mnist1d.data
import numpy as np
import pytest
import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.schema import DataSettings, Signals
from ghostnoise.lab.data import DatasetInfo, catalog, open_source, present, shape_and_classes, signals
from ghostnoise.lab.errors import UserError
from support.batches import global_numpy, same

CPU = torch.device("cpu")
SIZES = {"train": 2_000, "test": 8_000, "validation": 4_000}


@pytest.fixture(scope="module")
def made():
    """All signals and labels, generated once."""
    return signals.generate()


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """A data folder with a copy of the signals; they cannot be generated again."""

    def fail():
        raise AssertionError("the copy must be used")

    signals._write(tmp_path / signals.FILE, made)
    monkeypatch.setattr(signals, "generate", fail)
    return tmp_path


@pytest.fixture
def counted(made, monkeypatch):
    """A list with an entry for each time that the signals are generated."""
    calls = []
    monkeypatch.setattr(signals, "generate", lambda: calls.append(1) or made)
    return calls


def published(count, seed):
    """Return the data set of the package, without a change of the global generators."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    arguments = mnist1d.data.get_dataset_args()
    arguments.num_samples, arguments.seed, arguments.train_split = count, seed, 0.2
    found = mnist1d.data.make_dataset(arguments)
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
    return found


@pytest.mark.parametrize(("count", "seed"), [(10_000, 42), (4_000, 43), (70, 0), (15, 2**32 - 1)])
def test_signals_are_those_of_the_package(count, seed):
    theirs = published(count, seed)
    ours, labels = signals.data_set(count, seed)
    assert ours.dtype == np.float32
    assert labels.dtype == np.int64
    assert np.array_equal(labels, np.concatenate([theirs["y"], theirs["y_test"]]))
    expected = np.concatenate([theirs["x"], theirs["x_test"]]).astype(np.float32)
    assert np.array_equal(ours, expected[:, None])


@pytest.mark.slow
def test_the_parts(made, tmp_path):
    theirs, further = published(10_000, 42), published(4_000, 43)
    expected = {
        "train": (theirs["x"], theirs["y"]),
        "test": (theirs["x_test"], theirs["y_test"]),
        "validation": tuple(np.concatenate([further[key], further[f"{key}_test"]]) for key in "xy"),
    }
    assert signals.sizes() == SIZES
    for part, (values, labels) in expected.items():
        found = signals.load(tmp_path, part)
        assert np.array_equal(found.pixels, values.astype(np.float32)[:, None]), part
        assert np.array_equal(found.labels, labels), part
    entry = catalog.CATALOG["mnist1d"]
    assert (entry.train_size, entry.test_size) == (SIZES["train"], SIZES["test"])


def test_signals_are_standardized(made):
    """The package standardizes the 10,000 signals of training and test together."""
    together = np.concatenate([made["train_signals"], made["test_signals"]]).astype(np.float64)
    assert together.mean() == pytest.approx(0, abs=1e-6)
    assert together.std() == pytest.approx(1, abs=1e-6)
    assert np.bincount(np.concatenate([made["train_labels"], made["test_labels"]])).tolist() == [1_000] * 10


def test_no_global_generator_is_used(tmp_path):
    random.seed(3)
    torch.manual_seed(5)
    before = random.getstate(), global_numpy(), torch.get_rng_state()
    signals.load(tmp_path, "train")
    assert random.getstate() == before[0]
    assert global_numpy() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(4)
    torch.manual_seed(6)
    again = signals.generate()
    assert np.array_equal(signals.load(tmp_path, "train").pixels, again["train_signals"])


def test_the_copy_is_written_and_used(made, tmp_path, counted):
    path = tmp_path / "data" / "mnist1d" / "signals.npz"
    first = {part: signals.load(tmp_path / "data", part) for part in SIZES}
    assert len(counted) == 1
    assert list(path.parent.iterdir()) == [path]
    written = path.read_bytes()
    for part, (values, labels) in first.items():
        assert np.array_equal(values, made[f"{part}_signals"])
        assert np.array_equal(labels, made[f"{part}_labels"])
    signals.load(tmp_path / "data", "train")
    assert len(counted) == 1
    assert path.read_bytes() == written


def test_the_copy_has_the_same_bits(made, copied):
    for part, count in SIZES.items():
        found = signals.load(copied, part)
        assert found.pixels.tobytes() == made[f"{part}_signals"].tobytes()
        assert found.labels.tobytes() == made[f"{part}_labels"].tobytes()
        assert found.pixels.shape == (count, 1, 40)


def saved(path, **arrays):
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def flipped(path, made):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorter(path, made):
    arrays = made | {"train_signals": made["train_signals"][:-1]}
    saved(path, checksum=np.array(signals._checksum(arrays)), **arrays)


def doubles(path, made):
    arrays = made | {"train_signals": made["train_signals"].astype(np.float64)}
    saved(path, checksum=np.array(signals._checksum(arrays)), **arrays)


def lacking(path, made):
    arrays = {name: array for name, array in made.items() if name != "test_labels"}
    saved(path, checksum=np.array(signals._checksum(arrays)), **arrays)


def other_values(path, made):
    """Write signals with the checksum of others."""
    saved(path, checksum=np.array(signals._checksum(made)), **made | {"train_signals": made["train_signals"] + 1})


def pickled(path, made):
    arrays = made | {"train_labels": made["train_labels"].astype(object)}
    saved(path, checksum=np.array("0"), **arrays)


def plain_array(path, made):
    with open(path, "wb") as file:
        np.save(file, made["train_signals"])


DAMAGES = {
    "empty": lambda path, made: path.write_bytes(b""),
    "text": lambda path, made: path.write_text("not an archive"),
    "truncated": lambda path, made: path.write_bytes(path.read_bytes()[:-1000]),
    "one bit": flipped,
    "an array that is shorter": shorter,
    "another dtype": doubles,
    "an array is missing": lacking,
    "an additional array": lambda path, made: saved(path, checksum=np.array(""), more=np.zeros(1), **made),
    "another checksum": lambda path, made: saved(path, checksum=np.array("0" * 64), **made),
    "no checksum": lambda path, made: saved(path, **made),
    "other values": other_values,
    "a pickled object": pickled,
    "a plain array": plain_array,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_copy_is_generated_again(made, tmp_path, counted, damage):
    path = tmp_path / signals.FILE
    signals._write(path, made)
    damage(path, made)
    found = signals.load(tmp_path, "train")
    assert np.array_equal(found.pixels, made["train_signals"])
    assert found.labels.dtype == np.int64
    assert len(counted) == 1
    signals.load(tmp_path, "test")
    assert len(counted) == 1, "the copy was replaced"


def test_a_pickle_in_the_copy_is_not_executed(made, tmp_path, counted):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / signals.FILE
    path.parent.mkdir()
    saved(path, checksum=np.array(""), train_labels=np.array([Trap()], dtype=object))
    signals.load(tmp_path, "train")
    assert len(counted) == 1
    assert not (tmp_path / "executed").exists()


def test_a_copy_of_another_format_is_generated_again(made, tmp_path, counted, monkeypatch):
    signals._write(tmp_path / signals.FILE, made)
    monkeypatch.setattr(signals, "FORMAT", signals.FORMAT + 1)
    signals.load(tmp_path, "train")
    assert len(counted) == 1


def a_file(folder):
    folder.write_text("a file")


def full(folder):
    """Make the path of the copy a folder, which cannot be replaced by a file."""
    (folder / signals.FILE / "taken").mkdir(parents=True)


@pytest.mark.parametrize("block", [a_file, full])
def test_a_folder_that_cannot_be_written_has_no_copy(made, tmp_path, counted, block):
    block(tmp_path / "data")
    for _ in range(2):
        found = signals.load(tmp_path / "data", "test")
        assert np.array_equal(found.pixels, made["test_signals"])
    assert len(counted) == 2
    assert not list(tmp_path.glob("**/*.part"))


def test_a_read_only_folder_has_no_copy(made, tmp_path, counted, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    found = signals.load(tmp_path, "validation")
    assert np.array_equal(found.pixels, made["validation_signals"])
    assert not list(tmp_path.glob("**/*.npz"))
    assert not list(tmp_path.glob("**/*.part"))


def load_in_a_process(folder, started, results):
    started.wait()
    found = signals.load(folder, "train")
    results.put((found.pixels.sum(dtype=np.float64), int(found.labels.sum())))


def test_processes_that_write_at_the_same_time(made, tmp_path):
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    started, results = context.Event(), context.Queue()
    processes = [context.Process(target=load_in_a_process, args=(tmp_path, started, results)) for _ in range(4)]
    for process in processes:
        process.start()
    started.set()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert set(found) == {(made["train_signals"].sum(dtype=np.float64), int(made["train_labels"].sum()))}
    assert list(tmp_path.glob("mnist1d/*")) == [tmp_path / signals.FILE]
    assert signals._read(tmp_path / signals.FILE) is not None


def settings(**given):
    return DataSettings(name="mnist1d", **given)


def opened(data, folder, batch_size=100, **options):
    return open_source(data, folder, **{"batch_size": batch_size, "seed": 0, "device": CPU, **options})


def stored(arrays):
    return sorted((label, values.tobytes()) for label, values in zip(arrays[1].tolist(), arrays[0], strict=True))


def seen(batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert x.dtype == torch.float32
    return stored((x.numpy(), y))


def part(made, name):
    return stored((made[f"{name}_signals"], made[f"{name}_labels"]))


@pytest.mark.parametrize("evaluate", ["validation", "test"])
def test_batches_have_the_signals_as_they_are(made, copied, evaluate):
    source = opened(settings(evaluate=evaluate), copied)
    assert source.info == DatasetInfo((1, 40), 10, 2_000, SIZES[evaluate])
    assert source.steps == 20
    assert seen(source.batches(0)) == part(made, "train")
    assert seen(source.evaluation()) == part(made, evaluate)


def test_the_data_set_is_always_present(tmp_path):
    for evaluate in ("validation", "test"):
        assert present(settings(evaluate=evaluate), tmp_path / "absent")
    assert shape_and_classes(settings(), tmp_path / "absent") == ((1, 40), 10)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("evaluate", ["validation", "test"])
def test_limits(made, copied, evaluate):
    source = opened(settings(evaluate=evaluate, limit=300, test_limit=70), copied)
    assert source.info == DatasetInfo((1, 40), 10, 300, 70)
    train, held_out = seen(source.batches(0)), seen(source.evaluation())
    assert set(train) <= set(part(made, "train"))
    assert set(held_out) <= set(part(made, evaluate))
    assert (len(set(train)), len(set(held_out))) == (300, 70)
    again = opened(settings(evaluate=evaluate, limit=300, test_limit=70), copied, seed=1)
    assert (seen(again.batches(0)), seen(again.evaluation())) == (train, held_out), (
        "a limit does not depend on the seed"
    )
    with pytest.raises(UserError, match=r"^limit=2001: there are only 2000 "):
        opened(settings(evaluate=evaluate, limit=2_001), copied)
    with pytest.raises(UserError, match=rf"^test_limit=8001: there are only {SIZES[evaluate]} "):
        opened(settings(evaluate=evaluate, test_limit=8_001), copied)


def test_both_kinds_of_evaluation_train_on_the_same_batches(copied):
    validation, test = (opened(settings(evaluate=kind, limit=500), copied) for kind in ("validation", "test"))
    for epoch in range(2):
        same(validation.batches(epoch), test.batches(epoch))


def test_the_order_depends_on_seed_and_epoch(copied):
    first, second = (next(opened(settings(), copied, seed=seed).batches(0)) for seed in (0, 1))
    later = next(opened(settings(), copied).batches(1))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], later[0])
    full_epoch = list(opened(settings(), copied).batches(3))
    same(opened(settings(), copied).batches(3, 7), full_epoch[7:])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batches(copied, world):
    whole = opened(settings(), copied)
    ranks = [opened(settings(), copied, rank=rank, world=world) for rank in range(world)]
    parts = [list(rank.batches(1)) for rank in ranks]
    joined = [tuple(torch.cat(each) for each in zip(*step, strict=True)) for step in zip(*parts, strict=True)]
    same(joined, whole.batches(1))
    evaluated = [pair for rank in ranks for pair in seen(rank.evaluation())]
    assert sorted(evaluated) == seen(whole.evaluation())


def test_the_memory_format_does_not_matter(copied):
    plain, other = (opened(settings(), copied, channels_last=given) for given in (False, True))
    same(plain.batches(0), other.batches(0))
    same(plain.evaluation(), other.evaluation())


def test_batches_may_be_modified_in_place(copied):
    source = opened(settings(limit=200, test_limit=50), copied)
    first = [(x.clone(), y.clone()) for x, y in (*source.batches(0), *source.evaluation())]
    for x, y in (*source.batches(0), *source.evaluation()):
        x.zero_()
        y.zero_()
    same((*source.batches(0), *source.evaluation()), first)


MNIST1D = ["data.name=mnist1d", "model.name=conv1d"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.split_seed=1", "1: a setting of {images}, imagefolder, {own}; leave split_seed out"),
        ("data.augment=flip-crop", "'flip-crop': a setting of {images}, imagefolder, {own}; leave augment out"),
        ("data.padding=2", "2: a setting of {images}, {own}; leave padding out"),
    ],
)
def test_settings_of_images_are_refused(override, said):
    with pytest.raises(UserError) as caught:
        recipe.load("digits", [*MNIST1D, override])
    images, own = "digits, mnist, fashion-mnist, cifar10, cifar100", "package.module:function, and name is 'mnist1d'"
    assert str(caught.value) == f"{override.partition('=')[0]}={said.format(images=images, own=own)}"


def test_settings_of_a_recipe_for_images_are_removed():
    loaded = recipe.load("fig1", MNIST1D).settings.data
    assert (type(loaded), loaded.augment, loaded.split_seed) == (Signals, "none", 0)

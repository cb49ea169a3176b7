import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.catalog import Entry
from ghostnoise.lab.data.files import Arrays
from ghostnoise.lab.data.in_memory import Images, InMemorySource, Normalization, PaddedImages, draw_crops, select
from ghostnoise.lab.data.source import DatasetInfo, Shard
from support.batches import global_numpy, same

CPU = torch.device("cpu")
shapes = st.tuples(st.sampled_from([1, 3]), st.integers(1, 6), st.integers(1, 6))


def random_pixels(count, shape, seed=0):
    return torch.randint(0, 256, (count, *shape), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@given(shapes, st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_crops_and_flips_match_a_loop_over_images(shape, padding, channels_last, seed):
    images = random_pixels(7, shape, seed)
    rows = torch.tensor([3, 0, 6, 3, 5])
    crops = draw_crops(5, padding, seed, epoch=1, step=2)
    found = PaddedImages(images, CPU, channels_last, padding).cropped(rows, crops)
    assert found.is_contiguous()
    found = found.permute(0, 3, 1, 2) if channels_last else found
    for image, row, top, left, flip in zip(found, rows, *crops, strict=True):
        padded = F.pad(images[row], (padding,) * 4)
        naive = padded[:, top : top + shape[1], left : left + shape[2]]
        assert torch.equal(image, naive.flip(-1) if flip else naive)


@given(shapes, st.integers(0, 3), st.booleans())
def test_uncropped_images_are_the_given_ones(shape, padding, channels_last):
    images = random_pixels(6, shape)
    pixels, rows = PaddedImages(images, CPU, channels_last, padding), torch.tensor([5, 0, 5])
    order = (0, 3, 1, 2) if channels_last else (0, 1, 2, 3)
    assert torch.equal(pixels.uncropped(rows).permute(order), images[rows])
    assert torch.equal(pixels.uncropped(slice(1, 4)).permute(order), images[1:4])


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crops_and_flips_are_uniform(padding):
    """n = 20,000 draws: each count within 4.5 standard deviations; one of 25 exceeds them once in 5,000 runs."""
    n, places = 20_000, 2 * padding + 1
    top, left, flip = draw_crops(n, padding, seed=3, epoch=0, step=0)
    for values, kinds in ((top, places), (left, places), (flip, 2), (top * places + left, places**2)):
        counts = torch.bincount(values, minlength=kinds).double()
        assert len(counts) == kinds
        assert (counts - n / kinds).abs().max() <= 4.5 * (n / kinds * (1 - 1 / kinds)) ** 0.5
    if padding:
        pairs = torch.bincount(flip * places + left, minlength=2 * places).double()  # flips and crops are independent
        share = 1 / (2 * places)
        assert (pairs - n * share).abs().max() < 4.5 * (n * share * (1 - share)) ** 0.5


@given(shapes, st.booleans(), st.integers(0, 99))
def test_normalization_against_float64(shape, channels_last, seed):
    """The bound covers two constants and two operations, rounded once each, of values up to |shift| + 255."""
    images = random_pixels(4, shape, seed)
    mean, std = (0.4914, 0.4822, 0.4465)[: shape[0]], (0.2023, 0.1994, 0.2010)[: shape[0]]
    normalize = Normalization(shape, mean, std, CPU, channels_last)
    found = normalize(images.permute(0, 2, 3, 1).contiguous() if channels_last else images)
    exact = (images.numpy() / 255 - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    unit = 2.0**-24
    bound = unit * (np.reshape(mean, (-1, 1, 1)) / np.reshape(std, (-1, 1, 1)) + 4 * np.abs(exact))
    assert np.all(np.abs(found.double().numpy() - exact) <= bound)


def test_normalization_does_not_depend_on_the_position():
    """Bit-exact for every value at every position, in tensors of several lengths."""
    values = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    expected = Normalization((1, 1, 1), (0.1307,), (0.3081,), CPU)(values).flatten()
    for width in (3, 17, 64):
        normalize = Normalization((1, 1, width), (0.1307,), (0.3081,), CPU)
        found = normalize(values.expand(256, 1, 1, width).contiguous())
        assert torch.equal(found, expected[:, None, None, None].expand_as(found))


def test_the_stored_images_are_not_modified():
    images = random_pixels(5, (3, 4, 4))
    before = images.clone()
    pixels, normalize = PaddedImages(images, CPU), Normalization((3, 4, 4), (0.5,) * 3, (0.2,) * 3, CPU)
    first = normalize(pixels.uncropped(slice(0, 5)))
    assert torch.equal(normalize(pixels.uncropped(slice(0, 5))), first)
    assert torch.equal(images, before)


CPU = torch.device("cpu")
SHAPE = (3, 4, 5)
ENTRY = Entry("small", "Small", SHAPE, 200, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), 0, 0)


def images(count, first=0):
    """Image i has label first + i, which is also the value of all its pixels."""
    labels = torch.arange(first, first + count)
    return Images(labels.to(torch.uint8)[:, None, None, None].expand(count, *SHAPE).contiguous(), labels)


def noisy(count):
    generator = torch.Generator().manual_seed(count)
    return Images(torch.randint(0, 256, (count, *SHAPE), generator=generator).to(torch.uint8), torch.arange(count))


def source(train, batch_size, *, rank=0, world=1, held_out=7, **options):
    options = {"seed": 1, "device": CPU, **options}
    return InMemorySource(ENTRY, train, images(held_out, 100), Shard(batch_size, rank, world), **options)


cases = st.fixed_dictionaries({
    "padding": st.sampled_from([None, 0, 2]), "channels_last": st.booleans(), "seed": st.integers(0, 2**63 - 1),
})  # fmt: skip


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 8), st.integers(0, 5), cases)
def test_a_resumed_epoch_is_the_tail_of_a_full_one(batch_size, more, start, epoch, case):
    train = noisy(batch_size + more)
    whole = list(source(train, batch_size, **case).batches(epoch))
    again = source(train, batch_size, **case)
    next(again.batches(epoch + 1))  # earlier calls have no effect
    same(again.batches(epoch, start=start), whole[start:])
    assert len(whole) == again.steps == (batch_size + more) // batch_size


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 20), st.integers(0, 12), cases)
def test_ranks_partition_the_batches_of_one_process(world, each, more, held_out, case):
    train = noisy(world * each + more)
    alone = source(train, world * each, held_out=held_out, **case)
    ranks = [source(train, world * each, rank=rank, world=world, held_out=held_out, **case) for rank in range(world)]
    joined = (
        tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*(r.batches(2) for r in ranks), strict=True)
    )
    same(joined, alone.batches(2))
    labels = [label for rank in ranks for _, y in rank.evaluation() for label in y.tolist()]
    assert labels == list(range(100, 100 + held_out))


@given(st.integers(1, 7), st.integers(0, 30), st.integers(0, 9))
def test_an_epoch_has_every_image_at_most_once_with_its_own_label(batch_size, more, seed):
    made = source(images(batch_size + more), batch_size, seed=seed)
    labels = []
    for x, y in made.batches(0):
        assert x.shape == (batch_size, *SHAPE)
        assert y.dtype == torch.int64
        values = x * 255 * torch.tensor(ENTRY.std)[:, None, None] + 255 * torch.tensor(ENTRY.mean)[:, None, None]
        assert torch.equal(values.round().long(), y[:, None, None, None].expand_as(x))
        labels += y.tolist()
    assert len(set(labels)) == len(labels) == made.steps * batch_size


def test_seeds_epochs_and_steps_differ():
    train = noisy(40)
    orders = [
        tuple(torch.cat([y for _, y in source(train, 8, seed=seed).batches(epoch)]).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    one = Images(train.pixels[:1].expand(40, *SHAPE), train.labels)  # all images are equal
    looks = [x for x, _ in source(one, 20, padding=2).batches(0)]
    assert not torch.equal(*looks)


def test_evaluation_does_not_augment():
    made = source(noisy(8), 4, padding=2)
    x, y = (torch.cat(parts) for parts in zip(*made.evaluation(), strict=True))
    assert y.tolist() == list(range(100, 107))
    assert all(len(set(x[i, c].flatten().tolist())) == 1 for i in range(7) for c in range(3))


@pytest.mark.parametrize("padding", [None, 0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_format_and_values(padding, channels_last):
    expected = source(noisy(8), 4, padding=padding)
    made = source(noisy(8), 4, padding=padding, channels_last=channels_last)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    for batch, (x, _) in zip(
        (*expected.batches(0), *expected.evaluation()), (*made.batches(0), *made.evaluation()), strict=True
    ):
        assert x.is_contiguous(memory_format=wanted)
        assert x.dtype == torch.float32
        assert torch.equal(x, batch[0])


def test_no_global_generator_is_used():
    torch.manual_seed(5)
    before = torch.get_rng_state(), global_numpy(), random.getstate()
    made = source(noisy(20), 4, padding=2)
    list(made.batches(0))
    list(made.evaluation())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert global_numpy() == before[1]
    assert random.getstate() == before[2]
    torch.manual_seed(6)
    same(source(noisy(20), 4, padding=2).batches(0), made.batches(0))


def test_batches_may_be_modified_in_place():
    made = source(noisy(8), 4)
    first = [(x.clone(), y.clone()) for x, y in (*made.batches(0), *made.evaluation())]
    for x, y in (*made.batches(0), *made.evaluation()):
        x.zero_()
        y.zero_()
    same((*made.batches(0), *made.evaluation()), first)


def test_info():
    made = source(noisy(11), 4)
    assert made.info == DatasetInfo(SHAPE, 200, 11, 7)
    assert made.steps == 2


def test_selected_images_are_copies():
    arrays = Arrays(np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2), np.arange(3))
    arrays.pixels.setflags(write=False)
    found = select(arrays, np.array([2, 0]))
    assert found.labels.tolist() == [2, 0]
    assert found.pixels[0].flatten().tolist() == [8, 9, 10, 11]

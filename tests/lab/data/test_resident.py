import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.catalog import Entry
from ghostnoise.lab.data.readers import Arrays
from ghostnoise.lab.data.resident import Images, Resident, chosen
from ghostnoise.lab.data.source import Facts, Share
from lab.data.comparing import global_numpy, same

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
    return Resident(ENTRY, train, images(held_out, 100), Share(batch_size, rank, world), **options)


cases = st.fixed_dictionaries({
    "padding": st.sampled_from([None, 0, 2]), "channels_last": st.booleans(), "seed": st.integers(0, 2**63 - 1),
})  # fmt: skip


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 8), st.integers(0, 5), cases)
def test_a_resumed_epoch_is_the_tail_of_a_whole_one(batch_size, more, start, epoch, case):
    train = noisy(batch_size + more)
    whole = list(source(train, batch_size, **case).batches(epoch))
    again = source(train, batch_size, **case)
    next(again.batches(epoch + 1))  # what was asked before changes nothing
    same(again.batches(epoch, start=start), whole[start:])
    assert len(whole) == again.steps == (batch_size + more) // batch_size


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 20), st.integers(0, 12), cases)
def test_ranks_together_are_the_batch_of_one(world, each, more, held_out, case):
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
    one = Images(train.pixels[:1].expand(40, *SHAPE), train.labels)  # the same image in every place
    looks = [x for x, _ in source(one, 20, padding=2).batches(0)]
    assert not torch.equal(*looks)


def test_evaluation_sees_plain_images():
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


def test_no_global_generator_is_touched():
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


def test_a_batch_may_be_changed_by_its_user():
    made = source(noisy(8), 4)
    first = [(x.clone(), y.clone()) for x, y in (*made.batches(0), *made.evaluation())]
    for x, y in (*made.batches(0), *made.evaluation()):
        x.zero_()
        y.zero_()
    same((*made.batches(0), *made.evaluation()), first)


def test_facts():
    made = source(noisy(11), 4)
    assert made.facts == Facts(SHAPE, 200, 11, 7)
    assert made.steps == 2


def test_chosen_images_are_copies():
    arrays = Arrays(np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2), np.arange(3))
    arrays.pixels.setflags(write=False)
    found = chosen(arrays, np.array([2, 0]))
    assert found.labels.tolist() == [2, 0]
    assert found.pixels[0].flatten().tolist() == [8, 9, 10, 11]

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.source import Purpose, Shard, limited_indices, permutation, random_words, split_validation
from ghostnoise.lab.errors import UserError


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 60))
def test_ranks_partition_the_held_out_images(world, each, count):
    rows = [
        list(range(count))[batch]
        for rank in range(world)
        for batch in Shard(world * each, rank, world).evaluation_slices(count)
    ]  # fmt: skip
    assert [row for batch in rows for row in batch] == list(range(count))
    assert all(1 <= len(batch) <= each for batch in rows)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9))
def test_ranks_partition_a_step(world, each, step):
    rows = [list(range(1000))[Shard(world * each, rank, world).step_slice(step)] for rank in range(world)]
    assert [row for block in rows for row in block] == list(range(step * world * each, (step + 1) * world * each))


def test_a_batch_size_that_is_not_divisible_by_the_ranks():
    with pytest.raises(UserError, match="batch_size=130 with 4 processes: must be a multiple of their number; try 128"):
        Shard(130, 0, 4)
    with pytest.raises(UserError, match="try 4"):
        Shard(3, 0, 4)


def test_a_batch_larger_than_the_training_set():
    assert Shard(10).steps(10) == 1
    assert Shard(10).steps(29) == 2
    with pytest.raises(UserError, match="batch_size=11: must be at most the number of training images, 10; lower it"):
        Shard(11).steps(10)


seeds = st.integers(0, 2**63 - 1)
keys = st.tuples(st.sampled_from(Purpose), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


def test_words_never_change():
    """Pinned values: all versions of numpy must give the same data."""
    assert random_words(3, 0, Purpose.EPOCH, 0).tolist() == WORDS
    assert permutation(8, 2**40, Purpose.VALIDATION).tolist() == ORDER


@given(seeds, seeds, keys, keys)
def test_other_seeds_and_keys_give_other_words(seed, other_seed, key, other_key):
    same = (seed, key) == (other_seed, other_key)
    assert (random_words(2, seed, *key).tolist() == random_words(2, other_seed, *other_key).tolist()) is same


def test_a_long_seed_differs_from_a_short_seed_with_a_key():
    """The seed 5 * 2**32 has the words 0 and 5, which must not be the seed 0 with the key 5."""
    found = {
        tuple(random_words(2, *each).tolist()) for each in ((5 * 2**32, 2, 1), (0, 5, 2, 1), (0, 2, 5, 1), (5, 0, 2, 1))
    }
    assert len(found) == 4


@given(st.integers(0, 300), seeds)
def test_permutation_contains_every_index_once(count, seed):
    assert sorted(permutation(count, seed, Purpose.LIMIT).tolist()) == list(range(count))


def test_permutations_are_uniform():
    """Over n = 4,000 keys, each of 5 indices is first n / 5 times, within 4 standard deviations."""
    n = 4000
    first = [int(permutation(5, 7, Purpose.EPOCH, epoch)[0]) for epoch in range(n)]
    assert np.abs(np.bincount(first, minlength=5) - n / 5).max() < 4 * (n * 0.2 * 0.8) ** 0.5


WORDS = [4893966194604045956, 1866359959608093551, 17410359158679167421]
ORDER = [5, 2, 7, 6, 3, 1, 4, 0]


@given(st.integers(1, 500), st.integers(0, 2**40))
def test_validation_is_disjoint_complete_and_a_tenth(count, seed):
    rows = np.arange(count) * 3
    train, held_out = split_validation(rows, seed)
    assert sorted([*train, *held_out]) == rows.tolist()
    assert len(held_out) == max(1, int(count / 10 + 0.5))


def test_split_seeds_give_different_splits():
    rows = np.arange(1000)
    chosen = [tuple(split_validation(rows, seed)[1]) for seed in range(5)]
    assert len(set(chosen)) == 5
    assert chosen[0] == tuple(split_validation(rows, 0)[1])


def test_limits_are_nested_and_fixed():
    few, more = limited_indices(1000, 50, "limit"), limited_indices(1000, 200, "limit")
    assert more[:50].tolist() == few.tolist()
    assert len(set(more.tolist())) == 200
    assert few[:8].tolist() == FIRST
    assert limited_indices(1000, None, "limit").tolist() == list(range(1000))
    assert sorted(limited_indices(7, 7, "limit").tolist()) == list(range(7))


def test_a_limit_above_the_number_of_images_raises():
    with pytest.raises(UserError, match="test_limit=8: there are only 7 images; lower it or leave it out"):
        limited_indices(7, 8, "test_limit")


FIRST = [489, 327, 379, 703, 501, 354, 17, 264]

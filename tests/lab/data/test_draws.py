import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.draws import Purpose, order, words

seeds = st.integers(0, 2**63 - 1)
keys = st.tuples(st.sampled_from(Purpose), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


def test_words_never_change():
    """Written down: runs of today and of the next version of numpy see the same data."""
    assert words(3, 0, Purpose.EPOCH, 0).tolist() == WORDS
    assert order(8, 2**40, Purpose.VALIDATION).tolist() == ORDER


@given(seeds, seeds, keys, keys)
def test_other_seeds_and_keys_give_other_words(seed, other_seed, key, other_key):
    same = (seed, key) == (other_seed, other_key)
    assert (words(2, seed, *key).tolist() == words(2, other_seed, *other_key).tolist()) is same


def test_a_long_seed_is_not_a_short_one_with_a_key():
    """The seed 5 * 2**32 has the words 0 and 5, which must not be the seed 0 with the key 5."""
    found = {tuple(words(2, *each).tolist()) for each in ((5 * 2**32, 2, 1), (0, 5, 2, 1), (0, 2, 5, 1), (5, 0, 2, 1))}
    assert len(found) == 4


@given(st.integers(0, 300), seeds)
def test_an_order_is_a_permutation(count, seed):
    assert sorted(order(count, seed, Purpose.LIMIT).tolist()) == list(range(count))


def test_every_place_is_equally_likely():
    """Which of 5 comes first, over n = 4,000 keys: each count within 4 standard deviations of n / 5."""
    n = 4000
    first = [int(order(5, 7, Purpose.EPOCH, epoch)[0]) for epoch in range(n)]
    assert np.abs(np.bincount(first, minlength=5) - n / 5).max() < 4 * (n * 0.2 * 0.8) ** 0.5


WORDS = [4893966194604045956, 1866359959608093551, 17410359158679167421]
ORDER = [5, 2, 7, 6, 3, 1, 4, 0]

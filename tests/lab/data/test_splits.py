import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.splits import limited, validation
from ghostnoise.lab.errors import UserError


@given(st.integers(1, 500), st.integers(0, 2**40))
def test_validation_is_disjoint_complete_and_a_tenth(count, seed):
    rows = np.arange(count) * 3
    train, held_out = validation(rows, seed)
    assert sorted([*train, *held_out]) == rows.tolist()
    assert len(held_out) == max(1, int(count / 10 + 0.5))


def test_the_seed_chooses():
    rows = np.arange(1000)
    chosen = [tuple(validation(rows, seed)[1]) for seed in range(5)]
    assert len(set(chosen)) == 5
    assert chosen[0] == tuple(validation(rows, 0)[1])


def test_limits_are_nested_and_fixed():
    few, more = limited(1000, 50, "limit"), limited(1000, 200, "limit")
    assert more[:50].tolist() == few.tolist()
    assert len(set(more.tolist())) == 200
    assert few[:8].tolist() == FIRST
    assert limited(1000, None, "limit").tolist() == list(range(1000))
    assert sorted(limited(7, 7, "limit").tolist()) == list(range(7))


def test_a_limit_above_the_set_is_refused():
    with pytest.raises(UserError, match="test_limit=8: there are 7 images; lower it or leave it out"):
        limited(7, 8, "test_limit")


FIRST = [489, 327, 379, 703, 501, 354, 17, 264]

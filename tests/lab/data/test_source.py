import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.source import Share
from ghostnoise.lab.errors import UserError


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 60))
def test_held_out_rows_are_shared_out_once(world, each, count):
    rows = [
        list(range(count))[batch]
        for rank in range(world)
        for batch in Share(world * each, rank, world).held_out(count)
    ]  # fmt: skip
    assert [row for batch in rows for row in batch] == list(range(count))
    assert all(1 <= len(batch) <= each for batch in rows)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9))
def test_ranks_share_a_step(world, each, step):
    rows = [list(range(1000))[Share(world * each, rank, world).of_step(step)] for rank in range(world)]
    assert [row for block in rows for row in block] == list(range(step * world * each, (step + 1) * world * each))


def test_a_batch_that_ranks_cannot_share():
    with pytest.raises(UserError, match="batch_size=130 over 4 processes: must be a multiple of their number; try 128"):
        Share(130, 0, 4)
    with pytest.raises(UserError, match="try 4"):
        Share(3, 0, 4)


def test_a_batch_that_is_larger_than_the_set():
    assert Share(10).steps(10) == 1
    assert Share(10).steps(29) == 2
    with pytest.raises(UserError, match="batch_size=11: larger than the training set of 10 images; lower it"):
        Share(11).steps(10)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.source import Shard
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

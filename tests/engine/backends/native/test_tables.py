import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.engine.backends import aten
from ghostnoise.engine.backends.native import passes as native
from ghostnoise.moments import Moments
from passes import check_draws, check_tables


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 150), st.sampled_from([torch.float32, torch.float64]))
def test_draws_equal_the_naive_loop(rows, drawn, channels, dtype):
    check_draws(native, rows, drawn, channels, dtype)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("pool", ["everyone", "others"])
def test_pools_equal_those_of_aten(passes, pool, ghost_size, single):
    """Also where samples have a single position, whose means come in float32 and without a variance."""
    x = torch.randn(9, 70, 1 if single else 5) + 3
    x[4] += 1e6
    ours = getattr(passes, pool)(passes.moments(x), ghost_size)
    wanted = getattr(aten, pool)(aten.moments(x), ghost_size)
    for actual, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@given(
    st.sampled_from([torch.float32, torch.float64]), st.integers(1, 9), st.integers(1, 150), st.integers(1, 9),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_tables_equal_those_of_aten(dtype, batch_size, channels, each, shift, scale, affine, min_std):
    check_tables(native, dtype, batch_size, channels, each, shift, scale, affine, min_std)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tables_equal_those_of_aten(passes, dtype):
    for each in (1, 32):
        check_tables(passes, dtype, 300, 130, each, True, True, True, 0.5)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("single", [True, False])
def test_the_ramp_of_the_others_equals_that_of_aten(passes, ghost_size, single):
    moments = passes.moments(torch.randn(9, 70, 1 if single else 5) + 3)
    pooled = passes.others(moments, ghost_size).mean
    gradient = Moments(torch.randn(9, 70), torch.randn(9, 70))
    center, slope, offset = passes.others_ramp(moments.mean, pooled, gradient, ghost_size, 5)
    wanted = aten.others_ramp(moments.mean, pooled, gradient, ghost_size, 5)
    torch.testing.assert_close(slope.double(), wanted.slope, rtol=1e-5, atol=1e-5)
    at = (wanted.center - center).double() * wanted.slope + offset  # around the center that is not rounded
    torch.testing.assert_close(at, wanted.offset, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ramp_of_ghost_batches_equals_that_of_aten(passes, ghost_size, dtype):
    """Around a center in the dtype of the gradient, where that of aten is not rounded."""
    pooled = aten.everyone(aten.moments(torch.randn(9, 70, 5) + 3), ghost_size).mean
    gradient = Moments(*torch.randn(2, *pooled.shape, dtype=torch.float64).to(dtype).unbind())
    center, slope, offset = passes.everyone_ramp(pooled, gradient, ghost_size, 9, 5)
    wanted = aten.everyone_ramp(pooled, Moments(*(table.double() for table in gradient)), ghost_size, 9, 5)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-7}
    assert center.dtype == slope.dtype == offset.dtype == dtype
    torch.testing.assert_close(center.double(), wanted.center, **close)
    torch.testing.assert_close(slope.double(), wanted.slope, **close)
    torch.testing.assert_close(offset + slope.double() * (wanted.center - center), wanted.offset, **close)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0, None])
@pytest.mark.parametrize("absent", [None, "mean", "var", "both"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_running_buffers_follow_as_in_aten(momentum, absent, bad, dtype):
    stats = Moments(torch.randn(1, 5, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64))
    if bad is not None:
        stats.var[0, 3] = bad
    buffers = {"mean": torch.randn(5).to(dtype), "var": torch.rand(5).to(dtype), "count": torch.tensor(4)}
    ours, theirs = (
        {
            name: None if absent in (name, "both") and name != "count" else table.clone()
            for name, table in buffers.items()
        }
        for _ in range(2)
    )
    version = ours["count"]._version
    native.follow(*ours.values(), momentum, stats)
    aten.follow(*theirs.values(), momentum, stats)
    assert ours["count"]._version > version
    for actual, expected in zip(ours.values(), theirs.values(), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)
    assert ours["count"].item() == (5 if bad is None or absent == "var" else 4)


def test_draws_lose_no_digits_to_outliers_that_were_not_drawn():
    """Any number of them, since each pool is taken around its own first sample."""
    mean = torch.randn(9, 70, dtype=torch.float64)
    mean[:4] += 1e12
    moments = Moments(mean, torch.rand(9, 70, dtype=torch.float64))
    indices = torch.randint(4, 9, (9, 5))
    _, var = native.draws(moments, torch.zeros(1, 70, dtype=torch.float64), indices, torch.float64)
    for k in range(9):
        drawn = mean[indices[k]]
        wanted = moments.var[indices[k]].mean(0) + drawn.var(0, correction=0)
        torch.testing.assert_close(var[k], wanted, rtol=1e-12, atol=0)

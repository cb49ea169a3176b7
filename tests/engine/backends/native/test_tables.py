import pytest
import torch
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.engine.backends.native.library import Library
from ghostnoise.engine.plan import COMPONENTS
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, GhostBatch
from hypothesis import given
from hypothesis import strategies as st

from support.backend_checks import check_draws, check_tables

NATIVE = Native()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 150), st.sampled_from([torch.float32, torch.float64]))
def test_draws_equal_the_naive_loop(rows, drawn, channels, dtype):
    check_draws(NATIVE, rows, drawn, channels, dtype)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("contributors", [GhostBatch, Exclusive])
def test_pools_equal_those_of_aten(native, contributors, ghost_size, single):
    """Also if samples have a single position, whose means are in float32 and whose variance is absent."""
    x = torch.randn(9, 70, 1 if single else 5) + 3
    x[4] += 1e6
    ours = native.pool(contributors(ghost_size), native.moments(x))
    wanted = ATEN.pool(contributors(ghost_size), ATEN.moments(x))
    for actual, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@given(
    st.sampled_from([torch.float32, torch.float64]), st.integers(1, 9), st.integers(1, 150), st.integers(1, 9),
    st.sampled_from(COMPONENTS), st.booleans(), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_tables_equal_those_of_aten(dtype, batch_size, channels, per_pool, components, affine, min_std):
    check_tables(NATIVE, dtype, batch_size, channels, per_pool, components, affine, min_std)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tables_equal_those_of_aten(native, dtype):
    for per_pool in (1, 32):
        check_tables(native, dtype, 300, 130, per_pool, "both", True, 0.5)


@pytest.mark.parametrize("ghost_size", [2, 4, 9, None])
@pytest.mark.parametrize("spatial", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [GhostBatch, Exclusive])
def test_linear_terms_equal_those_of_aten(native, kind, ghost_size, spatial, dtype):
    """Around a center in the dtype of the gradient, where that of `aten` is not rounded."""
    contributors, moments = kind(ghost_size), native.moments(torch.randn(9, 70, spatial) + 3)
    pooled = native.pool(contributors, moments)
    gradient = Moments(*torch.randn(2, *pooled.mean.shape, dtype=torch.float64).to(dtype).unbind())
    doubled = Moments(*(table.double() for table in gradient))
    center, slope, offset = native.linear_term(contributors, moments, pooled, gradient, None, 9, spatial)
    wanted = ATEN.linear_term(contributors, moments, pooled, doubled, None, 9, spatial)
    single = {"rtol": 1e-6, "atol": 1e-7} if kind is GhostBatch else {"rtol": 1e-5, "atol": 1e-5}
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else single
    assert center.dtype == slope.dtype == offset.dtype == dtype
    torch.testing.assert_close(center.double(), wanted.center.double(), **close)
    torch.testing.assert_close(slope.double(), wanted.slope, **close)
    torch.testing.assert_close(offset + slope.double() * (wanted.center - center), wanted.offset, **close)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0, None])
@pytest.mark.parametrize("absent", [None, "mean", "var", "both"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_buffers_are_updated_as_in_aten(momentum, absent, bad, dtype, monkeypatch):
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
    called, run = [], Library.run
    monkeypatch.setattr(Library, "run", lambda self, name, *given: (called.append(name), run(self, name, *given)))
    NATIVE.update_running(*ours.values(), momentum, stats)
    ATEN.update_running(*theirs.values(), momentum, stats)
    assert called == ["update_running"]  # else `aten` would be compared with itself
    assert ours["count"]._version > version
    for actual, expected in zip(ours.values(), theirs.values(), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)
    assert ours["count"].item() == (5 if bad is None or absent == "var" else 4)


def test_draws_lose_no_digits_to_outliers_that_were_not_drawn():
    """Any number of them, since each pool is computed relative to its own first sample."""
    mean = torch.randn(9, 70, dtype=torch.float64)
    mean[:4] += 1e12
    moments = Moments(mean, torch.rand(9, 70, dtype=torch.float64))
    indices = torch.randint(4, 9, (9, 5))
    _, var = NATIVE.pool_drawn(moments, torch.zeros(1, 70, dtype=torch.float64), indices, None, torch.float64)
    for k in range(9):
        drawn = mean[indices[k]]
        wanted = moments.var[indices[k]].mean(0) + drawn.var(0, correction=0)
        torch.testing.assert_close(var[k], wanted, rtol=1e-12, atol=0)


def test_large_draws_keep_their_digits():
    """At the largest ghost size, a plain sum in float32 errs by 3e-4; sums of sums of 256 err by 2 * 256 / 2**24."""
    generator, bound = torch.Generator().manual_seed(0), 2 * 256 / 2**24
    moments = NATIVE.moments(torch.randn(8, 3, 4, generator=generator) + 1)
    indices = torch.randint(8, (2, 65_536), generator=generator)
    around = moments.mean.mean(0, keepdim=True)
    ours = NATIVE.pool_drawn(moments, around, indices, None, torch.float32)
    wanted = ATEN.pool_drawn(moments, around, indices, None, torch.float64)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)

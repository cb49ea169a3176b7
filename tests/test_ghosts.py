import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ghostnoise import ghosts
from ghostnoise.moments import Moments


def batch(batch_size=9, channels=3, spatial=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randn(batch_size, channels, spatial, dtype=dtype, generator=generator) * 2 + 1


def moments_of(x):
    return Moments(x.mean(2), x.var(2, correction=0))


def assert_pools(pooled, x, members):
    """Row k of `pooled` are the moments of the samples members(k), taken together."""
    for k in range(len(x)):
        mean, var = reference.statistics(x[members(k)])
        row = k if len(pooled.mean) > 1 else 0
        torch.testing.assert_close(pooled.mean[row], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pooled.var[row], var, rtol=1e-11, atol=1e-12)


@given(st.integers(1, 20), st.integers(1, 24))
def test_ghost_sizes(batch_size, ghost_size):
    sizes = ghosts.ghost_sizes(batch_size, ghost_size)
    assert sum(sizes) == batch_size
    assert all(size == ghost_size for size in sizes[:-1])
    assert sizes[-1] < 2 * ghost_size
    assert sizes[-1] >= min(ghost_size, batch_size)


def test_everyone():
    x = batch()
    pooled = ghosts.everyone(moments_of(x))
    assert pooled.mean.shape == (1, 3)
    assert_pools(pooled, x, lambda k: list(range(9)))


@pytest.mark.parametrize("batch_size", [2, 3, 9])
def test_others(batch_size):
    x = batch(batch_size)
    assert_pools(ghosts.others(moments_of(x)), x, lambda k: [n for n in range(batch_size) if n != k])


@pytest.mark.parametrize("who", [ghosts.everyone, ghosts.others])
@pytest.mark.parametrize("ghost_size", [2, 3, 4, 5, 9, 12])
def test_blocks(ghost_size, who):
    x = batch()

    def members(k):
        block = reference.ghost_batch_of(k, 9, ghost_size)
        return block if who is ghosts.everyone else [n for n in block if n != k]

    assert_pools(ghosts.blocks(moments_of(x), ghost_size, who), x, members)


@pytest.mark.parametrize("ghost_size", [1, 4, 30])
def test_draws(ghost_size):
    x = batch()
    indices = torch.randint(9, (9, ghost_size))
    assert_pools(ghosts.draws(moments_of(x), indices), x, lambda k: indices[k].tolist())


def test_others_do_not_cancel_when_self_is_the_outlier():
    """In mean, in variance or in both, up to 1e12 standard deviations; also when there are two of them."""
    for outliers in ([4], [4, 7]):
        for shift, scale in ((1e12, 1), (0, 1e8), (1e8, 1e6)):
            x = batch()
            x[outliers] = x[outliers] * scale + shift
            pooled = ghosts.others(moments_of(x))
            for k in range(9):
                mean, var = reference.statistics(x[[n for n in range(9) if n != k]])
                torch.testing.assert_close(pooled.var[k], var, rtol=1e-9, atol=0)
                assert ((pooled.mean[k] - mean).abs() <= 1e-9 * var.sqrt()).all()


def test_draws_do_not_cancel_when_an_outlier_is_not_drawn():
    x = batch()
    x[0] += 1e12
    indices = torch.randint(1, 9, (9, 5))
    pooled = ghosts.draws(moments_of(x), indices)
    for k in range(9):
        torch.testing.assert_close(pooled.var[k], reference.statistics(x[indices[k]])[1], rtol=1e-9, atol=0)


def test_an_outlier_in_another_block_changes_nothing():
    x = batch()
    calm = ghosts.blocks(moments_of(x), 3)
    x[0] += 1e12
    wild = ghosts.blocks(moments_of(x), 3)
    assert torch.equal(calm.mean[3:], wild.mean[3:])
    assert torch.equal(calm.var[3:], wild.var[3:])


def test_a_constant_batch_has_no_variance():
    constant = Moments(torch.full((6, 2), 0.1, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64))
    for pooled in (
        ghosts.everyone(constant),
        ghosts.others(constant),
        ghosts.blocks(constant, 4),
        ghosts.draws(constant, torch.randint(6, (6, 3))),
    ):
        assert (pooled.var >= 0).all()
        assert (pooled.var <= 1e-30).all()


def test_indices_are_uniform_and_come_from_the_generator():
    n, batch_size = 40_000, 16
    generator = torch.Generator().manual_seed(0)
    indices = torch.cat(
        [ghosts.draw_indices(batch_size, 50, torch.device("cpu"), generator) for _ in range(n // (50 * batch_size))]
    )
    assert indices.shape[1] == 50
    expected = indices.numel() / batch_size
    counts = torch.bincount(indices.flatten(), minlength=batch_size).double()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < batch_size - 1 + 5 * (2 * (batch_size - 1)) ** 0.5
    again = ghosts.draw_indices(batch_size, 50, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert torch.equal(indices[:batch_size], again)

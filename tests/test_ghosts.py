import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ghostnoise import ghosts
from ghostnoise.engine.backends import aten
from ghostnoise.moments import Moments, spread


def batch(batch_size=9, channels=3, spatial=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randn(batch_size, channels, spatial, dtype=dtype, generator=generator) * 2 + 1


def moments_of(x):
    return Moments(x.mean(2), x.var(2, correction=0))


def assert_pools(pooled, x, members):
    """Row k of `pooled` are the moments of the samples members(k), taken together."""
    for k in range(len(x)):
        mean, var = reference.statistics(x[members(k)])
        torch.testing.assert_close(pooled.mean[k], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pooled.var[k], var, rtol=1e-11, atol=1e-12)


@given(st.integers(1, 20), st.integers(1, 24))
def test_ghost_sizes(batch_size, ghost_size):
    sizes = ghosts.ghost_sizes(batch_size, ghost_size)
    assert sum(sizes) == batch_size
    assert all(size == ghost_size for size in sizes[:-1])
    assert sizes[-1] < 2 * ghost_size
    assert sizes[-1] >= min(ghost_size, batch_size)


@pytest.mark.parametrize("ghost_size", [2, 3, 4, 5, 9, 12, None])
def test_ghost_batches(ghost_size):
    x = batch()
    who = ghosts.GhostBatch(ghost_size)
    stats = who.pool(moments_of(x))
    assert len(stats.mean) == len(ghosts.ghost_sizes(9, ghost_size or 9))
    each = Moments(*(spread(table, 9, who.each(9)) for table in stats))
    assert_pools(each, x, lambda k: reference.ghost_batch_of(k, 9, ghost_size or 9))


@pytest.mark.parametrize("ghost_size", [2, 3, 4, 5, 9, 12, None])
def test_others(ghost_size):
    x = batch()
    pooled = ghosts.Others(ghost_size).pool(moments_of(x))
    assert_pools(pooled, x, lambda k: [n for n in reference.ghost_batch_of(k, 9, ghost_size or 9) if n != k])


def test_oneself_among_a_population():
    """As many copies of the sample and of the population as the shares say, pooled."""
    x, population = batch(), batch(batch_size=3)
    mean, var = reference.statistics(population)
    pooled = ghosts.Among(Moments(mean, var), 0.25).pool(moments_of(x))
    for k in range(9):
        wanted = reference.statistics(torch.cat([x[k : k + 1], population]))
        torch.testing.assert_close(pooled.mean[k], wanted[0])
        torch.testing.assert_close(pooled.var[k], wanted[1])


@pytest.mark.parametrize("ghost_size", [2, 3, 4, None])
def test_the_average_counts_samples(ghost_size):
    who = ghosts.GhostBatch(ghost_size)
    table = torch.randn(len(ghosts.ghost_sizes(9, ghost_size or 9)), 3, dtype=torch.float64)
    torch.testing.assert_close(who.average(table, 9), spread(table, 9, who.each(9)).mean(0, keepdim=True))


@pytest.mark.parametrize("ghost_size", [2, 4, None])
@pytest.mark.parametrize("kind", [ghosts.GhostBatch, ghosts.Others])
def test_closed_ramps_equal_the_derivative_of_pool(kind, ghost_size):
    """`slope * (x - center) + offset` against autograd from the statistics to x."""
    x = batch().requires_grad_()
    who = kind(ghost_size)
    moments = moments_of(x)
    stats = who.pool(moments)
    gradient = Moments(*(torch.randn_like(table) for table in stats))
    (wanted,) = torch.autograd.grad(stats, x, gradient, retain_graph=True)
    kept, stats = (Moments(*(table.detach() for table in pair)) for pair in (who.keep(moments, stats), stats))
    ramp = who.ramp(kept, stats, gradient, 9, 4, aten)
    center, slope, offset = (spread(table, 9, who.each(9))[..., None] for table in ramp)
    torch.testing.assert_close(slope * (x.detach() - center) + offset, wanted)
    for ours, theirs in zip(who.recall(kept, aten), stats, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ghost_size", [1, 4, 30])
def test_draws(ghost_size):
    x = batch()
    indices = torch.randint(9, (9, ghost_size))
    assert_pools(ghosts.draws(moments_of(x), torch.zeros(1, 3), indices), x, lambda k: indices[k].tolist())


def test_others_do_not_cancel_when_self_is_the_outlier():
    """In mean, in variance or in both, up to 1e12 standard deviations; also when there are two of them."""
    for outliers in ([4], [4, 7]):
        for shift, scale in ((1e12, 1), (0, 1e8), (1e8, 1e6)):
            x = batch()
            x[outliers] = x[outliers] * scale + shift
            pooled = ghosts.others(*moments_of(x))
            for k in range(9):
                mean, var = reference.statistics(x[[n for n in range(9) if n != k]])
                torch.testing.assert_close(pooled.var[k], var, rtol=1e-9, atol=0)
                assert ((pooled.mean[k] - mean).abs() <= 1e-9 * var.sqrt()).all()


def test_a_single_other_is_taken_as_it_is():
    x = batch(batch_size=2)
    x[1] += 1e12
    mean, var = ghosts.others(*moments_of(x))
    assert torch.equal(mean, moments_of(x).mean.flip(0))
    assert torch.equal(var, moments_of(x).var.flip(0))


def test_draws_do_not_cancel_when_an_outlier_is_not_drawn():
    x = batch()
    x[0] += 1e12
    indices = torch.randint(1, 9, (9, 5))
    pooled = ghosts.draws(moments_of(x), torch.zeros(1, 3), indices)
    for k in range(9):
        torch.testing.assert_close(pooled.var[k], reference.statistics(x[indices[k]])[1], rtol=1e-9, atol=0)


def test_an_outlier_in_another_block_changes_nothing():
    x = batch()
    calm = ghosts.GhostBatch(3).pool(moments_of(x))
    x[0] += 1e12
    wild = ghosts.GhostBatch(3).pool(moments_of(x))
    assert torch.equal(calm.mean[1:], wild.mean[1:])
    assert torch.equal(calm.var[1:], wild.var[1:])


def test_a_constant_batch_has_no_variance():
    constant = Moments(torch.full((6, 2), 0.1, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64))
    for pooled in (
        ghosts.everyone(*constant),
        ghosts.others(*constant),
        ghosts.GhostBatch(4).pool(constant),
        ghosts.draws(constant, torch.zeros(1, 2), torch.randint(6, (6, 3))),
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

import pytest
import torch
from ghostnoise.statistics import samples
from ghostnoise.statistics.moments import Moments, expand_pools
from hypothesis import given
from hypothesis import strategies as st

from support import reference


def batch(batch_size=9, channels=3, spatial=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randn(batch_size, channels, spatial, dtype=dtype, generator=generator) * 2 + 1


def moments_of(x):
    return Moments(x.mean(2), x.var(2, correction=0))


def assert_pools(pooled, x, members):
    """Row k of `pooled` holds the moments of the samples members(k), taken together."""
    for k in range(len(x)):
        mean, var = reference.statistics(x[members(k)])
        torch.testing.assert_close(pooled.mean[k], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pooled.var[k], var, rtol=1e-11, atol=1e-12)


@given(st.integers(1, 20), st.integers(1, 24))
def test_ghost_sizes(batch_size, ghost_size):
    sizes = samples.ghost_sizes(batch_size, ghost_size)
    assert sum(sizes) == batch_size
    assert all(size == ghost_size for size in sizes[:-1])
    assert sizes[-1] < 2 * ghost_size
    assert sizes[-1] >= min(ghost_size, batch_size)


@pytest.mark.parametrize("ghost_size", [2, 3, 4, 5, 9, 12, None])
def test_ghost_batches(ghost_size):
    x = batch()
    contributors = samples.GhostBatch(ghost_size)
    stats = contributors.pool(moments_of(x), None)
    assert len(stats.mean) == contributors.pools(9) == len(samples.ghost_sizes(9, ghost_size or 9))
    by_sample = Moments(*(expand_pools(table, 9, contributors.samples_per_pool(9)) for table in stats))
    assert_pools(by_sample, x, lambda k: reference.ghost_batch_of(k, 9, ghost_size or 9))


@pytest.mark.parametrize("ghost_size", [2, 3, 4, 5, 9, 12, None])
def test_exclusive(ghost_size):
    x = batch()
    pooled = samples.Exclusive(ghost_size).pool(moments_of(x), None)
    assert len(pooled.mean) == samples.Exclusive(ghost_size).pools(9) == 9
    assert_pools(pooled, x, lambda k: [n for n in reference.ghost_batch_of(k, 9, ghost_size or 9) if n != k])


@pytest.mark.parametrize("ghost_size", [2, 3, 4, 12, None])
def test_the_share_of_a_ghost_batch(ghost_size):
    """The sample itself with weight 1/n is one of the n samples of its ghost batch."""
    x = batch(batch_size=6)
    n = min(ghost_size or 6, 6)
    n = 6 if n == 4 else n  # the remaining samples join the only ghost batch
    pooled = samples.ExclusiveMixture(ghost_size, 1 / n).pool(moments_of(x), None)
    assert_pools(pooled, x, lambda k: reference.ghost_batch_of(k, 6, ghost_size or 6))


def test_a_mixture_with_a_population():
    """The pooled moments of the sample and of the population, in the proportion of their weights."""
    x, population = batch(), batch(batch_size=3)
    mean, var = reference.statistics(population)
    pooled = samples.Mixture(0.25).pool(moments_of(x), Moments(mean, var))
    for k in range(9):
        wanted = reference.statistics(torch.cat([x[k : k + 1], population]))
        torch.testing.assert_close(pooled.mean[k], wanted[0])
        torch.testing.assert_close(pooled.var[k], wanted[1])


@pytest.mark.parametrize("ghost_size", [2, 3, 4, None])
def test_the_average_is_weighted_by_samples(ghost_size):
    contributors = samples.GhostBatch(ghost_size)
    table = torch.randn(contributors.pools(9), 3, dtype=torch.float64)
    by_sample = expand_pools(table, 9, contributors.samples_per_pool(9))
    torch.testing.assert_close(contributors.average(table, 9), by_sample.mean(0, keepdim=True))


CONTRIBUTORS = [
    *(kind(size) for kind in (samples.GhostBatch, samples.Exclusive) for size in (2, 4, None)),
    samples.SampleItself(),
    samples.Mixture(0.2),
    *(samples.ExclusiveMixture(size, 0.2) for size in (2, 4, None)),
]


@pytest.mark.parametrize("contributors", CONTRIBUTORS, ids=repr)
def test_linear_terms_equal_the_derivative_of_pool(contributors):
    """`slope * (x - center) + offset` against autograd from the statistics to x."""
    x = batch().requires_grad_()
    reference_stats = Moments(torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    moments = moments_of(x)
    stats = contributors.pool(moments, reference_stats)
    gradient = Moments(*(torch.randn_like(table) for table in stats))
    (wanted,) = torch.autograd.grad(stats, x, gradient, retain_graph=True)
    kept = moments.detach() if contributors.keeps_moments else stats.detach()
    term = contributors.linear_term(kept, stats.detach(), gradient, reference_stats, 9, 4)
    shared = contributors.samples_per_pool(9)
    center, slope, offset = (expand_pools(table, 9, shared)[..., None] for table in term)
    torch.testing.assert_close(slope * (x.detach() - center) + offset, wanted)


def test_contributors_are_found_by_name():
    for contributors in CONTRIBUTORS:
        kind = samples.Contributors.kinds[type(contributors).__name__]
        assert kind.from_numbers(*contributors.numbers()) == contributors


@pytest.mark.parametrize("ghost_size", [1, 4, 30])
def test_drawn_samples(ghost_size):
    x = batch()
    indices = torch.randint(9, (9, ghost_size))
    assert_pools(samples.pool_drawn(moments_of(x), torch.zeros(1, 3), indices), x, lambda k: indices[k].tolist())


def ragged(counts):
    """Return samples with these numbers of values, and tables of their moments; an empty sample's moments are 0."""
    values = [torch.randn(3, count, dtype=torch.float64) + 5 for count in counts]
    empty = (torch.zeros(3, dtype=torch.float64),) * 2
    moments = [reference.statistics(one[None]) if one.numel() else empty for one in values]
    return values, Moments(*map(torch.stack, zip(*moments, strict=True)))


def test_samples_weigh_by_their_counts():
    counts = torch.tensor([4, 1, 0, 7, 2])
    values, moments = ragged(counts.tolist())
    mean, var = reference.statistics(torch.cat(values, 1)[None])
    pooled = samples.pool_all(*moments, counts[:, None])
    torch.testing.assert_close(pooled.mean[0], mean)
    torch.testing.assert_close(pooled.var[0], var)
    indices = torch.tensor([[0, 3, 3], [1, 4, 0], [2, 2, 1], [3, 3, 3], [2, 4, 2]])
    drawn = samples.pool_drawn(moments, torch.ones(1, 3, dtype=torch.float64), indices, counts)
    for k, row in enumerate(indices.tolist()):
        mean, var = reference.statistics(torch.cat([values[index] for index in row], 1)[None])
        torch.testing.assert_close(drawn.mean[k], mean - 1)
        torch.testing.assert_close(drawn.var[k], var)


def test_equal_counts_are_no_counts():
    moments, counts = moments_of(batch()), torch.full((9,), 4)
    torch.testing.assert_close(samples.pool_all(*moments, counts[:, None]), samples.pool_all(*moments))
    indices = torch.randint(9, (9, 5))
    given = (moments, torch.zeros(1, 3), indices)
    torch.testing.assert_close(samples.pool_drawn(*given, counts), samples.pool_drawn(*given))


def test_pools_without_values_are_finite():
    moments, none = moments_of(batch()), torch.zeros(9)
    assert all((table == 0).all() for table in samples.pool_all(*moments, none[:, None]))
    drawn = samples.pool_drawn(moments, torch.zeros(1, 3), torch.randint(9, (9, 5)), none)
    assert all(table.isfinite().all() for table in drawn)


def test_excluding_self_does_not_cancel_when_self_is_the_outlier():
    """In mean, in variance or in both, up to 1e12 standard deviations; also when there are two of them."""
    for outliers in ([4], [4, 7]):
        for shift, scale in ((1e12, 1), (0, 1e8), (1e8, 1e6)):
            x = batch()
            x[outliers] = x[outliers] * scale + shift
            pooled = samples.pool_excluding_self(*moments_of(x))
            for k in range(9):
                mean, var = reference.statistics(x[[n for n in range(9) if n != k]])
                torch.testing.assert_close(pooled.var[k], var, rtol=1e-9, atol=0)
                assert ((pooled.mean[k] - mean).abs() <= 1e-9 * var.sqrt()).all()


def test_a_single_other_sample_is_copied():
    x = batch(batch_size=2)
    x[1] += 1e12
    mean, var = samples.pool_excluding_self(*moments_of(x))
    assert torch.equal(mean, moments_of(x).mean.flip(0))
    assert torch.equal(var, moments_of(x).var.flip(0))


def test_drawn_samples_do_not_cancel_when_an_outlier_is_not_drawn():
    x = batch()
    x[0] += 1e12
    indices = torch.randint(1, 9, (9, 5))
    pooled = samples.pool_drawn(moments_of(x), torch.zeros(1, 3), indices)
    for k in range(9):
        torch.testing.assert_close(pooled.var[k], reference.statistics(x[indices[k]])[1], rtol=1e-9, atol=0)


def test_an_outlier_in_another_ghost_batch_changes_nothing():
    x = batch()
    calm = samples.GhostBatch(3).pool(moments_of(x), None)
    x[0] += 1e12
    wild = samples.GhostBatch(3).pool(moments_of(x), None)
    assert torch.equal(calm.mean[1:], wild.mean[1:])
    assert torch.equal(calm.var[1:], wild.var[1:])


def test_a_constant_batch_has_no_variance():
    constant = Moments(torch.full((6, 2), 0.1, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64))
    for pooled in (
        samples.pool_all(*constant),
        samples.pool_excluding_self(*constant),
        samples.GhostBatch(4).pool(constant, None),
        samples.pool_drawn(constant, torch.zeros(1, 2), torch.randint(6, (6, 3))),
    ):
        assert (pooled.var >= 0).all()
        assert (pooled.var <= 1e-30).all()


def test_indices_are_uniform_and_come_from_the_generator():
    n, batch_size = 40_000, 16
    generator = torch.Generator().manual_seed(0)
    indices = torch.cat(
        [samples.draw_indices(batch_size, 50, torch.device("cpu"), generator) for _ in range(n // (50 * batch_size))]
    )
    assert indices.shape[1] == 50
    expected = indices.numel() / batch_size
    counts = torch.bincount(indices.flatten(), minlength=batch_size).double()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < batch_size - 1 + 5 * (2 * (batch_size - 1)) ** 0.5
    again = samples.draw_indices(batch_size, 50, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert torch.equal(indices[:batch_size], again)


def test_only_samples_that_are_there_are_drawn():
    counts = torch.tensor([0, 5, 0, 1, 2, 0, 9, 0])
    rows, size = 400, 100
    indices = samples.draw_present(counts, size, rows, torch.Generator().manual_seed(0))
    assert indices.shape == (rows, size)
    drawn = torch.bincount(indices.flatten(), minlength=8).double()
    assert (drawn[counts == 0] == 0).all()
    expected = rows * size / 4
    chi_square = ((drawn[counts > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 3 + 5 * 6**0.5
    assert torch.equal(indices, samples.draw_present(counts, size, rows, torch.Generator().manual_seed(0)))
    none = samples.draw_present(torch.zeros(4), 3, 2, None)
    assert ((none >= 0) & (none < 4)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("ghost_size", [2, 3, 4, 9])
def test_excluding_self_keeps_a_non_finite_sample_out_of_its_own_statistics(bad, ghost_size):
    """Sample 4 is not finite: its own statistics are, and those of the other samples of its ghost batch are not."""
    x, expected = batch(), samples.Exclusive(ghost_size).pool(moments_of(batch()), None)
    x[4, 1, 2] = bad
    pooled = samples.Exclusive(ghost_size).pool(moments_of(x), None)
    others = [k for k in reference.ghost_batch_of(4, 9, ghost_size) if k != 4]
    clean = [k for k in range(9) if k not in others]
    for table, wanted in zip(pooled, expected, strict=True):
        torch.testing.assert_close(table[clean], wanted[clean])
        torch.testing.assert_close(table[:, [0, 2]], wanted[:, [0, 2]])
    assert pooled.var[others, 1].isnan().all()

"""Distributions against the raw values that they were gathered from."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.meter.histogram import Gathering
from metering import assert_counted

PLACES = st.tuples(st.sampled_from([0, 1]), st.sampled_from([1, 2, 32, 1000]), st.integers(1, 4))
ALL = lambda channels: torch.ones(channels, dtype=torch.bool)  # noqa: E731


def gathered(center, size, parts, weights=None):
    gathering = Gathering(center, size, parts[0].shape[1])
    for part, weight in zip(parts, weights or [1] * len(parts), strict=True):
        gathering.add(part, ALL(part.shape[1]), weight)
    return gathering.result()


def values_around(center, size, rows, channels, seed, spread=1.0):
    """Skewed values; of a variance, none below 0."""
    generator = torch.Generator().manual_seed(seed)
    beside = torch.randn(rows, channels, dtype=torch.float64, generator=generator).exp() - 1.5
    values = center + spread * beside / size**0.5
    return values if center == 0 else values.abs()


@given(PLACES, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 99))
def test_counts_and_moments_of_weighted_parts(place, parts, seed):
    center, size, channels = place
    tables = [values_around(center, size, rows, channels, seed + k) for k, (rows, _) in enumerate(parts)]
    weights = [weight for _, weight in parts]
    found = gathered(center, size, tables, weights)
    raw = np.concatenate([np.repeat(table.numpy(), weight, 0) for table, weight in zip(tables, weights, strict=True)])
    assert_counted(found, raw, 0.0)
    np.testing.assert_allclose(found.mean, raw.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.var, raw.var(0), rtol=1e-9, atol=1e-13)
    np.testing.assert_array_equal(found.std, np.sqrt(found.var))
    if len({*raw[:, 0]}) > 3:
        np.testing.assert_allclose(found.skewness, stats.skew(raw), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.kurtosis, stats.kurtosis(raw), rtol=1e-6, atol=1e-6)


@given(PLACES, st.integers(0, 99))
def test_the_cumulative_distribution_and_the_density(place, seed):
    center, size, channels = place
    values = values_around(center, size, 50, channels, seed)
    found = gathered(center, size, [values])
    for channel, below in enumerate(found.cdf()):
        assert below.tolist() == [(values[:, channel] < edge).double().mean() for edge in torch.tensor(found.edges)]
    inside = (found.density() * np.diff(found.edges)).sum(1)
    np.testing.assert_allclose(inside, 1 - (found.counts[:, 0] + found.counts[:, -1]) / 50)


@pytest.mark.parametrize("size", [1, 32, 10_000])
def test_bins_are_narrow_against_the_noise_and_wide_enough(size):
    """Of a fully connected layer, no bin has over 4 % of the noise, and outside of them all is less than 1e-6."""
    for center, law in ((0, stats.norm(scale=size**-0.5)), (1, stats.chi2(size, scale=1 / size))):
        masses = np.diff(law.cdf([-np.inf, *Gathering(center, size, 1).edges.numpy(), np.inf]))
        assert masses.max() < (0.04 if size > 1 else 0.2)  # χ²(1) has no bounded density
        assert masses[0] + masses[-1] < 1e-6


def test_bins_resolve_the_noise_of_wide_images():
    """With a standard deviation of 1/14 of a fully connected layer's, that is of 14 x 14 positions without σ_B²."""
    masses = np.diff(stats.norm(scale=32**-0.5 / 14).cdf(Gathering(0, 32, 1).edges.numpy()))
    assert masses.max() < 0.12


def test_a_value_at_an_edge_is_not_below_it():
    edges = Gathering(1, 4, 1).edges
    found = gathered(1, 4, [edges[:, None]])
    assert found.counts[0].tolist() == [0] + [1] * len(edges)
    assert found.cdf()[0].tolist() == pytest.approx([k / len(edges) for k in range(len(edges))])


def test_values_far_outside_are_counted():
    found = gathered(0, 4, [torch.tensor([[-1e9], [1e9], [0.0]], dtype=torch.float64)])
    assert (found.counts[0, 0], found.counts[0, -1], found.n[0]) == (1, 1, 3)


def test_channels_that_are_not_live_gather_nothing():
    gathering = Gathering(1, 4, 2)
    gathering.add(torch.rand(5, 2, dtype=torch.float64), torch.tensor([True, False]), 3)
    found = gathering.result()
    assert found.n.tolist() == [15, 0]
    assert np.isnan([found.mean, found.var, found.skewness, found.kurtosis]).tolist() == [[False, True]] * 4
    assert np.isnan(found.cdf()).all(1).tolist() == [False, True]


@given(PLACES, st.integers(0, 99))
def test_pooled_is_all_channels_together(place, seed):
    """Also if one of them was live less often, or never."""
    center, size, channels = place
    first, second = (values_around(center, size, rows, channels + 2, seed + rows) for rows in (20, 30))
    gathering = Gathering(center, size, channels + 2)
    live = ALL(channels + 2)
    live[-1] = False
    gathering.add(first, live, 1)
    live[-2] = False
    gathering.add(second, live, 1)
    pooled = gathering.result().pooled()
    raw = np.concatenate([first[:, :-1].flatten().numpy(), second[:, :-2].flatten().numpy()])[:, None]
    assert_counted(pooled, raw, 0.0)
    np.testing.assert_allclose(pooled.mean, raw.mean(0), rtol=1e-9)
    np.testing.assert_allclose(pooled.var, raw.var(0), rtol=1e-9)
    np.testing.assert_allclose(pooled.skewness, stats.skew(raw), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pooled.kurtosis, stats.kurtosis(raw), rtol=1e-6, atol=1e-6)


def test_pooled_without_any_is_not_a_number():
    pooled = Gathering(0, 4, 3).result().pooled()
    assert pooled.n.tolist() == [0]
    assert np.isnan(pooled.var).all()


def test_memory_does_not_grow_with_what_is_gathered():
    gathering = Gathering(0, 4, 2)
    sizes = lambda: [t.numel() for t in vars(gathering).values() if isinstance(t, torch.Tensor)]  # noqa: E731
    before = sizes()
    for seed in range(5):
        gathering.add(values_around(0, 4, 100, 2, seed), ALL(2), 1)
    assert sizes() == before


def test_a_result_is_not_changed_by_what_comes_later():
    gathering = Gathering(0, 4, 1)
    gathering.add(torch.zeros(3, 1, dtype=torch.float64), ALL(1), 1)
    found = gathering.result()
    gathering.add(torch.ones(3, 1, dtype=torch.float64), ALL(1), 1)
    assert found.n.tolist() == [3]
    assert found.mean.tolist() == [0]

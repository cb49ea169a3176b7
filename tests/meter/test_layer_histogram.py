"""Histograms and moments against the raw values that were added."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.meter.layer import HistogramAccumulator
from support.metering import assert_histogram

SETTINGS = st.tuples(st.sampled_from([0, 1]), st.sampled_from([1, 2, 32, 1000]), st.integers(1, 4))


def every(channels):
    """Mask of all channels."""
    return torch.ones(channels, dtype=torch.bool)


def distribution(center, size, tables, weights=None):
    histogram = HistogramAccumulator(center, size, tables[0].shape[1])
    for table, weight in zip(tables, weights or [1] * len(tables), strict=True):
        histogram.add(table, every(table.shape[1]), weight)
    return histogram.result()


def values_around(center, size, rows, channels, seed, spread=1.0):
    """Skewed values around a center; variances, around 1, are not negative."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(rows, channels, dtype=torch.float64, generator=generator).exp() - 1.5
    values = center + spread * offsets / size**0.5
    return values if center == 0 else values.abs()


@given(SETTINGS, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 99))
def test_counts_and_moments_of_weighted_tables(setting, parts, seed):
    center, size, channels = setting
    tables = [values_around(center, size, rows, channels, seed + k) for k, (rows, _) in enumerate(parts)]
    weights = [weight for _, weight in parts]
    found = distribution(center, size, tables, weights)
    raw = np.concatenate([np.repeat(table.numpy(), weight, 0) for table, weight in zip(tables, weights, strict=True)])
    assert_histogram(found, raw, 0.0)
    np.testing.assert_allclose(found.mean, raw.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.var, raw.var(0), rtol=1e-9, atol=1e-13)
    np.testing.assert_array_equal(found.std, np.sqrt(found.var))
    if len({*raw[:, 0]}) > 3:
        np.testing.assert_allclose(found.skewness, stats.skew(raw), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.kurtosis, stats.kurtosis(raw), rtol=1e-6, atol=1e-6)


@given(SETTINGS, st.integers(0, 99))
def test_the_cumulative_distribution_and_the_density(setting, seed):
    center, size, channels = setting
    values = values_around(center, size, 50, channels, seed)
    found = distribution(center, size, [values])
    for channel, below in enumerate(found.cdf()):
        assert below.tolist() == [(values[:, channel] < edge).double().mean() for edge in torch.tensor(found.edges)]
    inside = (found.density() * np.diff(found.edges)).sum(1)
    np.testing.assert_allclose(inside, 1 - (found.counts[:, 0] + found.counts[:, -1]) / 50)


@pytest.mark.parametrize("size", [1, 32, 10_000])
def test_bins_resolve_and_cover_the_noise_of_fully_connected_layers(size):
    """No bin contains more than 4 % of the noise, and less than 1e-6 lies outside of all bins."""
    for center, law in ((0, stats.norm(scale=size**-0.5)), (1, stats.chi2(size, scale=1 / size))):
        masses = np.diff(law.cdf([-np.inf, *HistogramAccumulator(center, size, 1).edges.numpy(), np.inf]))
        assert masses.max() < (0.04 if size > 1 else 0.2)  # the density of χ²(1) is not bounded
        assert masses[0] + masses[-1] < 1e-6


def test_bins_resolve_the_noise_of_wide_images():
    """Without σ_B², 14 x 14 positions have 1/14 of the standard deviation of a fully connected layer."""
    masses = np.diff(stats.norm(scale=32**-0.5 / 14).cdf(HistogramAccumulator(0, 32, 1).edges.numpy()))
    assert masses.max() < 0.12


def test_a_value_on_an_edge_is_in_the_bin_above():
    edges = HistogramAccumulator(1, 4, 1).edges
    found = distribution(1, 4, [edges[:, None]])
    assert found.counts[0].tolist() == [0] + [1] * len(edges)
    assert found.cdf()[0].tolist() == pytest.approx([k / len(edges) for k in range(len(edges))])


def test_values_outside_of_all_bins_are_counted():
    found = distribution(0, 4, [torch.tensor([[-1e9], [1e9], [0.0]], dtype=torch.float64)])
    assert (found.counts[0, 0], found.counts[0, -1], found.n[0]) == (1, 1, 3)


def test_channels_that_do_not_vary_are_not_counted():
    histogram = HistogramAccumulator(1, 4, 2)
    histogram.add(torch.rand(5, 2, dtype=torch.float64), torch.tensor([True, False]), 3)
    found = histogram.result()
    assert found.n.tolist() == [15, 0]
    assert np.isnan([found.mean, found.var, found.skewness, found.kurtosis]).tolist() == [[False, True]] * 4
    assert np.isnan(found.cdf()).all(1).tolist() == [False, True]


@given(SETTINGS, st.integers(0, 99))
def test_pooled_combines_all_channels(setting, seed):
    """Also if a channel varied in some batches only, or in none."""
    center, size, channels = setting
    first, second = (values_around(center, size, rows, channels + 2, seed + rows) for rows in (20, 30))
    histogram = HistogramAccumulator(center, size, channels + 2)
    varying = every(channels + 2)
    varying[-1] = False
    histogram.add(first, varying, 1)
    varying[-2] = False
    histogram.add(second, varying, 1)
    pooled = histogram.result().pooled()
    raw = np.concatenate([first[:, :-1].flatten().numpy(), second[:, :-2].flatten().numpy()])[:, None]
    assert_histogram(pooled, raw, 0.0)
    np.testing.assert_allclose(pooled.mean, raw.mean(0), rtol=1e-9)
    np.testing.assert_allclose(pooled.var, raw.var(0), rtol=1e-9)
    np.testing.assert_allclose(pooled.skewness, stats.skew(raw), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pooled.kurtosis, stats.kurtosis(raw), rtol=1e-6, atol=1e-6)


def test_pooled_without_values_is_nan():
    pooled = HistogramAccumulator(0, 4, 3).result().pooled()
    assert pooled.n.tolist() == [0]
    assert np.isnan(pooled.var).all()


def test_memory_does_not_grow_with_the_number_of_values():
    histogram = HistogramAccumulator(0, 4, 2)
    sizes = lambda: [t.numel() for t in vars(histogram).values() if isinstance(t, torch.Tensor)]  # noqa: E731
    before = sizes()
    for seed in range(5):
        histogram.add(values_around(0, 4, 100, 2, seed), every(2), 1)
    assert sizes() == before


def test_a_result_is_not_changed_by_later_values():
    histogram = HistogramAccumulator(0, 4, 1)
    histogram.add(torch.zeros(3, 1, dtype=torch.float64), every(1), 1)
    found = histogram.result()
    histogram.add(torch.ones(3, 1, dtype=torch.float64), every(1), 1)
    assert found.n.tolist() == [3]
    assert found.mean.tolist() == [0]

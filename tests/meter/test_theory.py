"""The laws against scipy, against numerical integrals, and against samples of the model that they describe."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.meter.theory import (
    COMPONENTS,
    LAWS,
    effective_size,
    kolmogorov_smirnov,
    law_cdf,
    laws_of,
    normalized_bound,
)

SIZES = st.sampled_from([1, 2, 3, 4, 8, 32, 256])
POSITIONS = st.sampled_from([1, 2, 3, 9, 64, 3136])
SHARES = st.sampled_from([0.0, 1e-6, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
TABLE = 1e-6  # interpolation error
# The error of a mean over 200 quantiles of a function that increases from 0 to 1 is at most half a quantile.
MIXTURE = 1 / 400 + TABLE


def points(component, size):
    """Points around the center of a component's distribution."""
    offsets = np.linspace(-6, 6, 201) / size**0.5
    return offsets if component == "shift" else np.unique(np.clip(1 + 2 * offsets, 0, None))


@pytest.mark.parametrize("size", [1, 2, 5, 32, 1000])
def test_fully_connected_laws_match_scipy(size):
    at = points("shift", size)
    np.testing.assert_allclose(law_cdf("fc", "shift", at, size)[0], stats.norm.cdf(at * size**0.5), atol=1e-12)
    at = points("scale", size)
    np.testing.assert_allclose(law_cdf("fc", "scale", at, size)[0], stats.chi2.cdf(at * size, size), atol=TABLE)
    exact = stats.chi2.cdf(at * size, size - 1) if size > 1 else (at > 0).astype(float)
    np.testing.assert_allclose(law_cdf("fc-exact", "scale", at, size)[0], exact, atol=TABLE)


@given(SIZES, POSITIONS, SHARES)
def test_the_shift_of_a_convolution_is_normal(size, positions, within):
    at = points("shift", size)
    found = law_cdf("conv", "shift", at, size, positions, np.array([within]), np.array([1 - within]))
    std = (within / (size * positions) + (1 - within) / size) ** 0.5
    np.testing.assert_allclose(found[0], stats.norm.cdf(at / std), atol=1e-12)
    np.testing.assert_array_equal(
        found, law_cdf("conv-exact", "shift", at, size, positions, np.array([within]), np.array([1 - within]))
    )


def terms_of(law, size, positions, within):
    """Factor and degrees of freedom of the two χ² terms of the variance: eq. 16, or around the ghost batch's mean."""
    values = size * positions
    if law == "conv":
        return (within / values, values), ((1 - within) / size, size)
    return (within / values, values - size), ((1 - within + within / positions) / size, size - 1)


@settings(max_examples=80)
@given(st.sampled_from(["conv", "conv-exact"]), SIZES, POSITIONS, SHARES)
def test_the_scale_of_a_convolution_is_a_sum_of_two_chi_squares(law, size, positions, within):
    """Against an integral over 5,000 quantiles of one term, whose error is at most 1/10,000."""
    (a, a_degrees), (b, b_degrees) = terms_of(law, size, positions, within)
    at = points("scale", size)[1::4]
    found = law_cdf(law, "scale", at, size, positions, np.array([within]), np.array([1 - within]))[0]
    expected = np.zeros(len(at))
    quantiles = b * stats.chi2.ppf((np.arange(5000) + 0.5) / 5000, b_degrees) if b_degrees else np.zeros(1)
    if a == 0 or a_degrees == 0:
        expected = stats.chi2.cdf(at / b, b_degrees) if b_degrees and b else (at > 0).astype(float)
    else:
        for k, point in enumerate(at):
            expected[k] = stats.chi2.cdf((point - quantiles) / a, a_degrees).mean()
    np.testing.assert_allclose(found, expected, atol=MIXTURE + 1 / 10_000)
    assert (np.diff(found) >= -1e-9).all()
    assert (found >= -1e-9).all()
    assert (found <= 1 + 1e-9).all()


@settings(max_examples=15)
@given(
    st.sampled_from([1, 2, 3, 8]), st.sampled_from([2, 3, 5]), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.integers(0, 9)
)
def test_exact_laws_match_gaussian_ghost_batches(size, positions, within, seed):
    """Sample ghost batches from the paper's model and measure them."""
    n = 20_000
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, size, 1)) * (1 - within) ** 0.5
    x = (x + random.normal(size=(n, size, positions)) * within**0.5).reshape(n, -1)
    critical = stats.kstwo.isf(1e-6, n) + MIXTURE
    shares = np.array([within]), np.array([1 - within])
    for component, values in (("shift", x.mean(1)), ("scale", x.var(1))):
        if size == 1 and within == 0 and component == "scale":  # constant 0, except for rounding
            continue
        at = np.quantile(values, np.linspace(0.001, 0.999, 300))
        below = np.searchsorted(np.sort(values), at) / n
        law = law_cdf("conv-exact", component, at, size, positions, *shares)[0]
        assert kolmogorov_smirnov(below, law) <= critical + 1 / n


@pytest.mark.parametrize(("size", "positions"), [(4, 3), (2, 2), (16, 4)])
def test_the_papers_law_matches_samples(size, positions):
    n, within = 50_000, 0.4
    random = np.random.default_rng(0)
    values = within / (size * positions) * random.chisquare(size * positions, n)
    values += (1 - within) / size * random.chisquare(size, n)
    at = np.quantile(values, np.linspace(0.001, 0.999, 300))
    law = law_cdf("conv", "scale", at, size, positions, np.array([within]), np.array([1 - within]))[0]
    assert kolmogorov_smirnov(np.searchsorted(np.sort(values), at) / n, law) <= stats.kstwo.isf(1e-6, n) + MIXTURE


def test_channels_are_independent_and_nan_stays_nan():
    within, between = np.array([0.2, np.nan, 0.0]), np.array([0.8, np.nan, 1.0])
    for law in LAWS:
        for component in COMPONENTS:
            at = points(component, 8)
            found = law_cdf(law, component, at, 8, 5, within, between)
            if law.startswith("fc"):
                assert found.shape == (1, len(at))
                continue
            assert np.isnan(found).all(1).tolist() == [False, True, False]
            for channel in (0, 2):
                alone = law_cdf(law, component, at, 8, 5, within[[channel]], between[[channel]])
                np.testing.assert_allclose(found[channel], alone[0], atol=1e-12)


def test_with_one_position_the_convolutional_laws_are_the_fully_connected_ones():
    at = points("scale", 8)
    for dof in ("", "-exact"):
        conv = law_cdf("conv" + dof, "scale", at, 8, 1, np.zeros(1), np.ones(1))
        np.testing.assert_allclose(conv, law_cdf("fc" + dof, "scale", at, 8), atol=1e-12)


def test_no_variance_is_negative():
    for law in LAWS:
        for size in (1, 2, 32):
            assert law_cdf(law, "scale", np.zeros(1), size, 4, np.array([0.5]), np.array([0.5])).tolist() == [[0]]


@pytest.mark.parametrize("size", [2, 3, 16, 1000])
def test_effective_size_inverts_the_variance_of_the_laws(size):
    assert effective_size("shift", np.array(1 / size)) == pytest.approx(size)
    assert effective_size("scale", stats.chi2.var(size, scale=1 / size), "paper") == pytest.approx(size)
    assert effective_size("scale", stats.chi2.var(size - 1, scale=1 / size)) == pytest.approx(size)


def test_effective_size_at_the_limits():
    assert effective_size("shift", np.zeros(1)).tolist() == [np.inf]
    assert effective_size("scale", np.zeros(1)).tolist() == [np.inf]
    assert np.isnan(effective_size("scale", np.array([0.51, np.nan]))).all()  # stronger than at any N
    assert effective_size("scale", np.array([0.5])).tolist() == [2]


def test_kolmogorov_smirnov_is_the_largest_difference():
    assert kolmogorov_smirnov(np.array([[0, 0.5, 1], [0, 0, 1]]), np.array([0, 0.2, 0.9])) == pytest.approx([0.3, 0.2])


def test_normalized_bound():
    assert normalized_bound(10) == 3
    assert normalized_bound(1) == 0


def test_laws_of_each_component():
    assert laws_of("shift") == ("fc", "conv")
    assert laws_of("scale") == ("fc", "fc-exact", "conv", "conv-exact")

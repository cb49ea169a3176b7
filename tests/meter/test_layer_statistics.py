"""Measured noise against theory, with bounds from the number of draws: a correct meter fails with about 1e-6."""

import numpy as np
import pytest
import torch
from scipy import stats

from support.metering import measure, variance_fractions

SIGMAS = 5


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def skewed(batch_size, channels, positions, seed=0):
    """Large variance between samples, and values that are not normal."""
    return random(batch_size, channels, 1, seed=seed).exp() + random(batch_size, channels, positions, seed=seed + 1)


def var_of_means(x):
    """Var_b(mean_b) over σ²."""
    return (x.mean(2).var(0, correction=0) / x.var((0, 2), correction=0)).numpy()


def error_of_mean(found, n):
    return SIGMAS * found.std / n**0.5


def error_of_var(found, n):
    return SIGMAS * found.var * np.sqrt((found.kurtosis + 2) / n)


@pytest.mark.parametrize("size", [1, 3, 8, 50])
@pytest.mark.parametrize("positions", [1, 4])
def test_moments_of_draws_given_a_batch(size, positions):
    """E[m] = μ, Var[m] = Var_b/N, E[s²] = σ² - Var_b/N; N may exceed B."""
    x, n = skewed(20, 3, positions), 20_000
    noise = measure([x], size, draws=n, gap=False).noise["gni"]
    expected = var_of_means(x) / size
    assert (np.abs(noise.shift.mean) <= error_of_mean(noise.shift, n)).all()
    assert (np.abs(noise.shift.var - expected) <= error_of_var(noise.shift, n)).all()
    slack = 1e-12 if size * positions == 1 else error_of_mean(noise.scale, n)
    assert (np.abs(noise.scale.mean - (1 - expected)) <= slack).all()


@pytest.mark.parametrize("size", [2, 4, 10])
@pytest.mark.parametrize("positions", [1, 4])
def test_moments_of_partitions(size, positions):
    """Var[m] = Var_b/N·(B-N)/(B-1). Parts of one shuffle are dependent, so the bound uses the number of shuffles."""
    x, shuffles = skewed(20, 3, positions), 5000
    noise = measure([x], size, draws=shuffles * (20 // size), gap=False).noise["gbn"]
    expected = var_of_means(x) / size * (20 - size) / 19
    assert (noise.shift.n == 20 * shuffles).all()
    assert (np.abs(noise.shift.mean) <= 1e-13).all()
    assert (np.abs(noise.shift.var - expected) <= error_of_var(noise.shift, shuffles)).all()


@pytest.mark.parametrize(("batch_size", "size"), [(20, 4), (23, 4), (7, 4), (5, 8), (9, 1)])
def test_partitions_satisfy_the_law_of_total_variance(batch_size, size):
    """The variances within and between the parts sum to σ², for every shuffle and any sizes."""
    noise = measure([skewed(batch_size, 3, 2)], size, draws=37, gap=False).noise["gbn"]
    np.testing.assert_allclose(noise.scale.mean + noise.shift.var + noise.shift.mean**2, 1, rtol=1e-12)


BATCHES = 16
KMAX = 1024  # ghost batches from each batch


def gaussian(size):
    """Large fully connected batches with two channels."""
    return [random(size * KMAX, 2, seed=seed) * 3 + 1 for seed in range(BATCHES)]


@pytest.fixture(scope="module", params=[4, 32])
def normal_layer(request):
    return measure(gaussian(request.param), request.param, draws=KMAX, gap=False)


def critical():
    return stats.kstwo.isf(1e-6, BATCHES * KMAX)


def test_partitions_of_gaussian_batches_follow_the_exact_law(normal_layer):
    """The k parts of a shuffle are independent, except that they share μ and σ² of the batch. This makes m narrower by
    the factor sqrt(1 - 1/k) and s² wider by B/(B-1). Scaling by 1 + δ moves a CDF by δ·max|x·density|."""
    shift, scale = (normal_layer.distances(part, "gbn") for part in ("shift", "scale"))
    assert (normal_layer.noise["gbn"].shift.n == BATCHES * KMAX * normal_layer.ghost_size).all()
    moved = 0.25 / KMAX
    assert (shift["fc"] <= critical() + moved).all()
    wide = (normal_layer.ghost_size / 2) ** 0.5  # max|x·density| of χ²(k)/k is sqrt(k/2)/sqrt(2π)
    assert (scale["fc-exact"] <= critical() + moved * wide).all()
    assert (scale["fc"] > critical() + moved * wide).all(), "the paper's χ²(N)/N is a different law"


def test_draws_from_gaussian_batches_follow_the_exact_law(normal_layer):
    """Draws are independent given the batch, whose skewness and kurtosis have standard errors sqrt(6/B) and sqrt(24/B).

    By the Edgeworth series, they move the CDF of m by skewness/(6·sqrt(N))·0.4 + kurtosis/(24·N)·0.55, and that of s²,
    through its standard deviation, by kurtosis/4·0.25.
    """
    size, values = normal_layer.ghost_size, BATCHES * KMAX * normal_layer.ghost_size
    skewness, kurtosis = SIGMAS * (6 / values) ** 0.5, SIGMAS * (24 / values) ** 0.5
    shift, scale = (normal_layer.distances(part) for part in ("shift", "scale"))
    assert (shift["fc"] <= critical() + 0.4 * skewness / (6 * size**0.5) + 0.55 * kurtosis / (24 * size)).all()
    assert (scale["fc-exact"] <= critical() + kurtosis / 16).all()
    assert (scale["fc"] > critical() + kurtosis / 16).all(), "the paper's χ²(N)/N is a different law"
    assert normal_layer.layer_distances["scale", "fc-exact"] <= critical() + kurtosis / 16


def test_the_effective_size_of_gaussian_layers_is_the_ghost_size(normal_layer):
    size, n = normal_layer.ghost_size, BATCHES * KMAX
    noise = normal_layer.noise["gni"]
    shift = error_of_var(noise.shift, n) / noise.shift.var
    batch = SIGMAS * (24 / (n * size)) ** 0.5 / 2  # an excess kurtosis κ of the batch adds κ/2 to the variance of s²
    scale = (error_of_var(noise.scale, n) / noise.scale.var + batch) * (size - 1) / (size - 2)
    assert (np.abs(normal_layer.effective_size("shift") / size - 1) <= 1.1 * shift).all()
    assert (np.abs(normal_layer.effective_size("scale") / size - 1) <= 1.2 * scale).all()  # the inverse is not linear
    assert normal_layer.layer_effective_size("shift") == pytest.approx(size, rel=1.1 * shift.max())
    assert normal_layer.layer_effective_size("scale") == pytest.approx(size, rel=1.2 * scale.max())


@pytest.mark.parametrize("positions", [2, 9])
def test_known_variances_within_and_between_samples(positions):
    """As fractions. The relative variance of the estimates, and of the channel's variance, is that of χ², 2/B."""
    batch_size, batches = 2000, 4
    between = torch.tensor([0.0, 0.05, 0.3, 0.8, 1.0], dtype=torch.float64)
    made = []
    for seed in range(batches):
        inside = random(batch_size, 5, positions, seed=seed) * (1 - between).sqrt()[:, None]
        made.append(7 + 3 * (inside + random(batch_size, 5, 1, seed=99 + seed) * between.sqrt()[:, None]))
    found = measure(made, 16, draws=64, gap=False)
    error = SIGMAS * (2 / (batch_size * batches)) ** 0.5
    assert (np.abs(found.within - (1 - between).numpy()) <= 2 * error * (1 - between).numpy() + 1e-12).all()
    around = (between + (1 - between) / positions).numpy()
    assert (np.abs(found.between - between.numpy()) <= 2 * error * around + 1e-12).all()
    expected = np.mean([variance_fractions(x[:, :]) for x in made], axis=0)
    np.testing.assert_allclose(found.within, expected[0], rtol=1e-9, atol=1e-12)


def test_a_convolutional_layer_follows_its_exact_law():
    """And none of the other three laws, each of which neglects a term."""
    size, positions, within = 8, 4, 0.6
    made = []
    for seed in range(BATCHES):
        x = random(size * KMAX, 2, 1, seed=seed) * (1 - within) ** 0.5
        made.append(x + random(size * KMAX, 2, positions, seed=99 + seed) * within**0.5)
    found = measure(made, size, draws=KMAX, gap=False)
    mixture = 1 / 400  # error of the numerical integral of the law
    slack = (
        critical() + mixture + 0.25 / KMAX + SIGMAS * (2 / (size * KMAX * BATCHES)) ** 0.5
    )  # the fractions are estimates
    shift, scale = (found.distances(part, "gbn") for part in ("shift", "scale"))
    assert (shift["conv"] <= slack).all()
    assert (scale["conv-exact"] <= slack).all()
    assert all((other > slack).all() for other in (shift["fc"], scale["fc"], scale["fc-exact"], scale["conv"]))

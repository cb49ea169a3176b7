"""What ghost noise must be by theory, with bounds from the number of draws: a right meter fails one with 1e-6 or so."""

import numpy as np
import pytest
import torch
from scipy import stats

from metering import measure, shares_of

SIGMAS = 5


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def skewed(batch_size, channels, positions, seed=0):
    """Samples that differ by much, with values that are not normal."""
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
def test_moments_of_the_parts_of_a_shuffled_batch(size, positions):
    """Var[m] = Var_b/N·(B-N)/(B-1). Parts of one shuffle depend on each other: the bound counts shuffles."""
    x, shuffles = skewed(20, 3, positions), 5000
    noise = measure([x], size, draws=shuffles * (20 // size), gap=False).noise["gbn"]
    expected = var_of_means(x) / size * (20 - size) / 19
    assert (noise.shift.n == 20 * shuffles).all()
    assert (np.abs(noise.shift.mean) <= 1e-13).all()
    assert (np.abs(noise.shift.var - expected) <= error_of_var(noise.shift, shuffles)).all()


@pytest.mark.parametrize(("batch_size", "size"), [(20, 4), (23, 4), (7, 4), (5, 8), (9, 1)])
def test_parts_share_out_the_variance_of_their_batch(batch_size, size):
    """Within parts and between them it is σ², in each shuffle, for any parts."""
    noise = measure([skewed(batch_size, 3, 2)], size, draws=37, gap=False).noise["gbn"]
    np.testing.assert_allclose(noise.scale.mean + noise.shift.var + noise.shift.mean**2, 1, rtol=1e-12)


BATCHES = 16
KMAX = 1024  # ghost batches from each batch


def gaussian(size):
    """Large fully connected batches, of two channels."""
    return [random(size * KMAX, 2, seed=seed) * 3 + 1 for seed in range(BATCHES)]


@pytest.fixture(scope="module", params=[4, 32])
def normal_layer(request):
    return measure(gaussian(request.param), request.param, draws=KMAX, gap=False)


def critical():
    return stats.kstwo.isf(1e-6, BATCHES * KMAX)


def test_parts_of_gaussian_batches_follow_the_exact_law(normal_layer):
    """One shuffle's parts are independent, but for μ and σ² of the batch, which make m narrower by the factor
    sqrt(1 - 1/k), and s² wider by B/(B-1): a change of scale by 1 + δ moves a distribution by δ·max|x·density|."""
    shift, scale = (normal_layer.distances(part, "gbn") for part in ("shift", "scale"))
    assert (normal_layer.noise["gbn"].shift.n == BATCHES * KMAX * normal_layer.ghost_size).all()
    moved = 0.25 / KMAX
    assert (shift["fc"] <= critical() + moved).all()
    wide = (normal_layer.ghost_size / 2) ** 0.5  # of max|x·density| of χ²(k)/k, sqrt(k/2)/sqrt(2π)
    assert (scale["fc-exact"] <= critical() + moved * wide).all()
    assert (scale["fc"] > critical() + moved * wide).all(), "the paper's χ²(N)/N is another law"


def test_draws_from_gaussian_batches_follow_the_exact_law(normal_layer):
    """Draws share their batch, of which skewness and kurtosis are not quite 0, sqrt(6/B) and sqrt(24/B) by one σ.

    By Edgeworth's series they move m by skewness/(6·sqrt(N))·0.4 + kurtosis/(24·N)·0.55, and s² through its standard
    deviation by kurtosis/4·0.25. Given the batch, draws are independent.
    """
    size, values = normal_layer.ghost_size, BATCHES * KMAX * normal_layer.ghost_size
    skewness, kurtosis = SIGMAS * (6 / values) ** 0.5, SIGMAS * (24 / values) ** 0.5
    shift, scale = (normal_layer.distances(part) for part in ("shift", "scale"))
    assert (shift["fc"] <= critical() + 0.4 * skewness / (6 * size**0.5) + 0.55 * kurtosis / (24 * size)).all()
    assert (scale["fc-exact"] <= critical() + kurtosis / 16).all()
    assert (scale["fc"] > critical() + kurtosis / 16).all(), "the paper's χ²(N)/N is another law"
    assert normal_layer.layer_distances["scale", "fc-exact"] <= critical() + kurtosis / 16


def test_effective_sizes_of_gaussian_layers_are_the_ghost_size(normal_layer):
    size, n = normal_layer.ghost_size, BATCHES * KMAX
    noise = normal_layer.noise["gni"]
    shift = error_of_var(noise.shift, n) / noise.shift.var
    batch = SIGMAS * (24 / (n * size)) ** 0.5 / 2  # an excess kurtosis κ of the batch adds κ/2 to the variance of s²
    scale = (error_of_var(noise.scale, n) / noise.scale.var + batch) * (size - 1) / (size - 2)
    assert (np.abs(normal_layer.effective_size("shift") / size - 1) <= 1.1 * shift).all()
    assert (np.abs(normal_layer.effective_size("scale") / size - 1) <= 1.2 * scale).all()  # the inverse is not linear
    assert normal_layer.typical_size("shift") == pytest.approx(size, rel=1.1 * shift.max())
    assert normal_layer.typical_size("scale") == pytest.approx(size, rel=1.2 * scale.max())


@pytest.mark.parametrize("positions", [2, 9])
def test_known_variances_within_and_between_samples(positions):
    """Of 1, in shares; their estimates have the relative errors of χ² with 2/B, the channel's variance too."""
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
    expected = np.mean([shares_of(x[:, :]) for x in made], axis=0)
    np.testing.assert_allclose(found.within, expected[0], rtol=1e-9, atol=1e-12)


def test_a_convolutional_layer_follows_its_exact_law():
    """And none of the other three: each leaves something out."""
    size, positions, within = 8, 4, 0.6
    made = []
    for seed in range(BATCHES):
        x = random(size * KMAX, 2, 1, seed=seed) * (1 - within) ** 0.5
        made.append(x + random(size * KMAX, 2, positions, seed=99 + seed) * within**0.5)
    found = measure(made, size, draws=KMAX, gap=False)
    mixture = 1 / 400  # of the law's integral
    slack = critical() + mixture + 0.25 / KMAX + SIGMAS * (2 / (size * KMAX * BATCHES)) ** 0.5  # shares are measured
    shift, scale = (found.distances(part, "gbn") for part in ("shift", "scale"))
    assert (shift["conv"] <= slack).all()
    assert (scale["conv-exact"] <= slack).all()
    assert all((other > slack).all() for other in (shift["fc"], scale["fc"], scale["fc-exact"], scale["conv"]))

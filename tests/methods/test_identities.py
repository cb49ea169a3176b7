"""The identities between the methods, and the laws of ghost noise, that the paper states."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ghostnoise import functional
from support import reference
from support.inputs import cases


def seeded(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(function, x, dy, **options):
    """Return the output, the gradient and the running statistics of a step in training mode."""
    leaf, buffers = x.clone().requires_grad_(), (torch.zeros(3).double(), torch.ones(3).double())
    y = function(leaf, *buffers, training=True, **options)
    return y, torch.autograd.grad(y, leaf, dy)[0], *buffers


# Identity 1.


def test_a_whole_batch_as_ghost_batch_is_batch_norm():
    """In output and gradients, and with running_var_from="batch" in the running statistics too."""
    x, dy = seeded(6, 3, 4, 4), seeded(6, 3, 4, 4, seed=1)
    plain = step(functional.batch_norm, x, dy)
    for size in (6, None):
        whole = step(functional.ghost_batch_norm, x, dy, ghost_size=size, running_var_from="batch")
        torch.testing.assert_close(whole, plain, rtol=1e-12, atol=1e-12)
        default = step(functional.ghost_batch_norm, x, dy, ghost_size=size)
        torch.testing.assert_close(default[3] - 0.9, (plain[3] - 0.9) * (6 * 16 - 1) / (6 * 16))


def test_ghost_batch_norm_ignores_batch_norm_before_it():
    """As eps goes to 0."""
    x, options = seeded(10, 3, 4), {"training": True, "eps": 0.0}
    hat = functional.batch_norm(x, None, None, **options)
    once, twice = (functional.ghost_batch_norm(each, None, None, ghost_size=4, **options) for each in (x, hat))
    torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)


@given(cases(least_values=1))
def test_ghost_noise_of_the_whole_batch_is_the_identity(case):
    """Each sample draws the whole batch once, or a partition has one ghost batch."""
    x = case.tensor()
    everyone = torch.arange(case.batch_size).expand(case.batch_size, -1)
    y = functional.ghost_noise(x, case.batch_size, channel_dim=case.channel_dim, indices=everyone)
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
    y = functional.ghost_noise(x, case.batch_size + case.seed % 3, channel_dim=case.channel_dim, draw="partition")
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_noise_of_a_partition_that_is_not_shuffled_is_ghost_batch_norm():
    """As eps goes to 0."""
    x, options = seeded(11, 3, 4), {"training": True, "eps": 0.0, "ghost_size": 4}
    shuffle = {"draw": "partition", "indices": torch.arange(11), "noise_eps": 0.0}
    y = functional.ghost_noise_batch_norm(x, None, None, **shuffle, **options)
    torch.testing.assert_close(y, functional.ghost_batch_norm(x, None, None, **options), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("normalizer", ["batch", "exclusive"])
def test_noise_inside_batch_norm_is_normalization_then_noise_then_affine(normalizer):
    x, dy = seeded(12, 3, 4, 4).requires_grad_(), seeded(12, 3, 4, 4, seed=1)
    weight, bias = seeded(3, seed=2).requires_grad_(), seeded(3, seed=3).requires_grad_()
    options = {"indices": torch.randint(12, (12, 5), generator=torch.Generator().manual_seed(4))}
    joined = functional.ghost_noise_batch_norm(
        x, None, None, weight, bias, True, ghost_size=5, normalizer=normalizer, **options
    )
    norm = functional.exclusive_batch_norm if normalizer == "exclusive" else torch.nn.functional.batch_norm
    noisy = functional.ghost_noise(norm(x, None, None, training=True), 5, **options)
    chained = noisy * weight[:, None, None] + bias[:, None, None]
    torch.testing.assert_close(joined, chained, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(y, (x, weight, bias), dy) for y in (joined, chained))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


# Identity 2: μ_g = μ + σ·μ̂_g and σ_g = σ·σ̂_g, with the hatted statistics taken from the normalized batch.


@given(cases())
def test_decompose(case):
    x = reference.fold(case.tensor(), case.channel_dim)
    parts = functional.decompose(case.tensor(), case.ghost_size, channel_dim=case.channel_dim)
    hat, (mean, var) = reference.batch_norm(x, eps=0), reference.statistics(x)
    torch.testing.assert_close((parts.mean, parts.std), (mean, var.sqrt()))
    start = 0
    for g, size in enumerate(parts.sizes):
        members = reference.ghost_batch_of(start, case.batch_size, case.ghost_size)
        assert members == list(range(start, start + size))
        (ghost_mean, ghost_var), (hat_mean, hat_var) = (reference.statistics(each[members]) for each in (x, hat))
        torch.testing.assert_close((parts.ghost_mean[g], parts.ghost_std[g]), (hat_mean, hat_var.sqrt()))
        torch.testing.assert_close(parts.mean + parts.std * parts.ghost_mean[g], ghost_mean)
        torch.testing.assert_close(parts.std * parts.ghost_std[g], ghost_var.sqrt())
        torch.testing.assert_close((parts.shift[g], parts.scale[g]), (ghost_mean - mean, (ghost_var / var).sqrt()))
        start += size
    assert start == case.batch_size


def test_decompose_of_a_constant_channel_and_of_a_half_type():
    x = torch.randn(8, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    constant = x.detach().clone()
    constant[:, 1] = 5.0
    parts = functional.decompose(constant, 4)
    assert (parts.ghost_mean[:, 1].tolist(), parts.ghost_std[:, 1].tolist(), parts.std[1]) == ([0, 0], [1, 1], 0)
    assert functional.decompose(x, 4).mean.dtype == functional.decompose(torch.randn(8, 2), 4).mean.dtype
    assert parts.mean.dtype == torch.float32
    assert not functional.decompose(x, 4).shift.requires_grad
    with pytest.raises(ValueError, match="ghost_size=0: must be an integer from 1 to 65536"):
        functional.decompose(x, 0)
    with pytest.raises(ValueError, match="got an empty input"):
        functional.decompose(x[:0], 4)


# Identity 3: bounds of the output before the affine.


@given(cases())
def test_ghost_batch_norm_is_bounded(case):
    """By sqrt(n·S - 1), with the samples that are really in the ghost batch."""
    x = case.tensor()
    x[0].mul_(1e6)
    y = functional.ghost_batch_norm(
        x, None, None, training=True, ghost_size=case.ghost_size, channel_dim=case.channel_dim
    )
    for k in range(case.batch_size):
        members = reference.ghost_batch_of(k, case.batch_size, case.ghost_size)
        assert y[k].abs().max() <= (len(members) * case.spatial - 1) ** 0.5 * (1 + 1e-12)


def test_exclusive_batch_norm_is_not():
    """The paper's example, all others equal: only eps bounds it, or one of the remedies."""
    x = torch.zeros(8, 1, dtype=torch.float64)
    x[3] = 1.0
    for options, expected in (({}, 1e5), ({"min_std": 0.1}, 10), ({"clamp_output": 5.0}, 5)):
        y = functional.exclusive_batch_norm(x, None, None, training=True, eps=1e-10, **options)
        assert y[3].item() == pytest.approx(expected)


@given(st.integers(2, 9), st.integers(1, 6), st.floats(0.01, 0.99), st.integers(0, 10**6))
def test_a_self_weight_bounds_exclusive_batch_norm(batch_size, spatial, self_weight, seed):
    """By sqrt(S/a - 1): each of the sample's S values has the weight a/S in its own statistics."""
    bound, x = (spatial / self_weight - 1) ** 0.5, seeded(batch_size, 2, spatial, seed=seed)
    options = {"training": True, "self_weight": self_weight}
    for scaled in (x, x.pow(9), x.exp().exp()):
        y = functional.exclusive_batch_norm(scaled, None, None, **options)
        assert y.abs().max().item() <= bound * (1 + 1e-9)
    x = torch.zeros(batch_size, 1, spatial, dtype=torch.float64)
    x[1, 0, 0] = -1.0  # all other values are equal: the bound is attained
    y = functional.exclusive_batch_norm(x, None, None, eps=1e-14, **options)
    assert y[1, 0, 0].item() == pytest.approx(-bound, rel=1e-9)


# Identities 4 and 5: the laws of the drawn moments.


def test_moments_of_the_draws_given_a_batch():
    """E[m] = μ, Var[m] = Var_b(mean_b)/N, E[s²] = σ² - Var_b(mean_b)/N."""
    torch.manual_seed(0)
    repeats, size, batch_size = 500, 6, 16
    x = torch.randn(batch_size, 3, 5, dtype=torch.float64) + torch.randn(batch_size, 3, 1, dtype=torch.float64)
    _, var = reference.statistics(x)
    expected = x.mean(2).var(0, correction=0) / size
    shifts, squares = [], []
    for _ in range(repeats):
        indices = torch.randint(batch_size, (batch_size, size))
        shifts.append((x - functional.ghost_noise(x, size, components="shift", indices=indices))[:, :, 0])
        scaled = functional.ghost_noise(x, size, noise_eps=0, components="scale", indices=indices)
        squares.append(var * (x / scaled)[:, :, 0] ** 2)
    shift, square = torch.cat(shifts), torch.cat(squares)  # (n, C) independent draws
    deviations = 5 / (repeats * batch_size) ** 0.5  # five standard errors, in standard deviations of a draw
    assert (shift.mean(0).abs() <= deviations * shift.std(0)).all()
    assert ((shift.square().mean(0) - expected).abs() <= deviations * shift.square().std(0)).all()
    assert ((square.mean(0) - (var - expected)).abs() <= deviations * square.std(0)).all()


def test_the_law_in_fully_connected_layers():
    """shift ~ N(0, 1/N), and scale² ~ χ²(N-1)/N; with 80,000 draws KS rejects χ²(N)/N."""
    torch.manual_seed(0)
    size, batch_size = 32, 80_000
    x = torch.randn(batch_size, 1, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    shift = (x - functional.ghost_noise(x, size, components="shift")).flatten()
    square = (x / functional.ghost_noise(x, size, noise_eps=0, components="scale")).flatten() ** 2
    # The probability that a right implementation fails here is 1e-4 a line; the seed is fixed.
    assert stats.kstest(shift, stats.norm(scale=size**-0.5).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size - 1).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size).cdf).pvalue < 1e-9


# Identity 7: a sample's own share in its own statistics.


def self_share(function, **options):
    """Return the share of sample 0 in its own mean: the derivative of its center with respect to its value."""
    x = seeded(12, 1)

    def center(value: float) -> float:
        moved = x.clone()
        moved[0] = value
        y = function(moved, None, None, training=True, eps=1e16, **options)  # eps dominates: y = (x - center) / 1e8
        return float(value - y[0].item() * 1e8)

    return center(x[0].item() + 1) - center(x[0].item())


def test_a_samples_share_in_its_own_statistics():
    """BN 1/B, GBN 1/n, XBN 0, or its self-weight, and under GNI its share in the draws, 1/B in expectation."""
    assert self_share(functional.batch_norm) == pytest.approx(1 / 12, abs=1e-6)
    assert self_share(functional.ghost_batch_norm, ghost_size=4) == pytest.approx(1 / 4, abs=1e-6)
    for share in (0.0, 0.3):
        found = self_share(functional.exclusive_batch_norm, ghost_size=4, self_weight=share)
        assert found == pytest.approx(share, abs=1e-6)
    x = torch.zeros(2000, 1, dtype=torch.float64)
    x[0] = 1.0  # far from the others: only those who drew it are shifted, by its share in their draws
    indices = torch.randint(2000, (2000, 4), generator=torch.Generator().manual_seed(0))
    shift = (x - functional.ghost_noise(x, 4, components="shift", indices=indices)).flatten()
    torch.testing.assert_close(shift, (indices == 0).double().mean(1) - 1 / 2000)


@given(cases(least_batch=2, least_ghost=2))
def test_exclusive_batch_norm_with_the_share_of_a_ghost_batch_is_ghost_batch_norm(case):
    x, dy = case.tensor().requires_grad_(), case.tensor(5)
    n = case.batch_size if case.batch_size < 2 * case.ghost_size else case.ghost_size
    kept = case.batch_size - case.batch_size % n  # ghost batches of the same size
    x, dy, options = x[:kept], dy[:kept], {"training": True, "ghost_size": n, "channel_dim": case.channel_dim}
    ours = functional.exclusive_batch_norm(x, None, None, self_weight=1 / n, **options)
    theirs = functional.ghost_batch_norm(x, None, None, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)

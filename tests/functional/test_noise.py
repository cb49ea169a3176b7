import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import reference
from comparison import assert_equals_naive
from ghostnoise import functional
from ghostnoise.laws import Law
from inputs import cases

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:ghost_size=1 on samples")


@given(cases(least_values=1, dtypes=ALL_DTYPES), st.booleans(), st.booleans())
def test_ghost_noise_equals_naive_loop(case, shift, scale):
    indices = case.indices()

    def function(x, weight, bias):
        return functional.ghost_noise(
            x, case.ghost_size, shift=shift, scale=scale, channel_dim=case.channel_dim, indices=indices
        )

    def naive(x, weight, bias):
        return reference.ghost_noise(x, indices, shift=shift, scale=scale)

    assert_equals_naive(function, naive, case, affine=False)


@given(
    cases(least_values=1), st.sampled_from(["fc", "conv"]), st.sampled_from(["paper", "exact"]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_analytical_ghost_noise_equals_naive_loop(case, kind, dof, shift, scale):
    law = Law(case.ghost_size, case.spatial, kind, dof)
    draws = law.draw((case.batch_size, case.channels), torch.device("cpu"), None)
    options = {"kind": kind, "dof": dof, "shift": shift, "scale": scale}

    def function(x, weight, bias):
        return functional.analytical_ghost_noise(
            x, case.ghost_size, channel_dim=case.channel_dim, draws=draws, **options
        )

    def naive(x, weight, bias):
        return reference.analytical_noise(x, draws, case.ghost_size, **options)

    assert_equals_naive(function, naive, case, affine=False)


@given(cases(least_values=1))
def test_ghost_noise_of_everyone_is_the_identity(case):
    """Identity 1: each sample draws the whole batch, once each."""
    x = case.tensor()
    everyone = torch.arange(case.batch_size).expand(case.batch_size, -1)
    y = functional.ghost_noise(x, case.batch_size, channel_dim=case.channel_dim, indices=everyone)
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_a_single_sample_gets_no_noise():
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(functional.ghost_noise(x, 16), x, rtol=1e-6, atol=1e-6)


def test_gradient_is_that_of_the_transformation_alone():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(5, (5, 4))
    (gradient,) = torch.autograd.grad(functional.ghost_noise(x, 4, indices=indices).sum(), x)
    still = x.detach()
    step = torch.zeros_like(still).fill_(1.0)
    apart = functional.ghost_noise(still + step, 4, indices=indices) - functional.ghost_noise(still, 4, indices=indices)
    torch.testing.assert_close(gradient, apart)  # moving all of x together leaves the noise as it is


@pytest.mark.parametrize("function", [functional.ghost_noise, functional.analytical_ghost_noise])
def test_second_derivatives(function):
    """The noise is a constant of x, so gradcheck in x would differ; in the upstream gradient the op is linear."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    y = function(x, 4, generator=torch.Generator().manual_seed(1))
    dy = torch.randn_like(y).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, dy, create_graph=True)
    (back,) = torch.autograd.grad(gradient, dy, torch.ones_like(gradient), retain_graph=True)
    torch.testing.assert_close(back * dy, gradient)
    assert torch.autograd.grad(gradient.sum(), x, allow_unused=True)[0] is None


def test_law_of_the_drawn_moments():
    """Identity 4: given a batch, E[m] = μ, Var[m] = Var_b(mean_b)/N, E[s²] = σ² - Var_b(mean_b)/N."""
    torch.manual_seed(0)
    repeats, size, batch_size = 500, 6, 16
    x = torch.randn(batch_size, 3, 5, dtype=torch.float64) + torch.randn(batch_size, 3, 1, dtype=torch.float64)
    _, var = reference.statistics(x)
    expected = x.mean(2).var(0, correction=0) / size
    shifts, squares = [], []
    for _ in range(repeats):
        indices = torch.randint(batch_size, (batch_size, size))
        shifts.append((x - functional.ghost_noise(x, size, scale=False, indices=indices))[:, :, 0])
        scaled = functional.ghost_noise(x, size, eps=0, shift=False, indices=indices)
        squares.append(var * (x / scaled)[:, :, 0] ** 2)
    shift, square = torch.cat(shifts), torch.cat(squares)  # (n, C) independent draws
    deviations = 5 / (repeats * batch_size) ** 0.5  # five standard errors, in standard deviations of a draw
    assert (shift.mean(0).abs() <= deviations * shift.std(0)).all()
    assert ((shift.square().mean(0) - expected).abs() <= deviations * shift.square().std(0)).all()
    assert ((square.mean(0) - (var - expected)).abs() <= deviations * square.std(0)).all()


def test_law_in_fully_connected_layers():
    """Identity 5: shift ~ N(0, 1/N), and scale² ~ χ²(N-1)/N; with 80,000 draws KS rejects χ²(N)/N."""
    torch.manual_seed(0)
    size, batch_size = 32, 80_000
    x = torch.randn(batch_size, 1, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    indices = torch.randint(batch_size, (batch_size, size))
    shift = (x - functional.ghost_noise(x, size, scale=False, indices=indices)).flatten()
    square = (x / functional.ghost_noise(x, size, eps=0, shift=False, indices=indices)).flatten() ** 2
    # The probability that a right implementation fails here is 1e-4 a line; the seed is fixed.
    assert stats.kstest(shift, stats.norm(scale=size**-0.5).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size - 1).cdf).pvalue > 1e-4
    assert stats.kstest(square * size, stats.chi2(size).cdf).pvalue < 1e-9


def test_share_of_oneself_in_expectation():
    """Identity 7: under GNI each of the N draws is oneself with probability 1/B."""
    torch.manual_seed(0)
    batch_size, size, repeats = 8, 4, 2000
    hits = sum(
        (torch.randint(batch_size, (batch_size, size)) == torch.arange(batch_size)[:, None]).double().mean().item()
        for _ in range(repeats)
    )
    n = repeats * batch_size * size
    assert abs(hits / repeats - 1 / batch_size) <= 5 * (1 / batch_size / n) ** 0.5
    # One sample is far from the others: only those who drew it are shifted, by its share in their draws.
    x = torch.zeros(batch_size, 1, dtype=torch.float64)
    x[0] = 1.0
    indices = torch.randint(batch_size, (batch_size, size))
    shift = (x - functional.ghost_noise(x, size, scale=False, indices=indices)).flatten()
    torch.testing.assert_close(shift, (indices == 0).double().mean(1) - 1 / batch_size)


def test_precision_with_an_outlier_that_was_not_drawn():
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8)
    x[0] += 1e8
    indices = torch.randint(1, 16, (16, 5))
    y = functional.ghost_noise(x, 5, indices=indices)
    expected = reference.unfold(reference.ghost_noise(reference.fold(x), indices), x)
    assert (y[1:] - expected[1:]).abs().max() <= 1e-5 * expected[1:].abs().max()


@pytest.mark.parametrize("function", [functional.ghost_noise, functional.analytical_ghost_noise])
def test_reproducible_by_seed_and_by_generator(function):
    x = torch.randn(8, 3, 4)
    torch.manual_seed(3)
    first, second = function(x, 4), function(x, 4)
    torch.manual_seed(3)
    assert torch.equal(function(x, 4), first)
    assert not torch.equal(first, second)
    with_generator = [function(x, 4, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*with_generator)
    state = torch.get_rng_state()
    function(x, 4, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)


def test_both_parts_off_is_the_identity():
    x = torch.randn(8, 3, 4)
    assert torch.equal(functional.ghost_noise(x, 4, shift=False, scale=False), x)
    assert torch.equal(functional.analytical_ghost_noise(x, 4, shift=False, scale=False), x)


def test_ghost_batches_of_a_single_value_warn_once():
    x = torch.randn(6, 19)
    with pytest.warns(UserWarning, match=r"ghost_size=1 on samples of shape \(19,\).*raise ghost_size"):
        functional.ghost_noise(x, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.ghost_noise(x, 1)
        functional.ghost_noise(torch.randn(6, 19, 2), 1)
        functional.ghost_noise(torch.randn(6, 23), 1, scale=False)
        functional.analytical_ghost_noise(torch.randn(6, 23), 1)
        functional.ghost_noise(torch.randn(1, 23), 1)  # one sample: no noise at all
    with pytest.warns(UserWarning, match="no variance"):
        functional.analytical_ghost_noise(torch.randn(6, 23), 1, dof="exact")


def test_indices_that_do_not_fit():
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"indices of shape \(6, 3\): must be \(B, N\) = \(6, 4\)"):
        functional.ghost_noise(x, 4, indices=torch.zeros(6, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"indices from 0 to 6: must lie in \[0, B\) = \[0, 6\)"):
        functional.ghost_noise(x, 4, indices=torch.tensor([[0, 1, 2, 6]]).expand(6, 4))
    with pytest.raises(ValueError, match=r"dtype torch.float32: must be int64 or int32"):
        functional.ghost_noise(x, 4, indices=torch.zeros(6, 4))
    int32 = torch.randint(6, (6, 4), dtype=torch.int32)
    expected = functional.ghost_noise(x, 4, indices=int32.long())
    assert torch.equal(functional.ghost_noise(x, 4, indices=int32), expected)


def test_indices_may_be_used_again_before_backward():
    x = torch.randn(6, 3, requires_grad=True)
    indices = torch.randint(6, (6, 4))
    y = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)
    (wanted,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
    indices.zero_()
    (gradient,) = torch.autograd.grad(y.cos().sum(), x)
    assert torch.equal(gradient, wanted)


def test_options_outside_their_range():
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"eps=-1: must be a number in \[0, inf\)"):
        functional.ghost_noise(x, 4, eps=-1)
    with pytest.raises(ValueError, match="kind='dense': must be one of 'fc', 'conv'"):
        functional.analytical_ghost_noise(x, 4, kind="dense")
    with pytest.raises(ValueError, match="dof='n': must be one of 'paper', 'exact'"):
        functional.analytical_ghost_noise(x, 4, dof="n")
    with pytest.raises(ValueError, match=r"draws.normal of shape \(2, 3\): must be \(B, C\) = \(6, 3\)"):
        functional.analytical_ghost_noise(x, 4, draws=[torch.zeros(2, 3)] * 3)
    with pytest.raises(ValueError, match="got an empty input"):
        functional.ghost_noise(torch.randn(0, 3), 4)


@pytest.mark.parametrize(
    ("function", "drawn"), [(functional.ghost_noise, "indices"), (functional.analytical_ghost_noise, "draws")]
)
def test_without_ghosts_the_input_is_returned(function, drawn):
    x = torch.randn(6, 3)
    before = torch.get_rng_state()
    assert function(x, None) is x
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=f"{drawn} with ghost_size=None: .*give a ghost_size"):
        function(x, None, **{drawn: torch.zeros(6, 4, dtype=torch.int64)})

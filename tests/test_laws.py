import pytest
import torch
from scipy import stats

import reference
from ghostnoise.laws import Law, variance_components
from ghostnoise.moments import Moments

DRAWS = (20_000, 1)


def draw(law):
    return law.draw(DRAWS, torch.device("cpu"), torch.Generator().manual_seed(0))


def kolmogorov(values, law):
    return stats.kstest(values.flatten().numpy(), law.cdf).pvalue


@pytest.mark.parametrize(("dof", "degrees"), [("paper", 8), ("exact", 7)])
def test_fully_connected_law(dof, degrees):
    law = Law(8, 1, "fc", dof)
    one = torch.ones(1, 1, dtype=torch.float64)
    ghost = law.ghost_moments(draw(law), 0 * one, one)
    # A right implementation fails each line with probability 1e-4; the seed is fixed.
    assert kolmogorov(ghost.mean, stats.norm(scale=8**-0.5)) > 1e-4
    assert kolmogorov(ghost.var * 8, stats.chi2(degrees)) > 1e-4


@pytest.mark.parametrize("within", [0.0, 0.3, 1.0])
def test_convolutional_law_of_the_paper(within):
    law = Law(8, 5, "conv", "paper")
    inside = torch.full((1, 1), within, dtype=torch.float64)
    ghost = law.ghost_moments(draw(law), inside, 1 - inside)
    deviations = 5 / DRAWS[0] ** 0.5
    assert kolmogorov(ghost.mean, stats.norm(scale=(within / 40 + (1 - within) / 8) ** 0.5)) > 1e-4
    assert abs(ghost.var.mean() - 1) <= deviations * ghost.var.std()
    variance = 2 * within**2 / 40 + 2 * (1 - within) ** 2 / 8  # Var(χ²(k)/k) = 2/k
    squares = (ghost.var - 1) ** 2
    assert abs(squares.mean() - variance) <= deviations * squares.std()


@pytest.mark.parametrize(("between", "within"), [(0.5, 0.5), (0.1, 0.9), (1.0, 0.0)])
def test_exact_convolutional_law_is_that_of_gaussian_ghost_batches(between, within):
    """Ghost batches of the paper's own model, made and measured: the exact law is theirs, the paper's is not."""
    torch.manual_seed(0)
    n, size, spatial = 20_000, 4, 3
    x = torch.randn(n, size, 1, dtype=torch.float64) * between**0.5
    x = x + torch.randn(n, size, spatial, dtype=torch.float64) * within**0.5
    measured = Moments(x.mean((1, 2)), x.var((1, 2), correction=0))
    one = torch.ones(1, 1, dtype=torch.float64)
    pvalues = {}
    for dof in ("paper", "exact"):
        law = Law(size, spatial, "conv", dof)
        ghost = law.ghost_moments(draw(law), within * one, between * one)
        assert stats.ks_2samp(ghost.mean.flatten(), measured.mean).pvalue > 1e-4
        pvalues[dof] = stats.ks_2samp(ghost.var.flatten(), measured.var).pvalue
    assert pvalues["exact"] > 1e-4
    assert pvalues["paper"] < 1e-6


def test_variance_components_of_the_papers_model():
    torch.manual_seed(0)
    batch_size, spatial = 4000, 6
    between, within = torch.tensor([0.0, 0.3, 2.0]), torch.tensor([1.0, 0.7, 0.0])
    x = torch.randn(batch_size, 3, 1) * between.sqrt()[:, None]
    x = (x + torch.randn(batch_size, 3, spatial) * within.sqrt()[:, None]).double()
    inside, around = variance_components(Moments(x.mean(2), x.var(2, correction=0)), spatial)
    naive = reference.variance_components(x)
    torch.testing.assert_close(inside[0], naive[0])
    torch.testing.assert_close(around[0].clamp_min(0), naive[1])
    five_sigma = 5 * (2 / batch_size) ** 0.5
    assert ((inside[0] - within).abs() <= five_sigma * (within + 1e-6)).all()
    assert ((around[0] - between).abs() <= five_sigma * (between + within / spatial)).all()


def test_a_single_position_has_no_inside():
    x = torch.randn(10, 2, 1, dtype=torch.float64)
    within, between = variance_components(Moments(x.mean(2), x.var(2, correction=0)), 1)
    assert within.tolist() == [[0, 0]]
    torch.testing.assert_close(between[0], x.squeeze(2).var(0, correction=0))


def test_no_degrees_of_freedom_is_no_variance():
    draws = Law(1, 1, "conv", "exact").draw((5, 2), torch.device("cpu"), None)
    assert draws.between.abs().sum() == 0
    assert draws.within.abs().sum() == 0

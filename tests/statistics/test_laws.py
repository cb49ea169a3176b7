import pytest
import torch
from ghostnoise.statistics.laws import Law, variance_components
from ghostnoise.statistics.moments import Moments
from scipy import stats

from support import reference

DRAWS = (20_000, 1)


@pytest.fixture(params=["torch", "seed"])
def draw(request):
    """Draws with torch's functions, or from a seed."""

    def drawn(law, spatial=1):
        if request.param == "seed":
            return law.draws_from(torch.tensor([0]), DRAWS, spatial)
        return law.draw(DRAWS, spatial, torch.device("cpu"), torch.Generator().manual_seed(0))

    return drawn


def kolmogorov(values, distribution):
    return stats.kstest(values.flatten().numpy(), distribution.cdf).pvalue


@pytest.mark.parametrize(("dof", "degrees"), [("paper", 8), ("exact", 7)])
def test_fully_connected_law(draw, dof, degrees):
    law = Law(8, "fc", dof)
    one = torch.ones(1, 1, dtype=torch.float64)
    ghost = law.ghost_moments(draw(law), 0 * one, one, 1)
    # A correct implementation fails each line with probability 1e-4; the seed is fixed.
    assert kolmogorov(ghost.mean, stats.norm(scale=8**-0.5)) > 1e-4
    assert kolmogorov(ghost.var * 8, stats.chi2(degrees)) > 1e-4


@pytest.mark.parametrize("within", [0.0, 0.3, 1.0])
def test_convolutional_law_of_the_paper(draw, within):
    law = Law(8, "conv", "paper")
    inside = torch.full((1, 1), within, dtype=torch.float64)
    ghost = law.ghost_moments(draw(law, 5), inside, 1 - inside, 5)
    deviations = 5 / DRAWS[0] ** 0.5
    assert kolmogorov(ghost.mean, stats.norm(scale=(within / 40 + (1 - within) / 8) ** 0.5)) > 1e-4
    assert abs(ghost.var.mean() - 1) <= deviations * ghost.var.std()
    variance = 2 * within**2 / 40 + 2 * (1 - within) ** 2 / 8  # Var(χ²(k)/k) = 2/k
    squares = (ghost.var - 1) ** 2
    assert abs(squares.mean() - variance) <= deviations * squares.std()


@pytest.mark.parametrize(("between", "within"), [(0.5, 0.5), (0.1, 0.9), (1.0, 0.0)])
def test_exact_convolutional_law_is_that_of_gaussian_ghost_batches(draw, between, within):
    """Measured ghost batches of the paper's own model follow the exact law, and not the paper's."""
    torch.manual_seed(0)
    n, size, spatial = 20_000, 4, 3
    x = torch.randn(n, size, 1, dtype=torch.float64) * between**0.5
    x = x + torch.randn(n, size, spatial, dtype=torch.float64) * within**0.5
    measured = Moments(x.mean((1, 2)), x.var((1, 2), correction=0))
    one = torch.ones(1, 1, dtype=torch.float64)
    pvalues = {}
    for dof in ("paper", "exact"):
        law = Law(size, "conv", dof)
        ghost = law.ghost_moments(draw(law, spatial), within * one, between * one, spatial)
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


def test_a_single_position_has_no_variance_within():
    x = torch.randn(10, 2, 1, dtype=torch.float64)
    within, between = variance_components(Moments(x.mean(2), x.var(2, correction=0)), 1)
    assert within.tolist() == [[0, 0]]
    torch.testing.assert_close(between[0], x.squeeze(2).var(0, correction=0))


def test_without_degrees_of_freedom_there_is_no_variance():
    draws = Law(1, "conv", "exact").draw((5, 2), 1, torch.device("cpu"), None)
    assert draws.between.abs().sum() == 0
    assert draws.within.abs().sum() == 0


@pytest.mark.parametrize(
    ("ghost_size", "law", "dof", "spatial", "expected"),
    [(1, "fc", "exact", 5, False), (1, "conv", "exact", 1, False), (1, "conv", "exact", 5, True),
     (2, "fc", "exact", 1, True), (1, "fc", "paper", 1, True)],
)  # fmt: skip
def test_has_variance(ghost_size, law, dof, spatial, expected):
    given = Law(ghost_size, law, dof)
    assert given.has_variance(spatial) == expected
    one = torch.ones(1, 1, dtype=torch.float64)
    within, between = (0 * one, one) if law == "fc" or spatial == 1 else (one, 0 * one)
    draws = given.draw((50, 1), spatial, torch.device("cpu"), None)
    assert (given.ghost_moments(draws, within, between, spatial).var.abs().sum() > 0) == expected


def test_draws_of_a_seed_do_not_depend_on_the_size_of_the_batch():
    law, seed = Law(8, "conv"), torch.tensor([4])
    large, small = (law.draws_from(seed, (batch_size, 40), 3) for batch_size in (900, 7))  # large: in several parts
    for ours, theirs in zip(large, small, strict=True):
        assert torch.equal(ours[:7], theirs)
    assert all(table.shape == (0, 40) for table in law.draws_from(seed, (0, 40), 3))

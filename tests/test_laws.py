"""The laws of ghost noise against their distributions, and χ² numbers against scipy's."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

from ghostnoise import functional
from ghostnoise.chi_square import chi_square_mean
from ghostnoise.laws import Law, law_tables, variance_components
from ghostnoise.tables import Moments
from support import reference

DRAWS = (20_000, 1)
CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "seed"])
def draw(request):
    """Draws with torch's functions, or from a seed."""

    def drawn(law, spatial=1):
        if request.param == "seed":
            return law.draws_from(torch.tensor([0]), DRAWS, spatial)
        return law.draw(DRAWS, spatial, CPU, torch.Generator().manual_seed(0))

    return drawn


def probability(values, distribution):
    return stats.kstest(values.flatten().numpy(), distribution.cdf).pvalue


def scalar(value):
    return torch.full((1, 1), value, dtype=torch.float64)


# A correct implementation fails each comparison of distributions with probability 1e-4; the seeds are fixed.


@pytest.mark.parametrize(("dof", "degrees"), [("paper", 8), ("exact", 7)])
def test_fully_connected_law(draw, dof, degrees):
    law = Law(8, "fc", dof)
    ghost = law.ghost_moments(draw(law), scalar(0.0), scalar(1.0), 1)
    assert probability(ghost.mean, stats.norm(scale=8**-0.5)) > 1e-4
    assert probability(ghost.var * 8, stats.chi2(degrees)) > 1e-4


@pytest.mark.parametrize("within", [0.0, 0.3, 1.0])
def test_convolutional_law_of_the_paper(draw, within):
    law = Law(8, "conv", "paper")
    ghost = law.ghost_moments(draw(law, 5), scalar(within), scalar(1 - within), 5)
    deviations = 5 / DRAWS[0] ** 0.5
    assert probability(ghost.mean, stats.norm(scale=(within / 40 + (1 - within) / 8) ** 0.5)) > 1e-4
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
    found = {}
    for dof in ("paper", "exact"):
        law = Law(size, "conv", dof)
        ghost = law.ghost_moments(draw(law, spatial), scalar(within), scalar(between), spatial)
        assert stats.ks_2samp(ghost.mean.flatten(), measured.mean).pvalue > 1e-4
        found[dof] = stats.ks_2samp(ghost.var.flatten(), measured.var).pvalue
    assert found["exact"] > 1e-4
    assert found["paper"] < 1e-6


@pytest.mark.parametrize("mask", [None, torch.tensor([6.0, 3.0, 0.0, 1.0]).repeat(1000)])
def test_variance_components_of_the_papers_model(mask):
    """Against the loop, also with samples of different sizes, which weigh by their numbers of positions."""
    torch.manual_seed(0)
    batch_size, spatial = 4000, 6
    between, within = torch.tensor([0.0, 0.3, 2.0]), torch.tensor([1.0, 0.7, 0.0])
    x = torch.randn(batch_size, 3, 1) * between.sqrt()[:, None]
    x = (x + torch.randn(batch_size, 3, spatial) * within.sqrt()[:, None]).double()
    lengths = [spatial] * batch_size if mask is None else mask.int().tolist()
    parts = [sample[:, :length] for sample, length in zip(x, lengths, strict=True)]
    tables = [torch.stack([part.mean(1) if part.numel() else torch.zeros(3).double() for part in parts])]
    tables += [torch.stack([((part - m[:, None]) ** 2).sum(1) for part, m in zip(parts, tables[0], strict=True)])]
    count = torch.tensor(lengths, dtype=torch.float64)[:, None]
    m = Moments(tables[0], tables[1] / count.clamp_min(1), spatial if mask is None else count)
    inside, around = variance_components(m)
    naive = reference.variance_components(parts)
    torch.testing.assert_close(inside[0], naive[0])
    torch.testing.assert_close(around[0].clamp_min(0), naive[1])
    if mask is None:
        five_sigma = 5 * (2 / batch_size) ** 0.5
        assert ((inside[0] - within).abs() <= five_sigma * (within + 1e-6)).all()
        assert ((around[0] - between).abs() <= five_sigma * (between + within / spatial)).all()


def test_a_single_position_has_no_variance_within():
    x = torch.randn(10, 2, 1, dtype=torch.float64)
    within, between = variance_components(Moments(x.mean(2), x.var(2, correction=0), 1))
    assert within.tolist() == [[0, 0]]
    torch.testing.assert_close(between[0], x.squeeze(2).var(0, correction=0))


def test_without_degrees_of_freedom_there_is_no_variance():
    law = Law(1, "conv", "exact")
    for draws in (law.draw((5, 2), 1, CPU, None), law.draws_from(torch.tensor([1]), (5, 2), 1)):
        assert not draws.between.any()
        assert not draws.within.any()


@pytest.mark.parametrize(
    ("ghost_size", "law", "dof", "spatial", "expected"),
    [(1, "fc", "exact", 5, False), (1, "conv", "exact", 1, False), (1, "conv", "exact", 5, True),
     (2, "fc", "exact", 1, True), (1, "fc", "paper", 1, True)],
)  # fmt: skip
def test_has_variance(ghost_size, law, dof, spatial, expected):
    given = Law(ghost_size, law, dof)
    assert given.has_variance(spatial) == expected
    inside = float(law == "conv" and spatial > 1)
    draws = given.draw((50, 1), spatial, CPU, None)
    ghost = given.ghost_moments(draws, scalar(inside), scalar(1 - inside), spatial)
    assert (ghost.var.abs().sum() > 0) == expected


def test_draws_of_a_seed_do_not_depend_on_the_size_of_the_batch():
    law, seed = Law(8, "conv"), torch.tensor([4])
    large, small = (law.draws_from(seed, (batch_size, 40), 3) for batch_size in (900, 7))  # large: in several parts
    for ours, theirs in zip(large, small, strict=True):
        assert torch.equal(ours[:7], theirs)
    assert all(table.shape == (0, 40) for table in law.draws_from(seed, (0, 40), 3))


@pytest.mark.parametrize("block", [FakeTensorMode, torch.inference_mode])
def test_tensors_of_a_block_do_not_reach_later_calls(block):
    """What is kept for later calls are not tensors: these would be fake, or could not be trained with."""
    law, seed = Law(11, "conv", "exact"), torch.tensor([3])
    with block():
        law_tables(torch.tensor([3]), law, 5, torch.float32)
        functional.analytical_ghost_noise_batch_norm(torch.randn(4, 3, 5), None, None, None, None, True, ghost_size=11)
    for table in law_tables(seed, law, 5, torch.float32):
        assert type(table) is torch.Tensor
        assert not table.is_inference()
    x = torch.randn(4, 3, 5, requires_grad=True)
    functional.analytical_ghost_noise_batch_norm(x, None, None, None, None, True, ghost_size=11).sum().backward()
    assert x.grad.isfinite().all()


# χ² numbers as a function of normal ones.

Z = np.linspace(-6.66, 6.66, 4001)  # the range of normal numbers from uniform ones of 32 bits


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 31, 32, 64, 255, 512, 1999, 2000, 4096, 32_768, 10**6])
def test_the_function_is_the_quantile(degrees):
    lower = stats.chi2.ppf(stats.norm.cdf(Z), degrees)
    expected = np.where(Z < 0, lower, stats.chi2.isf(stats.norm.sf(Z), degrees)) / degrees
    found = chi_square_mean(torch.from_numpy(Z), degrees).numpy()
    assert np.abs(found - expected).max() < 2e-8 * np.sqrt(2 / degrees)
    assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("degrees", [1, 32, 2048])
def test_float32_is_accurate_enough(degrees):
    z = torch.from_numpy(Z)
    found, expected = chi_square_mean(z.float(), degrees), chi_square_mean(z, degrees)
    torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=1e-6)

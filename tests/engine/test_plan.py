import pytest
import torch

from support import reference
from ghostnoise import methods
from ghostnoise.ghosts import draws, everyone
from ghostnoise.laws import Law
from ghostnoise.moments import Moments, spread

X = torch.randn(8, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
MOMENTS = Moments(X.mean(2), X.var(2, correction=0))
INDICES = torch.randint(8, (8, 4), generator=torch.Generator().manual_seed(1))


def normalized(method):
    stats = method.who.pool(MOMENTS)
    rows = (stats.mean, method.rstd(stats.var))
    mean, rstd = (spread(table, 8, method.who.each(8))[..., None] for table in rows)
    return (X - mean) * rstd


ONE = torch.ones(1, 3, dtype=torch.float64)
BATCH = methods.Batch(MOMENTS, everyone(*MOMENTS), ONE, draws)


def noisy(noise):
    ghost, var = noise.ghost(BATCH), noise.var(BATCH)
    scale = ((ghost.var + noise.eps) / (var + noise.eps)).sqrt()
    return (X - ghost.mean[..., None]) / scale[..., None]


def test_each_normalizer_is_its_equation():
    population = Moments(torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    for method, expected in (
        (methods.batch(1e-5), reference.batch_norm(X)),
        (methods.ghost(1e-5, 3), reference.ghost_batch_norm(X, 3)),
        (methods.exclusive(1e-5, 3, 0.0), reference.exclusive_batch_norm(X, 3)),
        (methods.exclusive(1e-5, None, 0.9), reference.exclusive_batch_norm(X, None, min_std=0.9)),
        (methods.mixed(1e-5, population, 0.2), reference.eval_norm(X, *population, 0.2)),
    ):
        torch.testing.assert_close(normalized(method), expected, rtol=1e-12, atol=1e-12)


def test_ghost_noise_is_its_equation():
    noise = methods.ghost_noise(1e-3, True, True, INDICES)
    torch.testing.assert_close(noisy(noise), reference.ghost_noise(X, INDICES), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["fc", "conv"])
@pytest.mark.parametrize("unit", [True, False])
def test_analytical_noise_is_its_equations(kind, unit):
    law = Law(4, 5, kind)
    law_draws = law.draw((8, 3), torch.device("cpu"), None)
    noise = methods.analytical_noise(1e-3, True, True, law, law_draws, normalized=unit)
    expected = reference.analytical_noise(X, law_draws, 4, kind, "paper", unit_variance=unit)
    torch.testing.assert_close(noisy(noise), expected)


@pytest.mark.parametrize("min_std", [0.0, 0.8])
def test_gradient_of_the_variance(min_std):
    method = methods.exclusive(1e-5, None, min_std)
    var = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
    rstd, gradient = method.rstd(var), torch.randn(8, 3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(rstd, var, gradient)
    torch.testing.assert_close(method.var_gradient(var.detach(), rstd.detach(), gradient), wanted)

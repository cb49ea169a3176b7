import pytest
import torch

import reference
from ghostnoise import methods
from ghostnoise.laws import Law
from ghostnoise.methods import Injection
from ghostnoise.moments import Moments

X = torch.randn(8, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
MOMENTS = Moments(X.mean(2), X.var(2, correction=0))
BOTH = Injection(1e-3, shift=True, scale=True)
INDICES = torch.randint(8, (8, 4), generator=torch.Generator().manual_seed(1))


def applied(affine):
    center, scale, shift = (table.expand(8, 3).unsqueeze(2) for table in affine)
    return scale * (X - center) + shift


def test_each_method_decides_what_its_equation_says():
    population = Moments(torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    for affine, expected in (
        (methods.batch(MOMENTS, 1e-5), reference.batch_norm(X)),
        (methods.ghost(MOMENTS, 1e-5, 3), reference.ghost_batch_norm(X, 3)),
        (methods.exclusive(MOMENTS, 1e-5, 3, 0.0), reference.exclusive_batch_norm(X, 3)),
        (methods.exclusive(MOMENTS, 1e-5, None, 0.9), reference.exclusive_batch_norm(X, None, min_std=0.9)),
        (methods.mix_into(MOMENTS, 1e-5, population, 0.2), reference.eval_norm(X, *population, 0.2)),
        (methods.ghost_noise(MOMENTS, BOTH, INDICES), reference.ghost_noise(X, INDICES)),
        (methods.ghost_noise_batch(MOMENTS, 1e-5, BOTH, INDICES), reference.ghost_noise_batch_norm(X, INDICES)),
    ):
        torch.testing.assert_close(applied(affine), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_analytical_noise_decides_what_its_equations_say(kind):
    law = Law(4, 5, kind)
    draws = law.draw((8, 3), torch.device("cpu"), None)
    standalone = methods.analytical_noise(MOMENTS, BOTH, law, draws)
    inside = methods.analytical_noise_batch(MOMENTS, 1e-5, BOTH, law, draws)
    torch.testing.assert_close(applied(standalone), reference.analytical_noise(X, draws, 4, kind, "paper"))
    torch.testing.assert_close(applied(inside), reference.analytical_noise_batch_norm(X, draws, 4, kind, "paper"))


def test_no_gradient_through_the_noise():
    moments = Moments(*(table.clone().requires_grad_() for table in MOMENTS))
    law = Law(4, 5)
    draws = law.draw((8, 3), torch.device("cpu"), None)
    for affine in (methods.ghost_noise(moments, BOTH, INDICES), methods.analytical_noise(moments, BOTH, law, draws)):
        assert not any(table.requires_grad for table in affine)


def test_parts_that_are_switched_off():
    no_shift = methods.ghost_noise(MOMENTS, Injection(1e-3, shift=False, scale=True), INDICES)
    no_scale = methods.ghost_noise(MOMENTS, Injection(1e-3, shift=True, scale=False), INDICES)
    assert no_shift.center.abs().sum() == 0
    assert (no_scale.scale == 1).all()

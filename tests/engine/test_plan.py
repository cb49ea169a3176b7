import dataclasses
from itertools import chain

import pytest
import torch
from ghostnoise.engine.plan import (
    COMPONENTS,
    Batch,
    Drawn,
    Limits,
    Normalizer,
    Partition,
    Plan,
    Reference,
    Tables,
    decode,
    positions,
)
from ghostnoise.statistics.laws import Law, LawDraws
from ghostnoise.statistics.moments import Moments, expand_pools
from ghostnoise.statistics.samples import (
    Contributors,
    Exclusive,
    ExclusiveMixture,
    GhostBatch,
    Mixture,
    SampleItself,
    pool_all,
    pool_drawn,
)
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.engine import plan as plan_module
from ghostnoise.engine.masks import Valid
from support import plans, reference

X = torch.randn(8, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
MOMENTS = Moments(X.mean(2), X.var(2, correction=0))
INDICES = torch.randint(8, (8, 4), generator=torch.Generator().manual_seed(1))
ONE = torch.ones(1, 3, dtype=torch.float64)
BATCH = Batch(MOMENTS, pool_all(*MOMENTS), ONE, 5, pool_drawn)


def normalized(normalizer, running=None):
    contributors = normalizer.contributors
    stats = contributors.pool(MOMENTS, running)
    rows = (stats.mean, normalizer.rstd(stats.var))
    mean, rstd = (expand_pools(table, 8, contributors.samples_per_pool(8))[..., None] for table in rows)
    return (X - mean) * rstd


def noisy(noise):
    ghost, var = noise.ghost_moments(BATCH), noise.var(BATCH)
    scale = ((ghost.var + noise.eps) / (var + noise.eps)).sqrt()
    return (X - ghost.mean[..., None]) / scale[..., None]


def test_each_normalizer_is_its_equation():
    running = Moments(torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    for normalizer, expected in (
        (Normalizer(GhostBatch(), 1e-5), reference.batch_norm(X)),
        (Normalizer(GhostBatch(3), 1e-5), reference.ghost_batch_norm(X, 3)),
        (Normalizer(Exclusive(3), 1e-5), reference.exclusive_batch_norm(X, 3)),
        (Normalizer(Exclusive(), 1e-5, 0.9), reference.exclusive_batch_norm(X, None, min_std=0.9)),
        (Normalizer(ExclusiveMixture(3, 0.2), 1e-5), reference.self_weighted_batch_norm(X, 3, 0.2)),
        (Normalizer(Mixture(0.2), 1e-5), reference.eval_norm(X, *running, 0.2)),
    ):
        torch.testing.assert_close(normalized(normalizer, running), expected, rtol=1e-12, atol=1e-12)


def test_drawn_noise_is_its_equation():
    expected = reference.ghost_noise(X, INDICES)
    torch.testing.assert_close(noisy(Drawn(1e-3, "both", INDICES)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("law", ["fc", "conv"])
@pytest.mark.parametrize("unit", [True, False])
def test_analytical_noise_is_its_equations(law, unit):
    drawn_by = Law(4, law)
    draws = drawn_by.draw((8, 3), 5, torch.device("cpu"), None)
    noise = Tables(1e-3, "both", drawn_by, draws, normalized=unit)
    expected = reference.analytical_noise(X, draws, 4, law, "paper", unit_variance=unit)
    torch.testing.assert_close(noisy(noise), expected)
    seed = torch.tensor([5])
    draws = drawn_by.draws_from(seed, (8, 3), 5)
    expected = reference.analytical_noise(X, draws, 4, law, "paper", unit_variance=unit)
    torch.testing.assert_close(noisy(Tables(1e-3, "both", drawn_by, seed, normalized=unit)), expected)


@pytest.mark.parametrize("min_std", [0.0, 0.8])
def test_gradient_of_the_variance(min_std):
    normalizer = Normalizer(Exclusive(), 1e-5, min_std)
    var = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
    rstd, gradient = normalizer.rstd(var), torch.randn(8, 3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(rstd, var, gradient)
    torch.testing.assert_close(normalizer.var_gradient(var.detach(), rstd.detach(), gradient), wanted)


@pytest.mark.parametrize(("components", "shifts", "scales"), [("both", 1, 1), ("shift", 1, 0), ("scale", 0, 1)])
def test_components(components, shifts, scales):
    noise = Drawn(1e-3, components, INDICES)
    assert (noise.shifts, noise.scales) == (shifts, scales)


def test_correction():
    """r and d of each channel, clipped to the limits, with the floor of the normalizer in both deviations."""
    pooled = Moments(torch.tensor([[1.0, 2.0, -3.0]]).double(), torch.tensor([[1.0, 16.0, 0.25]]).double())
    running = Moments(torch.tensor([0.5, 2.0, 3.0]).double(), torch.ones(3).double())
    asked = Reference(running, torch.tensor([3.0, 5.0], dtype=torch.float64))
    r, d = asked.correction(pooled, Normalizer(GhostBatch(), 0.0), torch.float32)
    assert r.dtype == d.dtype == torch.float32
    torch.testing.assert_close(r, torch.tensor([1.0, 3.0, 0.5]))
    torch.testing.assert_close(d, torch.tensor([0.5, 0.0, -5.0]))


numbers = st.floats(0, 1e3, allow_nan=False) | st.sampled_from([1e-5, 1e-3, 1e-300, 0.1 + 0.2, 5e-324])
sizes = st.none() | st.integers(1, 65_536)
every_contributors = st.one_of(
    st.builds(GhostBatch, sizes),
    st.builds(Exclusive, sizes),
    st.builds(SampleItself),
    st.builds(Mixture, st.floats(0, 1)),
    st.builds(ExclusiveMixture, sizes, st.floats(0, 1)),
)
normalizers = st.builds(Normalizer, every_contributors, numbers, numbers)
laws = st.builds(Law, st.integers(1, 65_536), st.sampled_from(["fc", "conv"]), st.sampled_from(["paper", "exact"]))
noises = st.one_of(
    st.none(),
    st.builds(Drawn, numbers, st.sampled_from(COMPONENTS), st.just(INDICES)),
    st.builds(Partition, numbers, st.sampled_from(COMPONENTS), st.just(torch.arange(8)), st.integers(1, 65_536)),
    st.builds(
        Tables, numbers, st.sampled_from(COMPONENTS), laws, st.just(LawDraws(ONE, 2 * ONE, 3 * ONE)), st.booleans()
    ),
    st.builds(Tables, numbers, st.sampled_from(COMPONENTS), laws, st.just(torch.tensor([3])), st.booleans()),
)
references = st.sampled_from([None, Reference(MOMENTS), Reference(MOMENTS, torch.ones(2))])


@given(normalizers, noises, references, st.sampled_from([None, Valid(ONE, 2 * ONE)]))
def test_a_plan_is_decoded_as_it_was(normalizer, noise, running, valid):
    plan = Plan(normalizer, noise, running, valid=valid)
    decoded = decode(*plan.tensors(), *plan.encode())
    assert decoded.normalizer == normalizer
    assert decoded.corrects == plan.corrects
    assert all(ours is theirs for ours, theirs in zip(chain(*decoded.tensors()), chain(*plan.tensors()), strict=True))
    assert type(decoded.noise) is type(noise)
    if noise is not None:
        fields = [field.name for field in dataclasses.fields(noise) if field.name not in ("indices", "draws")]
        for name in fields:
            assert getattr(decoded.noise, name) == getattr(noise, name)
    assert decode(None, [], [], *plan.encode()).noise is None


@pytest.mark.parametrize("ghost_size", [1, 3, 4, 5, 8, 100])
def test_noise_of_a_partition_is_its_equation(ghost_size):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    expected = reference.ghost_noise(X, reference.partition(order, ghost_size))
    torch.testing.assert_close(noisy(Partition(1e-3, "both", order, ghost_size)), expected)


@pytest.mark.parametrize("eps", [1, 0])
def test_integers_are_numbers_too(eps):
    plan = Plan(Normalizer(GhostBatch(), eps, 0), Drawn(eps, "both", INDICES))
    decoded = decode(*plan.tensors(), *plan.encode())
    assert decoded.normalizer == plan.normalizer
    assert decoded.noise.eps == eps


def test_noise_that_cannot_be_encoded_is_not_dropped():
    with pytest.raises(TypeError, match="ConstantNoise"):
        Plan(Normalizer(GhostBatch(), 1e-5), plans.ConstantNoise(1e-3, "both")).encode()


def test_every_kind_of_contributors_has_numbers_alone():
    assert {"GhostBatch", "Exclusive", "ExclusiveMixture", "SampleItself", "Mixture"} <= set(Contributors.kinds)
    assert Mixture(0.25).numbers() == ([], [0.25])
    assert SampleItself().numbers() == ([], [])
    assert Exclusive().numbers() == ([None], [])
    assert ExclusiveMixture(None, 0.25).numbers() == ([None], [0.25])


def test_positions():
    assert [positions(torch.zeros(2, 3, *rest)) for rest in ((1,), (4,), (4, 5), (2, 3, 4))] == [1, 4, 20, 24]


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_limits_as_numbers_are_those_of_tensors(count, warmup, transition):
    limits = Limits(3.0, 5.0, warmup, transition)
    counted, device = torch.tensor(count), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        numbers = limits.at(counted, device)
        patch.setattr(plan_module, "is_plain_number", lambda count: False)
        torch.testing.assert_close(numbers, limits.at(counted, device), rtol=1e-15, atol=0)

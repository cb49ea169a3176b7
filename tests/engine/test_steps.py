import pytest
import torch
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import Saved
from ghostnoise.engine.plan import Drawn, Plan, Reference
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import GhostBatch

from ghostnoise.engine import op, steps
from support import plans, reference
from support.closeness import assert_close

every_plan = pytest.mark.parametrize("plan", plans.PLANS.values(), ids=plans.PLANS)
RUNNING = plans.RUNNING


@every_plan
@pytest.mark.parametrize("shape", [(6, 2, 1), (6, 2, 3, 2)])
def test_closed_gradients_equal_those_of_autograd(plan, shape):
    """The backward pass of this file against autograd through `decide`."""
    x, weight, bias = plans.inputs(shape=shape)
    dy = torch.randn(shape, dtype=torch.float64, generator=plans.seeded(3))
    y, _ = op._composite(x, weight, bias, plan)
    wanted = torch.autograd.grad(y, (x, weight, bias), dy)
    with torch.no_grad():
        done = steps.forward(ATEN, x, weight, bias, plan, None)
        kept = done.moments if plan.normalizer.contributors.keeps_moments else done.pooled
        given = (ATEN, dy, x, weight, plan, Saved(kept, done.noise, done.correction), None)
        gradients = steps.backward(*given, needs_x=True)
        without = steps.backward(*given, needs_x=False)
    torch.testing.assert_close(done.y, y.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert_close(ours, theirs, "gradient", magnitude=1)
    assert without.x is None
    assert torch.equal(without.weight, gradients.weight)


def test_noise_alone_is_a_transformation_with_constant_tables():
    x, _, _ = plans.inputs()
    affine, _ = steps.inject_tables(ATEN, x.detach(), Drawn(1e-3, "both", plans.indices()), None)
    y = ATEN.transform(x.detach(), affine)
    wanted = reference.unfold(reference.ghost_noise(reference.fold(x.detach()), plans.indices()), x)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    for components, unused, value in (("scale", affine.center, 0), ("shift", affine.scale, 1)):
        tables, _ = steps.inject_tables(ATEN, x.detach(), Drawn(1e-3, components, plans.indices()), None)
        kept = tables.center if components == "scale" else tables.scale
        assert (kept == value).all()
        assert not (unused == value).all()


# Batch Renormalization's correction.


def corrected(r_max=1.1, d_max=0.2, running=RUNNING):
    return Plan(plans.normalizer(GhostBatch()), None, Reference(running, plans.limits(r_max, d_max)))


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.1, 0.2), (3.0, 5.0), (1e6, 1e6)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 2), (6, 2, 3, 2)])
@pytest.mark.parametrize("composite", [False, True])
def test_a_correction_equals_the_naive_formula(limits, affine, shape, composite, monkeypatch):
    """Output and gradients, with r and d constant, in the eager and in the composite form."""
    monkeypatch.setattr(op, "needs_operators", lambda *tensors: composite)
    x, *parameters = plans.inputs(shape=shape)
    parameters = parameters if affine else [None, None]
    inputs = [tensor for tensor in (x, *parameters) if tensor is not None]
    dy = torch.randn(shape, dtype=torch.float64, generator=plans.seeded(3))
    y, measured = op.normalize(x, corrected(*limits), *parameters)
    naive = reference.batch_renorm(reference.fold(x), *RUNNING, *limits, *parameters).view(shape)
    assert_close(y, naive)
    for ours, wanted in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(naive, inputs, dy), strict=True):
        assert_close(ours, wanted, "gradient")
    torch.testing.assert_close(measured.pooled.mean[0], reference.statistics(reference.fold(x))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_correction_in_other_dtypes(dtype):
    x, weight, bias = plans.inputs(dtype)
    y, _ = op.normalize(x, corrected(), weight, bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    naive = reference.batch_renorm(reference.fold(exact[0]), *RUNNING, 1.1, 0.2, *exact[1:]).view(x.shape)
    assert y.dtype == dtype
    assert_close(y, naive)
    dy = torch.randn(x.shape, generator=plans.seeded(3)).to(dtype)
    wanted = torch.autograd.grad(naive, exact, dy.double())
    largest = wanted[0].abs().max().item()
    for ours, theirs in zip(torch.autograd.grad(y, (x, weight, bias), dy), wanted, strict=True):
        assert_close(ours, theirs, "gradient", magnitude=2 * largest)


@pytest.mark.parametrize("composite", [False, True])
def test_gradcheck_of_a_correction(composite, monkeypatch):
    """Where r and d are at their limits for all channels, they do not depend on x, and gradcheck applies."""
    monkeypatch.setattr(op, "needs_operators", lambda *tensors: composite)
    far = Moments(RUNNING.mean + 50, RUNNING.var * 1e-4)
    inputs = plans.inputs()
    assert torch.autograd.gradcheck(
        lambda *given: op.normalize(given[0], corrected(running=far), *given[1:])[0], inputs
    )


def test_forward_mode_and_second_derivatives_of_a_correction():
    far = Moments(RUNNING.mean + 50, RUNNING.var * 1e-4)

    def run(x, weight, bias):
        return op.normalize(x, corrected(running=far), weight, bias)[0]

    assert torch.autograd.gradcheck(run, plans.inputs(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, plans.inputs())


def test_limits_of_one_and_zero_are_batch_norm():
    x, weight, bias = plans.inputs()
    y, _ = op.normalize(x, corrected(1.0, 0.0), weight, bias)
    plain, _ = op.normalize(x, plans.PLANS["bn"], weight, bias)
    torch.testing.assert_close(y, plain, rtol=1e-14, atol=1e-14)


def test_the_saved_correction_is_that_of_the_forward_pass():
    """The running statistics and limits may change between the passes."""
    x, weight, bias = plans.inputs()
    moments, limits = Moments(*(table.clone() for table in RUNNING)), plans.limits()
    plan = Plan(plans.normalizer(GhostBatch()), None, Reference(moments, limits))
    y, _ = op.normalize(x, plan, weight, bias)
    (wanted,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
    for table in (*moments, limits):
        table.mul_(2)
    (gradient,) = torch.autograd.grad(y.cos().sum(), x)
    assert torch.equal(gradient, wanted)

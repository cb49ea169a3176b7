"""A fused call gives the results of the steps to the last bit: it runs the same functions in the same order."""

import pytest
import torch
from ghostnoise.engine.backends.base import NO_NOISE, Saved
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.engine.plan import Drawn, Normalizer, Plan, Reference, Tables
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.laws import Law
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, ExclusiveMixture, GhostBatch, Mixture, SampleItself
from hypothesis import given
from hypothesis import strategies as st

import ghostnoise
from ghostnoise.engine import op
from support.backend_checks import ALL_DTYPES, GivenNoise, dtypes, shapes, upstreams, values
from support.copies import COPIES, FOUND

NATIVE = Native()


def seeded(law, components="both"):
    return Tables(1e-3, components, law, torch.tensor([2**40 + 3]), normalized=True)


METHODS = {
    "batch": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5)),
    "ghost": lambda size, noise: Plan(Normalizer(GhostBatch(size), 1e-5)),
    "exclusive": lambda size, noise: Plan(Normalizer(Exclusive(size + 1), 1e-5)),
    "floored exclusive": lambda size, noise: Plan(Normalizer(Exclusive(), 1e-5, 0.9)),
    "noisy": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), noise("both")),
    "shifted": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), noise("shift")),
    "scaled": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), noise("scale")),
    "law": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), seeded(Law(size))),
    "shift of a law": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), seeded(Law(size, "conv"), "shift")),
    "exact law": lambda size, noise: Plan(Normalizer(GhostBatch(), 1e-5), seeded(Law(size, "conv", "exact"))),
    "noisy ghost": lambda size, noise: Plan(Normalizer(GhostBatch(size), 1e-5), noise("both")),
}


class Steps:
    """Record the calls of the library, and unless `fused` run step by step."""

    def __init__(self, patch, fused):
        self.calls = []
        run = library.Library.run

        def counted(own, name, *arguments):
            self.calls.append(name)
            run(own, name, *arguments)

        patch.setattr(library.Library, "run", counted)
        if not fused:
            patch.setattr(Native, "fused_forward", lambda *given: None)
            patch.setattr(Native, "fused_backward", lambda *given: None)
            patch.setattr(Native, "fused_noise", lambda *given: None)


def results(fused, x, dy, parameters, plan, needs_x=True):
    """Return all results of both directions, and the calls that made them."""
    with pytest.MonkeyPatch.context() as patch, ghostnoise.backend("native"):
        steps = Steps(patch, fused)
        x = x.detach().requires_grad_(needs_x)
        weight, bias = (None if table is None else table.detach().requires_grad_() for table in parameters)
        y, measured = op.normalize(x, plan, weight, bias)
        inputs = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
        gradients = torch.autograd.grad(y, inputs, dy) if inputs else ()
    tables = measured.moments if plan.normalizer.contributors.keeps_moments else measured.pooled
    return [y, *tables, *gradients], steps.calls


def given_tensors(shape, dtype, layout, upstream="contiguous", affine="both"):
    x, dy = values(shape, dtype, layout, 0), values(shape, dtype, upstream, 1)
    of = {"both": dtype, "float32": torch.float32}.get(affine)
    vectors = (torch.randn(shape[1], generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    weight, bias = (None if of is None else vector.to(of) for vector in vectors)
    return x, dy, (weight, None if affine == "weight" else bias)


def drawn(batch_size, dtype=torch.int64):
    indices = torch.randint(batch_size, (batch_size, 3), generator=torch.Generator().manual_seed(4)).to(dtype)
    return lambda components: Drawn(1e-3, components, indices)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride() or one.shape.numel() == 0
        assert torch.equal(one, other) or bool(one.isnan().any() & (one.isnan() == other.isnan()).all())


taken_layouts = st.sampled_from(["contiguous", "channels_last", "wide rows"])


def laid_out(shape, dtype, layout, upstream, affine):
    """Return tensors whose x has a layout that the library takes; "wide rows" are parts of longer rows."""
    x, dy, parameters = given_tensors(shape, dtype, "contiguous" if layout == "wide rows" else layout, upstream, affine)
    if layout == "wide rows":
        x = torch.stack([x, x], dim=2)[:, :, 0]
    return x, dy, parameters


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_fused_call_equals_the_steps(copy, name):
    @given(shapes, dtypes, taken_layouts, upstreams, st.integers(1, 4), st.sampled_from(["both", "float32", "none"]))
    def check(shape, dtype, layout, upstream, size, affine):
        shape = (shape[0] + 2, *shape[1:])
        x, dy, parameters = laid_out(shape, dtype, layout, upstream, affine)
        plan = METHODS[name](size, drawn(shape[0]))
        ours, calls = results(True, x, dy, parameters, plan)
        theirs, steps = results(False, x, dy, parameters, plan)
        assert_same(ours, theirs)
        ghost_size = plan.normalizer.contributors.ghost_size
        fused = plan.noise is None or ghost_size is None or shape[0] < 2 * ghost_size
        assert calls == ["fused_forward", "fused_backward"] if fused else calls[-1] == "fused_backward"
        assert "transform" in steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: library.Library(FOUND.handle, copy))
        check()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("components", ["both", "shift", "scale"])
def test_fused_noise_equals_the_steps(copy, components):
    @given(shapes, dtypes, taken_layouts, upstreams)
    def check(shape, dtype, layout, upstream):
        x, dy, _ = laid_out(shape, dtype, layout, upstream, "none")
        found = []
        for fused in (True, False):
            with pytest.MonkeyPatch.context() as patch, ghostnoise.backend("native"):
                steps = Steps(patch, fused)
                own = x.detach().requires_grad_()
                y, _ = op.inject(own, drawn(shape[0])(components))
                found.append([y, *torch.autograd.grad(y, own, dy)])
                assert steps.calls[-2:] == ["transform", "scale_gradient"]
                assert steps.calls[:-2] == ["fused_noise"] if fused else "noise_tables" in steps.calls
        assert_same(*found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: library.Library(FOUND.handle, copy))
        check()


@pytest.mark.parametrize("given", [torch.tensor([[0, 9]] * 4), torch.zeros(4, dtype=torch.int64)])
def test_wrong_indices_of_fused_noise_are_refused(given):
    """The library checks indices, and tables of another shape are left to the steps."""
    x, noise = torch.randn(4, 3, 2, 2), Drawn(1e-3, "both", given)
    if given.ndim == 2:
        with pytest.raises(IndexError):
            NATIVE.fused_noise(x, noise)
    else:
        assert NATIVE.fused_noise(x, noise) is None


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1100, 130, 1), (1100, 70, 1, 2), (66, 64, 32, 32), (40, 70, 4, 4)])
@pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
def test_large_tensors_on_any_number_of_threads(name, shape, dtype, layout):
    """Many samples of few positions are processed in parts, of a few ghost batches each."""
    x, dy, parameters = given_tensors(shape, dtype, layout, layout)
    plan = METHODS[name](32, drawn(shape[0]))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _ = results(False, x, dy, parameters, plan)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(results(True, x, dy, parameters, plan)[0], expected)
    finally:
        torch.set_num_threads(before)


# The first three are large, and are processed in parts of one and of several ghost batches; the memory of the first one
# is mapped before. The last two have fewer tiles of channels than threads, and more samples in a ghost batch than fit a
# tile.
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((132, 64, 32, 32), 32),
        ((140, 260, 8, 8), 32),
        ((301, 520, 3, 5), 4),
        ((70, 60, 4, 4), 8),
        ((270, 70, 2, 2), 260),
    ],
)
@pytest.mark.parametrize("name", ["ghost", "exclusive", "floored exclusive"])
def test_tables_of_several_positions_in_parts_and_tiles(name, shape, size, layout):
    for dtype in (torch.float32, torch.bfloat16):
        x, dy, parameters = given_tensors(shape, dtype, layout, layout)
        plan, before = METHODS[name](size, drawn(shape[0])), torch.get_num_threads()
        expected, _ = results(False, x, dy, parameters, plan)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_same(results(True, x, dy, parameters, plan)[0], expected)
        finally:
            torch.set_num_threads(before)
        assert_same(
            results(True, x, dy, parameters, plan, needs_x=False)[0],
            results(False, x, dy, parameters, plan, needs_x=False)[0],
        )


@pytest.mark.parametrize("positions", [1, 2, 16, 63, 64, 65, 300])
@pytest.mark.parametrize("channels", [1, 15, 16, 64, 83, 600])
def test_moments_and_sums_of_any_number_of_channels_and_positions(channels, positions):
    """Up to 64 positions, channels-last passes sum a few packs of channels in registers."""
    for dtype in ALL_DTYPES:
        x, dy, parameters = given_tensors((3, channels, positions), dtype, "contiguous")
        plan = METHODS["batch"](1, None)
        rows, _ = results(True, x, dy, parameters, plan)
        last = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (x, dy)]
        close = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        for one, other in zip(results(True, *last, parameters, plan)[0], rows, strict=True):
            torch.testing.assert_close(one, other, rtol=close, atol=close * float(other.detach().abs().max()))


@pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
@pytest.mark.parametrize("shape", [(2100, 70, 1), (33000, 70, 1)])  # more than a tile, and more than a part
def test_many_samples(name, shape):
    x, dy, parameters = given_tensors(shape, torch.float32, "contiguous")
    plan = METHODS[name](32, drawn(shape[0]))
    ours, calls = results(True, x, dy, parameters, plan)
    assert calls == ["fused_forward", "fused_backward"]
    assert_same(ours, results(False, x, dy, parameters, plan)[0])


@pytest.mark.parametrize("name", ["ghost", "exclusive", "noisy"])
def test_absent_parameters_and_gradients(name):
    x, dy, (weight, bias) = given_tensors((9, 5, 3), torch.float32, "contiguous")
    plan = METHODS[name](4, drawn(9, torch.int32))
    for parameters in ((weight, None), (None, bias), (None, None)):
        for needs_x in (True, False):
            ours, calls = results(True, x, dy, parameters, plan, needs_x)
            assert_same(ours, results(False, x, dy, parameters, plan, needs_x)[0])
            assert calls[0] == "fused_forward"


def test_a_gradient_of_another_dtype_or_layout():
    """As hooks may return it: a copy lies in memory as x does."""
    x, dy, (weight, _) = given_tensors((9, 5, 3, 3), torch.float32, "channels_last")
    plan = Plan(Normalizer(GhostBatch(4), 1e-5))
    saved = Saved(NATIVE.fused_forward(x, weight, None, plan).pooled, NO_NOISE)
    wanted = NATIVE.fused_backward(dy, x, weight, plan, saved, True)
    crossed = dy.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (dy.double(), dy.contiguous(memory_format=torch.channels_last), crossed):
        assert_same(NATIVE.fused_backward(other, x, weight, plan, saved, True), wanted)


def test_plans_that_run_step_by_step():
    x, dy, parameters = given_tensors((6, 4, 3), torch.float32, "contiguous")
    given_noise = GivenNoise(1e-3, "both", Moments(torch.ones(6, 4), torch.ones(6, 4)))
    noisy = drawn(6)("both")
    running = Moments(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    for plan, last in (
        (Plan(Normalizer(SampleItself(), 1e-5)), "input_gradient"),
        (Plan(Normalizer(Mixture(0.5), 1e-5), None, Reference(running)), "input_gradient"),
        (Plan(Normalizer(ExclusiveMixture(3, 0.5), 1e-5)), "input_gradient"),
        (Plan(Normalizer(GhostBatch(), 1e-5), given_noise), "fused_backward"),
        (Plan(Normalizer(GhostBatch(2), 1e-5), noisy), "fused_backward"),
        (Plan(Normalizer(Exclusive(), 1e-5), noisy), "fused_backward"),
    ):
        ours, calls = results(True, x, dy, parameters, plan)
        assert calls[0] == "moments"
        assert calls[-1] == last
        assert_same(ours, results(False, x, dy, parameters, plan)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("spatial", [1, 3])
@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.2, 0.1), (3.0, 5.0)])
def test_batch_renormalization_equals_its_formula(dtype, affine, spatial, limits):
    """In one call; with the limits r_max = 1 and d_max = 0 it is batch norm."""
    x, dy, parameters = given_tensors((9, 5, spatial), dtype, "contiguous", affine=affine)
    running = Moments(torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) * 3)
    reference = Reference(running, torch.tensor(limits, dtype=torch.float64))
    plan = Plan(Normalizer(GhostBatch(), 1e-5), None, reference)
    ours, calls = results(True, x, dy, parameters, plan)
    assert calls == ["fused_forward", "fused_backward"]
    r_max, d_max = limits
    wide = x.double().requires_grad_()
    weight, bias = (None if one is None else one.double().requires_grad_() for one in parameters)
    mean, var = wide.mean((0, 2)), wide.var((0, 2), correction=0)
    std, running_std = (var + 1e-5).sqrt(), (running.var + 1e-5).sqrt()
    r = (std / running_std).clamp(1 / r_max, r_max).detach()
    d = ((mean - running.mean) / running_std).clamp(-d_max, d_max).detach()
    y = (wide - mean[:, None]) / std[:, None] * r[:, None] + d[:, None]
    y = y if weight is None else y * weight[:, None]
    y = y if bias is None else y + bias[:, None]
    inputs = [tensor for tensor in (wide, weight, bias) if tensor is not None]
    expected = [y, *torch.autograd.grad(y, inputs, dy.double())]
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    for one, other in zip([ours[0], *ours[3:]], expected, strict=True):
        torch.testing.assert_close(one.double(), other, **close)


def test_nan_limits_of_a_correction_stay_nan():
    x, plan = torch.randn(4, 2, 3), Plan(Normalizer(GhostBatch(), 1e-5))
    running = Moments(torch.tensor([0.0, float("nan")]).double(), torch.ones(2).double())
    made = NATIVE.fused_forward(x, None, None, plan._replace(reference=Reference(running, torch.ones(2).double())))
    assert made.correction.d.isnan().tolist() == [False, True]
    assert made.y[:, 1].isnan().all()
    assert made.y[:, 0].isfinite().all()


@pytest.mark.parametrize("name", ["batch", "ghost", "exclusive", "noisy"])
@pytest.mark.parametrize("spatial", [1, 3])
def test_gradients_by_finite_differences(name, spatial):
    """With noise, the drawn statistics are constants, so the reference is the composite form."""
    x = torch.randn(6, 2, spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plan = METHODS[name](3, drawn(6))
    weight, bias = (torch.randn(2, dtype=torch.float64).requires_grad_() for _ in range(2))
    with ghostnoise.backend("native"):
        if plan.noise is None:
            run = lambda x, *parameters: op.normalize(x, plan, *parameters)[0]  # noqa: E731
            assert torch.autograd.gradcheck(run, (x, weight, bias))
            return
        y, _ = op.normalize(x, plan, weight, bias)
        ours = torch.autograd.grad(y.cos().sum(), (x, weight, bias))
    composite = torch.autograd.grad(op._composite(x, weight, bias, plan)[0].cos().sum(), (x, weight, bias))
    for one, other in zip(ours, composite, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "tables"), [("ghost", 2 * 2 * 4 * 8), ("exclusive", 2 * 8 * 4 * 8), ("noisy", 2 * 4 * 8 + 2 * 8 * 4 * 4)]
)
def test_no_memory_is_held_beside_what_is_saved(name, tables):
    """Saved tables are views of memory that only they share."""
    x, saved = torch.randn(8, 4, 3, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        op.normalize(x, METHODS[name](4, drawn(8)))
    held = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert held == x.untyped_storage().nbytes() + tables


@pytest.mark.parametrize("shape", [(9, 70), (40, 130, 3)])
def test_draws_from_a_law_do_not_depend_on_the_number_of_threads(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x if x.ndim > 2 else x[..., None]
    plan = Plan(Normalizer(GhostBatch(), 1e-5), seeded(Law(8, "conv")))
    made, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        made.append(results(True, x, x, (None, None), plan)[0])
    torch.set_num_threads(threads)
    assert_same(made[0], made[1])
    assert_same(made[0], made[2])


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("spatial", [1, 4])
@pytest.mark.parametrize(
    ("contributors", "population"),
    [
        (GhostBatch(), Population(unbiased=True)),
        (GhostBatch(3), Population(ghosts=True)),
        (GhostBatch(3), Population(unbiased=True)),
        (Exclusive(4), Population()),
    ],
)
def test_a_fused_call_updates_running_statistics(contributors, population, spatial, momentum):
    """As the update after the steps does; the last ghost batch is larger than the others."""
    x = torch.randn(11, 70, spatial, generator=torch.Generator().manual_seed(0)) * 3 + 2
    found = []
    for fused in (True, False):
        running = Running(torch.ones(70), torch.full((70,), 2.0), torch.tensor(4), momentum)
        plan = Plan(Normalizer(contributors, 1e-5), update=Update(running, population))
        _, calls = results(fused, x, x, (None, None), plan)
        assert ("update_running" in calls) != fused
        assert all(buffer._version == 1 for buffer in running[:3])
        found.append(running[:3])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert found[0][2] == 5


def test_a_fused_call_leaves_buffers_alone_that_it_cannot_update():
    """Buffers of a dtype that the library does not have, and batches that are not finite."""
    x = torch.randn(6, 3, 2)
    for dtype, value, count in ((torch.bfloat16, 1.0, 1), (torch.float32, torch.inf, 0)):
        running = Running(torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype), torch.tensor(0))
        plan = Plan(Normalizer(GhostBatch(), 1e-5), update=Update(running, Population()))
        _, calls = results(True, x * value, x, (None, None), plan)
        assert "fused_forward" in calls
        assert running.num_batches_tracked == count
        assert (running.mean.any() > 0) == (count > 0)

"""Layers in a few launches: equal to `aten` in both directions, and nothing else runs on the device."""

from unittest import mock

import numpy as np
import pytest
import torch
from ghostnoise.engine.backends.triton import passes
from ghostnoise.engine.backends.triton.backend import Triton
from ghostnoise.engine.backends.triton.kernels import INTERPRETED
from ghostnoise.engine.plan import Drawn, Limits, LiveReference, Normalizer, Plan, Seeded
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.samples import Exclusive, ExclusiveMixture, GhostBatch, Mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import ghostnoise
from ghostnoise import functional
from ghostnoise.bench import cost
from ghostnoise.engine import op
from support import reference
from support.backend_checks import ALL_DTYPES
from support.closeness import assert_close
from support.inputs import lay_out

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])
WHOLE = Normalizer(GhostBatch(), 1e-5)
BATCH, UNBIASED, GHOSTS = Population(), Population(unbiased=True), Population(ghosts=True)
LIMITS = Limits(1.2, 0.3, 1, 4)  # after three batches, half of it
COUNT = 3


def plan_of(contributors, running, population, noise=None, reference=None, min_std=0.0):
    return Plan(Normalizer(contributors, 1e-5, min_std), noise, reference, Update(running, population))


# The plans for running buffers and drawn samples (B, N).
METHODS = {
    "batch": lambda running, drawn: plan_of(GhostBatch(), running, UNBIASED),
    "ghost": lambda running, drawn: plan_of(GhostBatch(3), running, GHOSTS),
    "ghost to batch": lambda running, drawn: plan_of(GhostBatch(4), running, UNBIASED),
    "exclusive": lambda running, drawn: plan_of(Exclusive(3), running, BATCH),
    "exclusive pairs": lambda running, drawn: plan_of(Exclusive(2), running, BATCH),
    "floored exclusive": lambda running, drawn: plan_of(Exclusive(), running, BATCH, min_std=0.9),
    "renorm": lambda running, drawn: plan_of(GhostBatch(), running, UNBIASED, None, LiveReference(running, LIMITS)),
    "noisy": lambda running, drawn: plan_of(GhostBatch(), running, UNBIASED, Drawn(1e-3, "both", drawn)),
    "shifted": lambda running, drawn: plan_of(GhostBatch(), running, UNBIASED, Drawn(1e-3, "shift", drawn)),
    "scaled": lambda running, drawn: plan_of(GhostBatch(), running, UNBIASED, Drawn(1e-3, "scale", drawn)),
    "seeded": lambda running, drawn: plan_of(
        GhostBatch(), running, UNBIASED, Seeded(1e-3, "both", SEED, drawn.shape[1])
    ),
}
STEP_BY_STEP = {
    "noisy exclusive": lambda running, drawn: Plan(Normalizer(Exclusive(), 1e-5), Drawn(1e-3, "both", drawn)),
    "noisy ghost": lambda running, drawn: Plan(Normalizer(GhostBatch(3), 1e-5), Seeded(1e-3, "both", SEED, 4)),
}
FAST = ("ghost", "exclusive", "renorm", "seeded")


def slow(*values):
    """Parameters that `make test-all` adds."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


every_method = pytest.mark.parametrize(
    "name", [*FAST, *slow(*(name for name in METHODS | STEP_BY_STEP if name not in FAST))]
)
IN_PARTS = {"TILE": 32, "POSITIONS": 4, "PROGRAMS": 64, "LEAST_TILES": 1}


def seeded(shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def buffers(channels, momentum=0.1, dtype=torch.float32):
    mean, var = seeded(channels, 5).to(dtype), seeded(channels, 6).square().add(0.5).to(dtype)
    return Running(mean, var, torch.tensor(COUNT), momentum)


def results(backend, plan_of, x, dy, affine=True, momentum=0.1, drawn=5):
    """y, the gradients and the buffers afterwards; and what was measured."""
    channels, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    weight, bias = (seeded(channels, seed).to(dtype).requires_grad_() for seed in (2, 3)) if affine else (None, None)
    running, x = buffers(channels, momentum), x.detach().requires_grad_()
    indices = torch.randint(len(x), (len(x), drawn), generator=torch.Generator().manual_seed(4))
    with ghostnoise.backend(backend):
        y, measured = op.normalize(x, plan_of(running, indices), weight, bias)
        inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
        gradients = torch.autograd.grad(y, inputs, dy)
    return [y, *gradients], running, measured


def assert_equal_to_aten(plan_of, x, dy, affine=True, momentum=0.1, drawn=5):
    ours, running, measured = results("triton", plan_of, x, dy, affine, momentum, drawn)
    theirs, wanted, _ = results("aten", plan_of, x.double(), dy.double(), affine, momentum, drawn)
    for direction, one, other in zip(["output", *["gradient"] * 3], ours, theirs, strict=False):
        magnitude = other.abs().max().item() * (
            2 if x.dtype == torch.bfloat16 else 1
        )  # the interpreter cuts digits off
        assert_close(one, other, direction, magnitude)
    for one, other in zip(running[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other)
    assert running.num_batches_tracked == wanted.num_batches_tracked
    assert ours[0].stride() == torch.empty_like(x).stride() == ours[1].stride()
    return measured


class TestInterpreted:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", ["ghost_batch_norm", *slow("exclusive_batch_norm", "ghost_noise_batch_norm")])
    def test_a_masked_layer_equals_aten(self, name):
        """The kernels make the passes over x; the fused calls do not cover masks."""
        x, dy, mask = seeded((9, 3, 2, 2)), seeded((9, 3, 2, 2), 1), seeded((9, 2, 2), 2) < 0.7
        more = {} if name.startswith("exclusive") else {"ghost_size": 4}
        found = []
        for backend in ("triton", "aten"):
            given = x.clone().requires_grad_()
            generator = {"generator": torch.Generator().manual_seed(0)} if "noise" in name else {}
            with ghostnoise.backend(backend):
                y = getattr(functional, name)(given, None, None, training=True, mask=mask, **more, **generator)
                found.append((y, *torch.autograd.grad(y, given, dy)))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)

    @every_method
    def test_a_layer_equals_aten(self, name):
        x = seeded((9, 3, 2, 2)).add(0.5).float()
        measured = assert_equal_to_aten((METHODS | STEP_BY_STEP)[name], x, seeded(x.shape, 1).float())
        assert measured.updated == (name in METHODS)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", METHODS)
    def test_shapes_layouts_and_dtypes(self, name):
        shapes = st.one_of(
            st.tuples(st.integers(4, 9), st.integers(1, 20), st.integers(2, 9)),
            st.tuples(st.integers(4, 7), st.sampled_from((1, 3, 40)), st.integers(1, 3), st.integers(2, 3)),
            st.tuples(st.integers(6, 20), st.integers(1, 9), st.just(1)),
        )
        layouts = st.sampled_from(["contiguous", "channels_last"])

        @given(shapes, st.sampled_from(ALL_DTYPES), layouts, layouts, st.booleans(), st.sampled_from([0.1, None, 1.0]))
        @settings(max_examples=12)
        def check(shape, dtype, layout, upstream, affine, momentum):
            x = lay_out(seeded(shape).add(0.5).to(dtype), layout)
            if name == "exclusive pairs" and shape[-1] == 1:  # a single value has no variance
                return
            assert_equal_to_aten(METHODS[name], x, lay_out(seeded(shape, 1).to(dtype), upstream), affine, momentum)

        check()

    @pytest.mark.parametrize("name", ["seeded", *slow(*(METHODS.keys() - {"seeded"}))])
    def test_samples_in_parts(self, name):
        """Many positions are measured by several programs, whose tables the decide kernels combine."""
        x = seeded((5, 2, 70)).add(3).float()
        with mock.patch.multiple(passes, **IN_PARTS):
            assert passes._divide(x, reduce=True).K > 1
            assert_equal_to_aten(METHODS[name], x, seeded(x.shape, 1).float())

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["batch", "ghost", "exclusive", "noisy"])
    def test_more_samples_and_channels_than_a_program_takes(self, name):
        x = seeded((300, 37, 1)).float()
        assert_equal_to_aten(METHODS[name], x, seeded(x.shape, 1).float())

    @pytest.mark.parametrize("name", ["batch", *slow("ghost")])
    def test_a_mean_far_from_zero(self, name):
        x = (seeded((8, 2, 6)) + 1e4).float()
        ours, _, _ = results("triton", METHODS[name], x, x)
        size = None if name == "batch" else 3
        weight, bias = (seeded(2, seed)[:, None] for seed in (2, 3))
        exact = reference.ghost_batch_norm(reference.fold(x), size or 8) * weight + bias
        assert (ours[0] - exact).abs().max() <= 1e-5 * exact.abs().max()

    def test_draws_lose_no_digits_to_an_outlier_that_was_not_drawn(self):
        x = seeded((6, 5, 3))
        x[3] += 1e8
        indices = torch.tensor([[0, 1, 2, 2], [4, 5, 0, 1], [1, 1, 2, 5], [0, 2, 4, 5], [5, 4, 4, 0], [2, 0, 1, 4]])
        with ghostnoise.backend("triton"):
            y = functional.ghost_noise(x, 4, indices=indices, components="scale")
        drawn = x[indices].transpose(1, 2).flatten(2)  # (B, C, N·S)
        wanted = ((x.var((0, 2), correction=0) + 1e-3) / (drawn.var(2, correction=0) + 1e-3)).sqrt()
        torch.testing.assert_close(y / x, wanted[..., None].expand_as(x), rtol=1e-9, atol=0)

    @pytest.mark.slow
    def test_an_outlier_in_another_ghost_batch(self):
        x = seeded((6, 2, 5)).float()
        x[0] += 1e8
        ours, _, _ = results("triton", METHODS["ghost"], x, x, affine=False)
        exact = reference.ghost_batch_norm(reference.fold(x), 3)
        assert (ours[0] - exact)[3:].abs().max() <= 1e-5

    @pytest.mark.slow
    def test_a_sample_that_is_the_outlier_of_its_own_ghost_batch(self):
        x = seeded((4, 2, 5)).float()
        x[1] += 1e4
        ours, _, _ = results("triton", lambda running, drawn: Plan(Normalizer(Exclusive(), 1e-5)), x, x, affine=False)
        exact = reference.exclusive_batch_norm(reference.fold(x), None)
        assert (ours[0] - exact).abs().max() <= 1e-5 * exact.abs().max()

    @pytest.mark.parametrize("name", ["batch", *slow("ghost", "exclusive", "noisy")])
    def test_a_non_finite_batch_leaves_the_buffers_alone(self, name):
        """Also those of channels that are finite."""
        x = seeded((9, 3, 2)).float()
        x[2, 1, 0] = float("inf")
        running = buffers(3)
        with np.errstate(invalid="ignore", over="ignore"), ghostnoise.backend("triton"):
            indices = torch.zeros(9, 4, dtype=torch.int64)
            y, measured = op.normalize(x, METHODS[name](running, indices))
        assert measured.updated
        assert y[:, 0].isfinite().all()
        for ours, before in zip(running[:3], buffers(3)[:3], strict=True):
            assert torch.equal(ours, before)

    def test_indices_outside_the_batch_are_not_read(self):
        x, indices = seeded((4, 2, 3)).float(), torch.tensor([[0, 1], [2, 4], [-1, 0], [3, 3]])
        with ghostnoise.backend("triton"):
            y, _ = op.normalize(x, Plan(WHOLE, Drawn(1e-3, "both", indices)))
        assert y.isnan().flatten(1).all(1).tolist() == [False, True, True, False]

    @pytest.mark.parametrize("components", ["both", *slow("shift", "scale")])
    def test_noise_alone_equals_aten(self, components):
        x, dy = seeded((6, 3, 2, 2)).add(1).float(), seeded((6, 3, 2, 2), 1).float()
        found = []
        for backend in ("triton", "aten"):
            given = (x if backend == "triton" else x.double()).clone().requires_grad_()
            with ghostnoise.backend(backend):
                y, _ = op.inject(given, Seeded(1e-3, components, SEED, 5))
                found.append((y, *torch.autograd.grad(y, given, dy.to(y.dtype))))
        for direction, ours, theirs in zip(("output", "gradient"), *found, strict=True):
            assert_close(ours, theirs, direction)

    @pytest.mark.slow
    def test_gradients_by_finite_differences(self):
        x = seeded((4, 2, 2)).requires_grad_()
        weight, bias = seeded(2, 2).requires_grad_(), seeded(2, 3).requires_grad_()
        for contributors in (GhostBatch(2), Exclusive()):
            plan = Plan(Normalizer(contributors, 1e-5))
            with ghostnoise.backend("triton"):
                run = lambda *given, plan=plan: op.normalize(given[0], plan, *given[1:])[0]  # noqa: E731
                assert torch.autograd.gradcheck(run, (x, weight, bias))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["batch", "exclusive", "noisy", "renorm"])
    def test_a_checkpoint_and_a_second_derivative(self, name):
        x, found = seeded((6, 2, 3)), []
        for backend in ("triton", "aten"):
            given, running = x.clone().requires_grad_(), buffers(2)
            plan = METHODS[name](running, torch.randint(6, (6, 4), generator=torch.Generator().manual_seed(0)))
            with ghostnoise.backend(backend):
                y, _ = op.normalize(given, plan)
                (first,) = torch.autograd.grad(y.cos().sum(), given, create_graph=True)
                found.append(torch.autograd.grad(first.square().sum(), given)[0])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


# The operations on the device.

ALLOCATIONS_AND_VIEWS = {
    "empty", "new_empty", "empty_like", "empty_strided", "detach", "view", "_unsafe_view", "unsqueeze", "squeeze",
    "select", "slice", "unbind", "expand", "alias", "as_strided", "transpose", "permute",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Records torch's operators that are neither allocations nor views, and the launches of kernels."""

    def __enter__(self):
        self.names = []
        launch = passes.launch

        def counted(kernel, *arguments, **options):
            self.names.append(kernel.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                launch(kernel, *arguments, **options)

        self.patches = [
            mock.patch("ghostnoise.engine.op.intercepted", return_value=False),  # else the mode sees registered ops
            mock.patch("ghostnoise.engine.backends.triton.passes.launch", counted),
            mock.patch("ghostnoise.engine.backends.triton.fused.launch", counted),
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ALLOCATIONS_AND_VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


LAYERS = {
    "BN": lambda: ghostnoise.BatchNorm2d(3),
    "GBN": lambda: ghostnoise.GhostBatchNorm2d(3, ghost_size=4),
    "GBN of the batch": lambda: ghostnoise.GhostBatchNorm2d(3, ghost_size=4, running_var_from="batch"),
    "XBN": lambda: ghostnoise.ExclusiveBatchNorm2d(3, ghost_size=4),
    "BRN": lambda: ghostnoise.BatchRenorm2d(3),
    "BN+GNI": lambda: ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4),
    "GNI": lambda: ghostnoise.GhostNoise(4),
}


class TestLaunches:
    """Tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("layout", ["contiguous", *slow("channels_last")])
    @pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
    @pytest.mark.parametrize("name", LAYERS)
    def test_nothing_else_runs_on_the_device(self, name, dtype, layout):
        forward, backward = cost.LAUNCHES[name.partition(" ")[0]]
        layer = LAYERS[name]().to(dtype)
        x = lay_out(seeded((8, 3, 2, 2)).to(dtype), layout).requires_grad_()
        dy, inputs = torch.randn_like(x), [x, *layer.parameters()]
        with ghostnoise.backend("triton"), Operations() as seen:
            y = layer(x)
            first = len(seen.names)
            torch.autograd.grad(y, inputs, dy)
        assert first == forward, seen.names
        assert len(seen.names) - first == backward, seen.names
        assert [name for name in seen.names if not name.endswith("_kernel")] == ["randint"] * (forward == 4)

    @pytest.mark.slow
    def test_a_single_position_is_not_measured(self):
        x = seeded((8, 3)).float().requires_grad_()
        layer = ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=4)
        with ghostnoise.backend("triton"), Operations() as seen:
            layer(x)
        assert seen.names == ["randint", "drawn_kernel", "combine_kernel"]

    def test_the_count_sees_further_operations(self):
        with Operations() as seen:
            torch.ones(3).add(1).to(torch.float64)
        assert seen.names == ["ones", "add", "_to_copy"]


class TestDraws:
    """Tests in Triton's interpreter. That the kernel draws `philox_indices` is part of `test_a_layer_equals_aten`."""

    __test__ = INTERPRETED

    def test_layers_draw_anew_from_the_generator(self):
        layer, x = ghostnoise.GhostNoise(4), seeded((6, 2, 3)).float()
        with ghostnoise.backend("triton"):
            torch.manual_seed(0)
            first, second = layer(x), layer(x)
            torch.manual_seed(0)
            again = layer(x)
            generator = torch.Generator().manual_seed(0)
            explicit = functional.ghost_noise(x, 4, generator=generator)
        assert torch.equal(first, again)
        assert torch.equal(first, explicit)
        assert not torch.equal(first, second)

    def test_plans_that_no_kernel_covers(self):
        x = torch.randn(4, 2, 3)
        for contributors in (Mixture(0.5), ExclusiveMixture(2, 0.5)):
            assert Triton().fused_forward(x, None, None, Plan(Normalizer(contributors, 1e-5))) is None


def recompilations(layer, sizes, dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
    for size in sizes:
        run(seeded((size, 3, 2, 2)).float()).sum().backward()
    return counter.frame_count


class TestCompiling:
    """`torch.compile` runs the registered ops, and these the kernels: tests in Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("name", LAYERS)
    def test_training_and_evaluation(self, name, layout, monkeypatch):
        monkeypatch.setattr(op, "draws", lambda *given: True)
        x, found = lay_out(seeded((8, 3, 2, 2)).float(), layout), []
        for compiles in (True, False):
            torch._dynamo.reset()
            layer, given = LAYERS[name](), x.clone().requires_grad_()
            run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
            torch.manual_seed(0)
            with ghostnoise.backend("triton"), mock.patch.object(passes, "launch", wraps=passes.launch) as launches:
                y = run(given)
                y.square().sum().backward()
                layer.eval()
                found.append([y, given.grad, run(x), *layer.state_dict().values()])
            assert launches.call_count > 0
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()

    @pytest.mark.slow
    def test_autocast(self):
        torch._dynamo.reset()
        layer = ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4)
        network = torch.compile(
            torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), layer), fullgraph=True, backend="aot_eager"
        )
        with ghostnoise.backend("triton"), torch.autocast("cpu", torch.bfloat16):
            y = network(seeded((8, 2, 2, 2)).float())
        y.float().sum().backward()
        assert y.dtype == torch.bfloat16
        assert layer.weight.grad.dtype == torch.float32
        assert layer.num_batches_tracked == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [None, True])
    @pytest.mark.parametrize("name", [name for name in LAYERS if name != "GNI"])
    def test_no_more_compilations_than_batch_norm(self, name, dynamic):
        sizes = (8, 12, 16, 20)
        with ghostnoise.backend("triton"):
            ours = recompilations(LAYERS[name](), sizes, dynamic)
        assert ours <= recompilations(torch.nn.BatchNorm2d(3), sizes, dynamic)

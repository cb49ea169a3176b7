"""The registered ops: their schemas, fakes and gradients, and what compilers and dispatch modes see of them."""

import contextlib
import copy
from dataclasses import dataclass, replace

import pytest
import torch
from functorch.compile import make_boxed_func
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.engine.plan import Normalizer, Plan, Tables
from ghostnoise.engine.registered import NO_UPDATE
from ghostnoise.engine.running import Population, Running, Update
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Contributors, SampleItself, pool_all
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import op, registered, steps
from ghostnoise.engine.masks import Valid
from support import families, plans

OPS = torch.ops.ghostnoise
SHAPES = {"S = 1": (6, 2, 1), "S > 1": (6, 2, 3, 2)}
NAMES = (
    "bn",
    "ragged gbn",
    "xbn",
    "instance",
    "mixture",
    "drawn",
    "drawn shift",
    "drawn scale",
    "law fc",
    "law conv",
    "corrected",
)
every_plan = pytest.mark.parametrize("name", NAMES)
every_input = pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        *((shape, torch.float32, torch.contiguous_format) for shape in SHAPES.values()),
        *((shape, torch.bfloat16, torch.contiguous_format) for shape in SHAPES.values()),
        (SHAPES["S > 1"], torch.float32, torch.channels_last),
    ],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()  # its limit of recompilations counts those of earlier tests


def buffers(plan):
    running, population = plan.update or NO_UPDATE
    return *running, *population


def arguments(plan, shape, dtype, layout, requires_grad=True):
    x, weight, bias = (tensor.requires_grad_(requires_grad) for tensor in plans.inputs(dtype, shape, layout))
    return x, weight, bias, *plan.tensors(), *plan.encode(), *buffers(plan)


def check(name, given):
    """Check an op, and the composite op around it, which has the gradient."""
    opcheck(getattr(OPS, name).default, given)
    opcheck(getattr(OPS, f"{name}_autograd").default, given)


def backward_arguments(plan, forward, needs_x=True):
    x, weight, _, _, reference, valid, *_ = forward
    _, kept, noise, correction, *_ = OPS.normalize(*forward)
    return torch.randn_like(x), x, weight, kept, noise, correction, reference, valid, *plan.encode(), needs_x


@every_plan
@every_input
def test_normalize(name, shape, dtype, layout):
    plan = plans.PLANS[name]
    check("normalize", arguments(plan, shape, dtype, layout))
    x, _, _, *rest = arguments(plan, shape, dtype, layout)
    opcheck(OPS.normalize.default, (x, None, None, *rest), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["bn", "ragged gbn", "xbn", "instance", "drawn", "corrected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("present", [(True, True, True), (True, False, False), (False, False, True)])
def test_normalize_with_running_statistics(name, dtype, present):
    """The op returns updated copies, whatever buffers there are."""
    made = torch.randn(2).to(dtype), torch.rand(2).to(dtype), torch.tensor(3)
    running = Running(*(buffer if exists else None for buffer, exists in zip(made, present, strict=True)))
    plan = plans.PLANS[name]._replace(update=Update(running, Population(unbiased=True)))
    given = [buffer for buffer in running[:3] if buffer is not None]
    before = [buffer.clone() for buffer in given]
    check("normalize", arguments(plan, SHAPES["S > 1"], torch.float32, torch.contiguous_format))
    found = OPS.normalize(*arguments(plan, SHAPES["S > 1"], torch.float32, torch.contiguous_format))[-1]
    for old, buffer, updated in zip(before, given, found, strict=True):
        assert torch.equal(buffer, old)
        assert not torch.equal(updated, old)


@every_plan
@every_input
@pytest.mark.parametrize("needs_x", [True, False])
def test_normalize_backward(name, shape, dtype, layout, needs_x):
    plan = plans.PLANS[name]
    given = backward_arguments(plan, arguments(plan, shape, dtype, layout, requires_grad=False), needs_x)
    opcheck(OPS.normalize_backward.default, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["ragged gbn", "xbn", "instance", "mixture", "drawn", "law conv"])
def test_masked(name):
    counts = torch.tensor([6, 2, 0, 5, 3, 4], dtype=torch.float64).unsqueeze(1)
    plan = plans.PLANS[name]._replace(valid=Valid(counts, torch.zeros(6, 2, dtype=torch.float64)))
    given = (SHAPES["S > 1"], torch.float32, torch.contiguous_format)
    check("normalize", arguments(plan, *given))
    forward = arguments(plan, *given, requires_grad=False)
    x, _, _, drawn, _, valid, *_ = forward
    backward = backward_arguments(plan, forward)
    opcheck(OPS.normalize_backward.default, backward, test_utils=("test_schema", "test_faketensor"))
    if plan.noise is not None:
        plan = plan._replace(normalizer=Normalizer(SampleItself(), 0.0))
        check("inject", (x.requires_grad_(), drawn, valid, *plan.encode()))


def noise_plan(name, spatial):
    noise = plans.NOISY[name].noise
    if isinstance(noise, Tables):
        noise = plans.tables(noise.law.law, spatial, normalized=False)
    return Plan(Normalizer(SampleItself(), 0.0), noise)


@pytest.mark.parametrize("name", plans.NOISY)
@every_input
def test_inject(name, shape, dtype, layout):
    x, _, _ = plans.inputs(dtype, shape, layout)
    plan = noise_plan(name, x[0, 0].numel())
    check("inject", (x, plan.tensors()[0], plan.tensors()[2], *plan.encode()))
    _, scale, *_ = OPS.inject(x.detach(), plan.tensors()[0], plan.tensors()[2], *plan.encode())
    opcheck(OPS.inject_backward.default, (torch.randn_like(x), scale), test_utils=("test_schema", "test_faketensor"))


def graphs(run, *given):
    """Return the names of our operators in the graphs that `torch.compile` makes, forward and backward."""
    found = []

    def record(graph, inputs):
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.append([name for name in names if name.startswith("ghostnoise.")])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch.compile(run, fullgraph=True, backend=backend)(*given).sum().backward()
    return found


def test_graphs_have_the_ops_without_an_autograd_formula():
    """Torch would run the formula of an op in every call, although a graph is not differentiated again."""
    x, weight, bias = plans.inputs()
    gni = calls(6)["gni"], x, weight, bias
    assert graphs(*gni) == [["ghostnoise.normalize.default"], ["ghostnoise.normalize_backward.default"]]
    noise = calls(6)["noise"], x, weight, bias
    assert graphs(*noise) == [["ghostnoise.inject.default"], ["ghostnoise.inject_backward.default"]]
    plan = plans.PLANS["bn"]
    assert not OPS.normalize(*arguments(plan, SHAPES["S > 1"], torch.float32, torch.contiguous_format))[0].requires_grad


# Compiled and eager.


MASK = torch.arange(6).view(3, 2) < torch.tensor([6, 2, 0, 5, 3, 4])[:, None, None]


def calls(spatial):
    draws = {law: plans.tables(law, spatial).draws for law in ("fc", "conv")}
    indices, order = plans.indices(), plans.partition(2).indices
    norm = (None, None)
    return {
        "bn": lambda x, w, b: functional.batch_norm(x, *norm, w, b, True),
        "gbn": lambda x, w, b: functional.ghost_batch_norm(x, *norm, w, b, True, ghost_size=4),
        "xbn": lambda x, w, b: functional.exclusive_batch_norm(x, *norm, w, b, True, ghost_size=3),
        "en": lambda x, w, b: functional.eval_norm(x, *plans.RUNNING, w, b, ghost_size=4),
        "gni": lambda x, w, b: functional.ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=5, indices=indices
        ),
        "gni after xbn": lambda x, w, b: functional.ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=5, indices=indices, normalizer="exclusive"
        ),
        "gni by partition": lambda x, w, b: functional.ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=4, draw="partition", indices=order
        ),
        "agni fc": lambda x, w, b: functional.analytical_ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=5, draws=draws["fc"]
        ),
        "agni conv": lambda x, w, b: functional.analytical_ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=5, law="conv", draws=draws["conv"]
        ),
        "noise": lambda x, w, b: functional.ghost_noise(x, 5, indices=indices) * w.sum() + b.sum(),
        "noise by partition": lambda x, w, b: functional.ghost_noise(x, 2, draw="partition", indices=order) * w.sum()
        + b.sum(),
        "analytical noise": lambda x, w, b: functional.analytical_ghost_noise(x, 5, law="conv", draws=draws["conv"])
        * w.sum()
        + b.sum(),
        "masked gbn": lambda x, w, b: functional.ghost_batch_norm(x, *norm, w, b, True, ghost_size=4, mask=MASK),
        "masked gni after xbn": lambda x, w, b: functional.ghost_noise_batch_norm(
            x, *norm, w, b, True, ghost_size=5, indices=indices, normalizer="exclusive", mask=MASK
        ),
        "masked noise": lambda x, w, b: functional.analytical_ghost_noise(
            x, 5, law="conv", draws=draws["conv"], mask=MASK
        )
        * w.sum()
        + b.sum(),
    }  # fmt: skip


def results(run, inputs):
    y = run(*inputs)
    return y, *torch.autograd.grad(y.square().sum(), inputs)


@pytest.mark.parametrize("name", calls(6))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_equals_eager(name, layout):
    inputs, run = plans.inputs(shape=SHAPES["S > 1"], layout=layout), calls(6)[name]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(compiled, inputs), results(run, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("name", ["gni", "gni after xbn"])
def test_compiled_fully_connected(name):
    inputs, run = plans.inputs(torch.float32, (6, 2)), calls(1)[name]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(compiled, inputs), results(run, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inductor_equals_eager():
    inputs, run = plans.inputs(), calls(6)["gni"]
    for ours, theirs in zip(results(torch.compile(run, fullgraph=True), inputs), results(run, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_compiled_layers_update_running_statistics_as_eager_ones(family, momentum):
    """The buffers are equal to the last bit, also after a batch with values that are not finite, which is ignored."""
    torch.manual_seed(0)
    layer = families.build(family, 2, momentum=momentum)
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 2.0, torch.nan, 3.0):
        x = scale * torch.randn(10, 3, 4, 5)
        for run in (compiled, plain):
            torch.manual_seed(1)
            run(x)
    assert layer.num_batches_tracked > 0
    for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_momentum_can_be_an_argument_of_a_compiled_function():
    x, buffers = torch.randn(6, 3), [torch.zeros(3), torch.ones(3)]
    twins = [buffer.clone() for buffer in buffers]

    def run(x, mean, var, momentum):
        return functional.batch_norm(x, mean, var, training=True, momentum=momentum)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for momentum in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(x, *buffers, momentum), run(x, *twins, momentum))
        torch.testing.assert_close(buffers, twins)


# Dispatch modes.


class Seen(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def ours(self):
        return [name for name in self.names if name.startswith("ghostnoise::")]


@pytest.mark.parametrize("name", calls(6))
def test_a_dispatch_mode_sees_one_op_per_direction(name):
    inputs, kind = plans.inputs(), "inject" if "noise" in name else "normalize"
    with Seen() as seen:
        results(calls(6)[name], inputs)
    assert seen.ours() == [f"ghostnoise::{kind}", f"ghostnoise::{kind}_backward"]
    assert "aten::embedding_bag" not in seen.names


@pytest.mark.parametrize("name", calls(6))
def test_second_derivatives_in_a_dispatch_mode(name):
    """They equal those without the mode."""
    found = []
    for mode in (contextlib.nullcontext(), Seen()):
        inputs = plans.inputs()
        with mode:
            gradients = torch.autograd.grad(calls(6)[name](*inputs).cos().sum(), inputs, create_graph=True)
            found.append(torch.autograd.grad(sum(each.square().sum() for each in gradients), inputs))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fake_tensors(family, training, layout):
    """Shapes, strides, dtypes and gradients as of real tensors, without any memory."""
    with FakeTensorMode():
        layer = families.build(family, 2, dtype=torch.bfloat16).train(training)
        x = torch.randn(10, 3, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=layout).requires_grad_()
        y = layer(x)
        y.sum().backward()
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    assert y.stride() == x.stride() == x.grad.stride()
    assert layer.weight.grad.shape == (3,)
    assert layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("layer", [ghostnoise.GhostNoise(4), ghostnoise.AnalyticalGhostNoise(4, law="conv")])
def test_fake_tensors_of_noise(layer):
    with FakeTensorMode():
        x = torch.randn(10, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        y.sum().backward()
    assert y.stride() == x.stride() == x.grad.stride()


def test_the_backend_that_is_chosen_runs_inside_the_ops():
    """The ops look up the backend when they run, so a compiled function follows `ghostnoise.backend`."""
    x, weight, bias = plans.inputs()
    plan = plans.PLANS["bn"]
    with ghostnoise.backend("aten"):
        aten = OPS.normalize(x, weight, bias, *plan.tensors(), *plan.encode(), *buffers(plan))[0]
    auto = OPS.normalize(x, weight, bias, *plan.tensors(), *plan.encode(), *buffers(plan))[0]
    torch.testing.assert_close(auto, aten)


def outputs(given):
    """Return all tensors that the op returns."""
    y, *lists = OPS.normalize(*given)
    return [y, *(tensor for each in lists for tensor in each)]


def test_outputs_of_an_op_do_not_share_memory():
    for plan in plans.PLANS.values():
        for shape in SHAPES.values():
            given = arguments(plan, shape, torch.float32, torch.contiguous_format, False)
            for _ in range(2):  # the second call may be prepared
                found = outputs(given)
                addresses = [tensor.untyped_storage().data_ptr() for tensor in (*given[:3], *found) if tensor.numel()]
                assert len(set(addresses)) == len(addresses)


@every_plan
@every_input
def test_prepared_calls_of_an_op(name, shape, dtype, layout, monkeypatch):
    """A call with the metadata of an earlier one is prepared, and one that differs in anything is not."""
    registered._prepared.found.clear()
    running = Running(torch.randn(2), torch.rand(2), torch.tensor(3), 0.1)
    plan = plans.PLANS[name]._replace(update=Update(running, Population(unbiased=True)))
    x, weight, bias, *rest = arguments(plan, shape, dtype, layout, False)
    first, other = ((x.clone(), weight.float(), bias.float(), *rest) for _ in range(2))
    other[0].mul_(3).sub_(1)
    rows = torch.stack([other[0], other[0]], dim=-1)[..., 0]  # other strides
    double = other[0].double(), other[1].double(), other[2].double(), *other[3:]
    changed = ((rows, *other[1:]), double, (other[0], None, *other[2:]), (*other[:-3], 0.3, *other[-2:]))
    threads = torch.get_num_threads()
    expected = [outputs(each) for each in (other, *changed) if registered._prepared.found.clear() is None]
    prepared = []
    monkeypatch.setattr(Native, "prepare", counted(Native.prepare, prepared))
    registered._prepared.found.clear()
    outputs(first)
    covered = [each for each in prepared if each is not None]
    with monkeypatch.context() as patch:
        if covered:
            patch.setattr(steps, "forward", None)  # not called
        assert_identical(outputs(other), expected[0])
    assert bool(covered) == (name in ("bn", "ragged gbn", "xbn", "drawn", "drawn shift", "drawn scale"))
    for each, wanted in zip(changed, expected[1:], strict=True):
        assert_identical(outputs(each), wanted)
        assert_identical(outputs(each), wanted)
    try:
        torch.set_num_threads(threads + 1)
        assert_identical(outputs(other), expected[0])
    finally:
        torch.set_num_threads(threads)
    with ghostnoise.backend("aten"):
        monkeypatch.setattr(Native, "fused_forward", None)
        for one, wanted in zip(outputs(other), expected[0], strict=True):
            torch.testing.assert_close(one, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["law fc", "law conv"])
def test_draws_of_a_law_after_its_seed(name):
    """A plan is described by the same names if the draws are given as if a seed is."""
    plan, seed = plans.PLANS[name], torch.tensor([5])
    given = arguments(plan, SHAPES["S > 1"], torch.float32, torch.contiguous_format, False)
    registered._prepared.found.clear()
    expected = outputs(given)
    seeded = plan._replace(noise=replace(plan.noise, draws=seed, normalized=True))
    for _ in range(2):
        outputs(arguments(seeded, SHAPES["S > 1"], torch.float32, torch.contiguous_format, False))
    assert_identical(outputs(given), expected)


def counted(method, found):
    """Return a method that also adds its results to a list."""

    def run(*given):
        found.append(method(*given))
        return found[-1]

    return run


def assert_identical(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype and one.stride() == other.stride()
        for one, other in zip(ours, theirs, strict=True)
    )


@dataclass(frozen=True)
class Shrunk(Contributors):
    """A method of a user's own: only `pool`."""

    share: float

    def pool(self, moments, reference):
        whole = pool_all(*moments)
        return Moments(
            self.share * moments.mean + (1 - self.share) * whole.mean, moments.var + self.share * whole.var.square()
        )


def test_contributors_need_only_pool():
    """Their gradient is differentiated, in eager and compiled."""
    inputs, plan = plans.inputs(), Plan(Normalizer(Shrunk(0.25), 1e-5))

    def run(x, weight, bias):
        return op.normalize(x, plan, weight, bias)[0]

    assert torch.autograd.gradcheck(run, inputs)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(compiled, inputs), results(run, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

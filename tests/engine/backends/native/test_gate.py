"""Tensors whose values are not what is at their address: `native` serves them, or raises, as `aten` does."""

import pytest
import torch
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import Affine, NoiseTables, Saved
from ghostnoise.engine.backends.native import gate
from ghostnoise.engine.backends.native.backend import Native
from ghostnoise.engine.backends.native.gate import NotAdmitted, admits
from ghostnoise.engine.plan import Drawn, Normalizer, Plan
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import GhostBatch
from torch import nn

import ghostnoise
from ghostnoise import functional

NATIVE = Native()
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LAYERS = {
    "batch": lambda channels: ghostnoise.BatchNorm1d(channels),
    "ghost": lambda channels: ghostnoise.GhostBatchNorm1d(channels, ghost_size=4),
    "exclusive": lambda channels: ghostnoise.ExclusiveBatchNorm1d(channels, ghost_size=4),
    "noise": lambda channels: ghostnoise.GhostNoiseBatchNorm1d(channels, ghost_size=4),
}


def results(backend, name, x, dy=None, weight=None):
    """Return y and the gradients of x and of the parameters, on a backend."""
    torch.manual_seed(0)
    layer = LAYERS[name](x.shape[1])
    with torch.no_grad():
        layer.weight.copy_(torch.randn(x.shape[1]))
    if weight is not None:
        del layer.weight
        layer.weight = weight
    x = x.detach().requires_grad_()
    with ghostnoise.backend(backend):
        y = layer(x)
        inputs = [tensor for tensor in (x, layer.weight, layer.bias) if tensor.requires_grad]
        gradients = torch.autograd.grad(y, inputs, torch.ones_like(y) if dy is None else dy)
    return [y, *gradients, layer.running_mean, layer.running_var]


def assert_equal_to_aten(name, x, dy=None, weight=None):
    for ours, theirs in zip(results("auto", name, x, dy, weight), results("aten", name, x, dy, weight), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", LAYERS)
def test_negative_views(name):
    x = torch.fft.rfft(torch.randn(32, 30)).conj().imag
    assert x.is_neg()
    assert_equal_to_aten(name, x[:, 1:15])
    x, dy = torch.randn(9, 5, 3), torch.randn(9, 5, 3)
    assert_equal_to_aten(name, x, torch._neg_view(dy))
    assert_equal_to_aten(name, x, dy, torch._neg_view(torch.randn(5)).requires_grad_())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(8, 3, 1), (8, 1, 5), (8, 1, 1), (1, 3, 5)])
def test_expanded_inputs(name, shape):
    x, dy = torch.randn(shape).expand(8, 3, 5), torch.randn(shape).expand(8, 3, 5)
    x = x + torch.arange(8.0)[:, None, None] if shape[0] == 1 else x
    assert_equal_to_aten(name, x, dy)


@pytest.mark.parametrize("shape", [(1, 3, 5), (8, 3, 1)])
def test_expanded_inputs_of_batch_norm(shape):
    assert_equal_to_aten("batch", torch.randn(shape).expand(8, 3, 5), torch.randn(8, 3, 5))


@pytest.mark.parametrize("name", LAYERS)
def test_zero_tensors(name):
    x = torch.randn(9, 5, 3)
    assert_equal_to_aten(name, x, torch._efficientzerotensor((9, 5, 3)))


@pytest.mark.parametrize("name", LAYERS)
def test_weights_without_memory_raise(name):
    """They were silently taken as "no weight", where `nn.BatchNorm2d` raises."""
    freed = torch.randn(5, requires_grad=True)
    for weight in (torch.randn(5, device="meta", requires_grad=True), nn.Parameter(torch.randn(5, device="meta"))):
        with pytest.raises(RuntimeError, match="meta"):
            results("auto", name, torch.randn(9, 5, 3), weight=weight)
    assert admits(freed)
    freed.untyped_storage().resize_(0)
    assert not admits(freed)


def test_a_distributed_weight_raises(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    weight = nn.Parameter(distribute_tensor(torch.randn(5), init_device_mesh("cpu", (1,))))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"mixed torch\.Tensor and DTensor"):
        functional.batch_norm(torch.randn(9, 5, 3), None, None, weight, training=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spatial", [1, 3])
def test_hooks_that_change_the_dtype_of_saved_tables(name, dtype, spatial):
    """As accurate as `aten` with the same hooks, which round what is saved to float16."""

    def gradients(backend):
        torch.manual_seed(0)
        layer = LAYERS[name](5).to(dtype)
        x = torch.randn(9, 5, spatial, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with (
            ghostnoise.backend(backend),
            torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()),
        ):
            y = layer(x)
        dy = torch.randn(y.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)

    for ours, theirs in zip(gradients("auto"), gradients("aten"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_default_device_does_not_change_results():
    x = torch.randn(9, 5, 3)
    expected = functional.batch_norm(x, None, None, training=True)
    with torch.device("meta"):
        torch.testing.assert_close(functional.batch_norm(x, None, None, training=True), expected)


def test_what_is_admitted():
    x = torch.randn(4, 3)
    with torch.inference_mode():
        inferred = torch.randn(3)
    for tensor in (x, nn.Parameter(x), nn.Buffer(x), inferred, x.T, x[::2], x.expand(2, 4, 3), torch.empty(0)):
        assert admits(tensor)


def test_what_is_not_admitted():
    x, wrapped = torch.randn(4, 3), []
    torch.vmap(lambda row: wrapped.append(row) or row)(x)
    torch.func.grad(lambda whole: (wrapped.append(whole), whole.sum())[1])(x)
    with torch._subclasses.FakeTensorMode():
        wrapped.append(torch.randn(3))
    subclass = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    freed = torch.randn(3)
    freed.untyped_storage().resize_(0)
    others = (x.to("meta"), x.to_sparse(), x.to_mkldnn(), torch._to_functional_tensor(x), torch._neg_view(x))
    for tensor in (*wrapped, subclass, freed, *others, torch._efficientzerotensor((4, 3))):
        assert not admits(tensor)


def test_tables_are_copied_or_refused():
    given = torch.randn(4, 3)
    assert gate.table(given, torch.float32, (4, 3)) is given
    for other in (given.double(), given.T.contiguous().T, torch._neg_view(-given)):
        made = gate.table(other, torch.float32, (4, 3))
        assert made.is_contiguous()
        assert not made.is_neg()
        torch.testing.assert_close(made, given)
    for refused in (given[:3], given.to("meta"), given.flatten()):
        with pytest.raises(NotAdmitted):
            gate.table(refused, torch.float32, (4, 3))


def test_buffers_are_updated_in_place_or_not_at_all():
    mean, var, count = torch.zeros(4), torch.zeros(4), torch.zeros((), dtype=torch.int64)
    for given in ((mean, var, count), (mean, None, None), (None, var, count), (None, None, count)):
        assert gate.updatable(*given, 4) is torch.float32
    assert gate.updatable(mean.double(), var.double(), count, 4) is torch.float64
    with torch.inference_mode():
        inferred = torch.zeros(4)
    others = (torch.zeros(8)[::2], mean.half(), mean.double(), torch.zeros(3), inferred, mean.to("meta"))
    for other in others:  # only a copy of these could be admitted, or the dtypes of both statistics differ
        assert gate.updatable(other, var, count, 4) is None
        assert gate.updatable(mean, other, count, 4) is None
    assert gate.updatable(mean, var, count.float(), 4) is None


def test_tables_with_fewer_rows_than_the_batch_are_not_read_out_of_bounds():
    x, dy, plan = torch.randn(64, 5, 3), torch.randn(64, 5, 3), Plan(Normalizer(GhostBatch(), 1e-5))
    pooled = NATIVE.fused_forward(x, None, None, plan).pooled
    short = NoiseTables(torch.randn(2, 5), torch.randn(2, 5))
    assert NATIVE.fused_backward(dy, x, None, plan, Saved(pooled, short), True) is None
    few = Moments(pooled.mean[:0], pooled.var[:0])
    assert NATIVE.fused_backward(dy, x, None, plan, Saved(few, NoiseTables(None, None)), True) is None
    indices = torch.zeros(3, 4, dtype=torch.int64)
    assert NATIVE.fused_forward(x, None, None, plan._replace(noise=Drawn(1e-3, "both", indices))) is None
    coefficients = NATIVE.coefficients(plan.normalizer, pooled, None, None, torch.float32)
    sums = NATIVE.gradient_sums(dy, x, coefficients.center, 64)
    given = (plan.normalizer, coefficients, pooled.var, None, *sums)
    with pytest.raises(RuntimeError, match="must match the size"):
        NATIVE.statistics_gradient(*given, short, 64)
    many = Affine(*(torch.randn(70, 5) for _ in range(3)))
    with pytest.raises(RuntimeError):
        NATIVE.transform(x, many)


def test_indices_outside_of_the_batch_raise():
    moments = NATIVE.moments(torch.randn(6, 5, 3))
    for bad in (-1, 6):
        indices = torch.zeros(6, 4, dtype=torch.int64)
        indices[3, 2] = bad
        with pytest.raises(IndexError, match=r"must lie in \[0, B\)"):
            NATIVE.pool_drawn(moments, moments.mean[:1], indices, None, torch.float32)
        plan = Plan(Normalizer(GhostBatch(), 1e-5), Drawn(1e-3, "both", indices))
        with pytest.raises(IndexError, match=r"must lie in \[0, B\)"):
            NATIVE.fused_forward(torch.randn(6, 5, 3), None, None, plan)


def test_coefficients_that_are_not_consecutive():
    """As `aten` makes them, for a weight that the gate does not admit."""
    x, normalizer = torch.randn(8, 5, 3), Normalizer(GhostBatch(), 1e-5)
    pooled = NATIVE.pool(normalizer.contributors, NATIVE.moments(x))
    total, moment = torch.randn(8, 5), torch.randn(8, 5)
    theirs = ATEN.coefficients(normalizer, pooled, None, None, torch.float32)
    given = (pooled.var, None, total, moment, NoiseTables(None, None), 8)
    ours, wanted = (backend.statistics_gradient(normalizer, theirs, *given) for backend in (NATIVE, ATEN))
    for one, other in zip((*ours[:2], *ours[2]), (*wanted[:2], *wanted[2]), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_running_buffers_that_cannot_be_updated_in_place():
    stats = Moments(torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64))
    for make in (lambda: torch.zeros(8)[::2], lambda: torch.zeros(4, dtype=torch.float16)):
        ours, theirs = make(), make()
        NATIVE.update_running(ours, None, None, 0.5, stats)
        ATEN.update_running(theirs, None, None, 0.5, stats)
        assert torch.equal(ours, theirs)
        assert ours[0] == 0.5
    with torch.inference_mode():
        inferred = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        NATIVE.update_running(inferred, None, None, 0.5, stats)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sample", [0, 2, 3, 8])
@pytest.mark.parametrize("backend", ["native", "aten"])
def test_a_non_finite_sample_of_exclusive_batch_norm(bad, sample, backend):
    """The other samples of its ghost batch become NaN; its own statistics stay those of finite samples."""
    x = torch.randn(9, 5, 3, generator=torch.Generator().manual_seed(0))
    x[sample, 1, 2] = bad
    with ghostnoise.backend(backend):
        y = functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=4)
        clean = x.clone()
        clean[sample, 1, 2] = 0
        expected = functional.exclusive_batch_norm(clean, None, None, training=True, ghost_size=4)
    ghost = range(4) if sample < 4 else range(4, 9)
    torch.testing.assert_close(y[sample, 1, :2], expected[sample, 1, :2])
    assert not y[sample, 1, 2].isfinite()
    for other in range(9):
        if other in ghost and other != sample:
            assert y[other, 1].isnan().all()
        elif other != sample:
            torch.testing.assert_close(y[other], expected[other])
    kept = [0, 2, 3, 4]
    torch.testing.assert_close(y[:, kept], expected[:, kept])


def test_tensors_like_admitted_ones_are_found_again():
    admissions, x, absent = gate.Admissions(), torch.randn(4, 3), torch.empty(0)
    assert admissions.get("key", (x, absent)) is None
    admissions.add("key", (x, absent), "value")
    other = torch.randn(4, 3)
    assert admissions.get("key", (other, absent)) == ("value", [other.data_ptr(), 0])
    assert admissions.get("another key", (other, absent)) is None
    with torch.inference_mode():
        inferred = torch.randn(4, 3)
    freed = torch.randn(4, 3)
    freed.untyped_storage().resize_(0)
    for unlike in (
        other.double(),
        other.T.contiguous().T,
        other[:3],
        torch._neg_view(other),
        torch.nn.Parameter(other),
        other.to("meta"),
        torch._efficientzerotensor(4, 3),
        inferred,
        freed,
    ):
        assert admissions.get("key", (unlike, absent)) is None
    assert admissions.get("key", (other, torch.empty(1))) is None


def test_a_tensor_that_is_given_twice_is_not_remembered():
    admissions, x = gate.Admissions(), torch.randn(4, 3)
    admissions.add("key", (x, x), "value")
    assert admissions.found.get("key") == ()


def test_a_layer_whose_tensors_change_after_a_call():
    """What was admitted before is not what is there now: another dtype, other strides, other buffers."""
    x = torch.randn(8, 4, 3)
    layer, reference = ghostnoise.BatchNorm1d(4), torch.nn.BatchNorm1d(4)

    def wide(module):
        module.weight.data, module.running_mean = module.weight.data.double(), module.running_mean.double()
        module.running_var = module.running_var.double()

    def strided(module):
        module.bias.data, module.running_var = torch.zeros(8)[::2], torch.ones(8)[::2]

    for change in (lambda module: None, strided, wide):
        change(layer)
        for _ in range(2):
            given = x.clone().requires_grad_()
            y = layer(given)
            y.sum().backward()
        torch.testing.assert_close(
            y, torch.nn.functional.batch_norm(x, None, None, training=True), rtol=1e-5, atol=1e-5
        )
        assert layer.weight.grad.dtype == layer.weight.dtype
        layer.weight.grad = layer.bias.grad = None
    for _ in range(6):
        reference(x)
    torch.testing.assert_close(layer.running_mean.float(), reference.running_mean)
    assert layer.num_batches_tracked == 6

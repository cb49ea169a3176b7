"""torch.compile: one graph for training and one for eval, equal to eager."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ghostnoise
from support.converted import assert_same, converted, step, twins
from support.models import images, tokens, transformer


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()  # its limit of recompilations counts those of earlier tests


@pytest.mark.parametrize("method", ["bn", "gbn", "xbn", "gni", "agni-conv"])
def test_a_training_step_and_eval_are_graphs(method):
    model, plain = twins(method, torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = images().double()
    for seed in range(2):
        assert_same(step(compiled, model, x, seed), step(plain, plain, x, seed), rtol=1e-9, atol=1e-9)
    model.eval(), plain.eval()
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-12, atol=1e-12)


def test_inserted_noise_is_in_the_graph():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    y = compiled(tokens())
    torch.manual_seed(0)
    torch.testing.assert_close(y, model(tokens()))
    assert torch.equal(compiled.eval()(tokens()), ghostnoise.revert(model)(tokens()))


def test_checkpoints_inside_of_a_graph():
    model, plain = twins("gni", torch.float64)
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    x = images().double()
    assert_same(step(run, model, x), step(plain, plain, x), rtol=1e-9, atol=1e-9)


def test_inductor():
    model, plain = twins("gni", torch.float64)
    x = images().double()
    ours = step(torch.compile(model, fullgraph=True), model, x)
    assert_same(ours, step(plain, plain, x), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Inductor keeps contiguous convolutions")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")  # the override is meant
def test_layers_take_the_layout_of_convolutions():
    """Inductor runs convolutions on CPUs in channels_last, and copies nothing between them and our layers."""
    layouts = []

    def normalize(x, weight, bias, *rest):
        layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
        var = rstd.pow(-2) - 1e-5
        return y, torch.stack([mean, var])[:, None], x.new_empty(0, *x.shape[:2])

    def backward(dy, x, weight, stats, *rest):
        layouts.extend(each.is_contiguous(memory_format=torch.channels_last) for each in (dy, x))
        mean, var = stats[:, 0]
        rstd = (var + 1e-5).rsqrt()
        return torch.ops.aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3)

    torch.manual_seed(0)
    norm = ghostnoise.BatchNorm2d(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3)).double()
    plain, x = copy.deepcopy(model), images().double()
    expected = step(plain, plain, x)
    other = torch.library.Library("ghostnoise", "IMPL")
    try:
        other.impl("normalize", normalize, "CPU", allow_override=True)
        other.impl("normalize_backward", backward, "CPU", allow_override=True)
        assert_same(step(torch.compile(model, fullgraph=True), model, x), expected, rtol=1e-9, atol=1e-9)
    finally:
        other._destroy()
    assert layouts == [True] * 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_no_more_compilations_than_batch_norm(dynamic):
    def compilations(layer):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
        for size in (32, 48, 64, 33, 50):
            run(torch.randn(size, 3, 2, 2, requires_grad=True)).sum().backward()
        return counter.frame_count

    most = compilations(nn.BatchNorm2d(3))
    assert compilations(ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=8)) <= most
    assert compilations(ghostnoise.ExclusiveBatchNorm2d(3, ghost_size=8)) <= most


def drawing_by_itself(method):
    return converted(method, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["gni", "agni"])
def test_an_explicit_generator_is_refused_in_a_whole_graph(method):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"explicit generator under torch\.compile: .* leave gen"):
        torch.compile(drawing_by_itself(method)[1], backend="eager", fullgraph=True)(torch.randn(8, 4, 3, 3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # after a break
def test_an_explicit_generator_breaks_the_graph():
    y = torch.compile(drawing_by_itself("gni"), backend="eager")(images())
    torch.testing.assert_close(y, drawing_by_itself("gni")(images()), rtol=1e-4, atol=1e-5)

"""torch.compile: one graph for training and one for eval, equal to eager."""

import pytest
import torch
from torch import nn

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


def test_inductor():
    model, plain = twins("gni", torch.float64)
    x = images().double()
    with torch._inductor.config.patch(fallback_random=True):  # eager's draws
        ours = step(torch.compile(model, fullgraph=True), model, x)
    assert_same(ours, step(plain, plain, x), rtol=1e-9, atol=1e-9)


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

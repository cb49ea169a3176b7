"""Converted networks in fx, torch.export and ONNX, and folded into the layer before: eval is that of plain networks."""

import copy
import io

import onnxruntime
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import ghostnoise
from support import networks
from support.converted import METHODS, PLAIN_AT_INFERENCE, converted
from support.families import UNTRACKED, build, example
from support.models import images, tokens, trained, transformer


def seeded(run, x):
    torch.manual_seed(0)
    return run(x)


# Folding.


@pytest.mark.parametrize("method", PLAIN_AT_INFERENCE)
def test_networks_and_layers_fold(method):
    model = converted(method).eval()
    expected = model(images())
    folded = fuse(ghostnoise.revert(copy.deepcopy(model)))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in folded.modules())
    torch.testing.assert_close(folded(images()), expected)
    torch.testing.assert_close(fuse(copy.deepcopy(model))(images()), expected)  # converted, they stay, and equal
    conv, linear = fuse_conv_bn_eval(model[0], model[1]), fuse_linear_bn_eval(*model[4])
    torch.testing.assert_close(conv(images()), model[1](model[0](images())), rtol=1e-5, atol=1e-5)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x), model[4](x), rtol=1e-5, atol=1e-5)


def test_eval_norm_is_left_alone_until_it_is_plain():
    """It is not an instance of `nn.BatchNorm2d`, so code that folds batch norms does not take it for one."""
    model = converted("en").eval()
    torch.testing.assert_close(fuse(copy.deepcopy(model))(images()), model(images()))
    with pytest.warns(UserWarning, match="their eval output changes"):
        ghostnoise.revert(model)
    torch.testing.assert_close(fuse(copy.deepcopy(model))(images()), model(images()))


# torch.fx: our layers are single nodes of a graph, in training and in eval.


@pytest.mark.parametrize("method", METHODS)
def test_batch_norms_are_nodes(method):
    model = converted(method)
    traced = fx.symbolic_trace(model)
    nodes = [node.target for node in traced.graph.nodes]
    assert nodes == [node.target for node in fx.symbolic_trace(trained()).graph.nodes]
    assert traced.get_submodule("1") is model[1]
    for training in (True, False):  # a traced network has both
        traced.train(training), model.train(training)
        assert torch.equal(seeded(traced, images()), seeded(model, images()))


class Block(nn.Module):
    """A layer that tracers trace into."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(x)


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("host", [Block, nn.LayerNorm])
@pytest.mark.parametrize("training", [True, False])
def test_inserted_noise_is_a_node_where_its_host_is_none(place, host, training):
    model = nn.Sequential(Block(), nn.Linear(6, 2))
    ghostnoise.convert(model, "gni", 4, channel_dim=-1, **{place: host}).train(training)
    traced = fx.symbolic_trace(model)
    assert ("0.ghost_noise" in [node.target for node in traced.graph.nodes]) == (host is Block)
    for mode in (True, False):  # whichever it was traced in
        traced.train(mode), model.train(mode)
        assert torch.equal(seeded(traced, tokens()), seeded(model, tokens()))


def test_hooks_drop_and_act_run_once():
    hooked = converted("gni")
    hooked[1].register_forward_hook(lambda module, args, y: y * 2)
    torch.manual_seed(0)
    acting = ghostnoise.convert(nn.Sequential(networks.layer("BatchNormAct2d")(3, act_layer=nn.GELU)), "gni", 4)
    for model in (hooked, acting):
        assert torch.equal(seeded(fx.symbolic_trace(model), images()), seeded(model, images()))


@pytest.mark.parametrize(
    "layer",
    [
        ghostnoise.GhostNoise(4), ghostnoise.AnalyticalGhostNoise(4), ghostnoise.NoisyDropout(0.5, per="channel"),
        ghostnoise.AdditiveGaussianNoise(0.1), ghostnoise.WSConv1d(3, 4, 3), ghostnoise.WSConv2d(3, 4, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_other_layers_are_nodes(layer):
    traced = fx.symbolic_trace(nn.Sequential(layer))
    x = images().flatten(2) if isinstance(layer, nn.Conv1d) else images()
    assert torch.equal(seeded(traced, x), seeded(layer, x))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


@pytest.mark.parametrize("family", [family for family in UNTRACKED if family != "sgbn"])  # of the general level
def test_tracers_of_operators_record_one_op(family):
    """Backends may write memory that no operator of torch wrote: a trace has the registered op instead."""
    x = example(2) + 1
    layer, noise = build(family, 2, track_running_stats=False), ghostnoise.GhostNoise(4)
    traced = make_fx(layer)(example(2))
    assert [str(node.target) for node in traced.graph.nodes].count("ghostnoise.normalize.default") == 1
    torch.testing.assert_close(seeded(traced, x), seeded(layer, x))
    torch.testing.assert_close(seeded(make_fx(noise)(x), example(2)), seeded(noise, example(2)))


# torch.export and ONNX.


def targets(model, x):
    return [str(node.target) for node in torch.export.export(model, (x,)).graph.nodes]


@pytest.mark.parametrize("method", PLAIN_AT_INFERENCE)
def test_eval_exports_as_plain_batch_norm(method):
    model, x = converted(method).eval(), images()
    assert targets(model, x) == targets(trained().eval(), x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_inserted_noise_is_not_exported():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm).eval()
    assert targets(model, tokens()) == targets(transformer().eval(), tokens())


@pytest.mark.parametrize("method", ["gni", "en"])
@pytest.mark.parametrize("strict", [True, False])
def test_exports_run_with_any_batch_size(method, strict):
    torch._dynamo.reset()
    model = converted(method).eval()
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (images(),), dynamic_shapes=sizes, strict=strict).module()
    for batch_size in (1, 5, 8):
        torch.testing.assert_close(exported(images(batch_size)), model(images(batch_size)))


@pytest.mark.parametrize("method", ["gni", "en"])
def test_onnx(method):
    model = converted(method).eval()
    program, file = torch.onnx.export(model, (images(),), dynamo=True, verbose=False), io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(images()))
    kinds = {node.op_type for node in program.model_proto.graph.node}
    assert not any("Random" in kind or "Gather" in kind for kind in kinds)
    if method == "gni":  # folded into the convolution, as plain batch norm is
        assert kinds == {"Conv", "Relu", "ReduceMean", "Reshape", "Gemm"}

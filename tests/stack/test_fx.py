"""torch.fx: our layers are single nodes of a graph, in training and in eval."""

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ghostnoise
from support import networks
from support.converted import METHODS, converted
from support.families import UNTRACKED, build, example
from support.models import images, tokens, trained, transformer


def seeded(run, x):
    torch.manual_seed(0)
    return run(x)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norms_are_nodes(method):
    model = converted(method)
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes] == [
        node.target for node in fx.symbolic_trace(trained()).graph.nodes
    ]
    assert traced.get_submodule("1") is model[1]
    for training in (True, False):  # a traced network has both
        traced.train(training), model.train(training)
        assert torch.equal(seeded(traced, images()), seeded(model, images()))


def test_inserted_noise_is_in_its_host():
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    traced = fx.symbolic_trace(model)
    assert torch.equal(seeded(traced, tokens()), seeded(model, tokens()))
    assert torch.equal(traced.eval()(tokens()), model.eval()(tokens()))


class Block(nn.Module):
    """A layer that tracers trace into."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(x)


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("training", [True, False])
def test_inserted_noise_is_a_node_where_its_host_is_none(place, training):
    model = nn.Sequential(Block(), nn.Linear(6, 2))
    ghostnoise.convert(model, "gni", 4, channel_dim=-1, **{place: Block}).train(training)
    traced = fx.symbolic_trace(model)
    assert "0.ghost_noise" in [node.target for node in traced.graph.nodes]
    for mode in (True, False):  # whichever it was traced in
        traced.train(mode), model.train(mode)
        assert torch.equal(seeded(traced, tokens()), seeded(model, tokens()))


def test_hooks_run_once():
    model = converted("gni")
    model[1].register_forward_hook(lambda module, args, y: y * 2)
    assert torch.equal(seeded(fx.symbolic_trace(model), images()), seeded(model, images()))


def test_drop_and_act_run_once():
    torch.manual_seed(0)
    model = ghostnoise.convert(nn.Sequential(networks.layer("BatchNormAct2d")(3, act_layer=nn.GELU)), "gni", 4)
    assert torch.equal(seeded(fx.symbolic_trace(model), images()), seeded(model, images()))


@pytest.mark.parametrize(
    "layer",
    [
        ghostnoise.GhostNoise(4),
        ghostnoise.AnalyticalGhostNoise(4),
        ghostnoise.NoisyDropout(0.5, per="channel"),
        ghostnoise.AdditiveGaussianNoise(0.1),
        ghostnoise.WSConv1d(3, 4, 3),
        ghostnoise.WSConv2d(3, 4, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_nodes(layer):
    traced = fx.symbolic_trace(nn.Sequential(layer))
    x = images().flatten(2) if isinstance(layer, nn.Conv1d) else images()
    assert torch.equal(seeded(traced, x), seeded(layer, x))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


@pytest.mark.parametrize("family", UNTRACKED)
def test_tracers_of_operators_record_one_op(family):
    """Backends may write memory that no operator of torch wrote: a trace has the registered op instead."""
    layer = build(family, 2, track_running_stats=False)
    traced = make_fx(layer)(example(2))
    assert [str(node.target) for node in traced.graph.nodes].count("ghostnoise.normalize.default") == 1
    x = example(2) + 1
    torch.testing.assert_close(seeded(traced, x), seeded(layer, x))
    noise = ghostnoise.GhostNoise(4)
    torch.testing.assert_close(seeded(make_fx(noise)(x), example(2)), seeded(noise, example(2)))

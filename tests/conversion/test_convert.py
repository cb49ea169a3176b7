"""Conversion in place, and back."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import ghostnoise
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from support import networks
from support.models import SIZES, convolutional, images, state, tokens, trained, transformer

every_method = pytest.mark.parametrize("method", list(SIZES))


def quiet_revert(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*EvalNorm layers become plain batch norm")
        return ghostnoise.revert(model)


@every_method
def test_every_batch_norm_is_converted(method):
    model = convolutional()
    assert ghostnoise.convert(model, method, **SIZES[method]) is model
    assert isinstance(model[1], NormLayer)
    assert model[1].ndims == (4,)
    assert isinstance(model[4][1], NormLayer)
    assert model[4][1].ndims == (2, 3)
    folds = not registry.names()[method][0].changes_inference  # only these are instances of nn.BatchNorm*d
    assert isinstance(model[1], nn.BatchNorm2d) == isinstance(model[4][1], nn.BatchNorm1d) == folds
    assert ghostnoise.summary(model)[0].method == method
    model(images()).sum().backward()
    assert model[1].weight.grad is not None


def test_shorthands_set_options():
    for method, layer, fixed in (
        ("gni", ghostnoise.GhostNoiseBatchNorm2d, {"components": "both"}),
        ("gni-shift", ghostnoise.GhostNoiseBatchNorm2d, {"components": "shift"}),
        ("gni-scale", ghostnoise.GhostNoiseBatchNorm2d, {"components": "scale"}),
        ("agni", ghostnoise.AnalyticalGhostNoiseBatchNorm2d, {"law": "fc"}),
        ("agni-conv", ghostnoise.AnalyticalGhostNoiseBatchNorm2d, {"law": "conv"}),
    ):
        converted = ghostnoise.convert(convolutional(), method, ghost_size=7)[1]
        assert type(converted) is layer
        assert {name: getattr(converted, name) for name in fixed} == fixed
        assert converted.ghost_size == 7


def test_options_reach_the_layers():
    generator = torch.Generator().manual_seed(0)
    layer = ghostnoise.convert(convolutional(), "agni", 4, noise_eps=1e-2, dof="exact", generator=generator)[1]
    assert (layer.noise_eps, layer.dof, layer.generator) == (1e-2, "exact", generator)
    assert ghostnoise.convert(convolutional(), "gbn", 4, running_var_from="batch")[1].running_var_from == "batch"
    assert ghostnoise.convert(convolutional(), "en", 4, alpha=0.5)[1].alpha == 0.5
    layer = ghostnoise.convert(convolutional(), "gni", 4, draw="partition", normalizer="exclusive")[1]
    assert (layer.draw, layer.normalizer) == ("partition", "exclusive")
    model = ghostnoise.convert(convolutional(), "gni", 4, draw="partition", after=nn.ReLU)
    assert {each.draw for each in model.modules() if isinstance(each, ghostnoise.GhostNoise)} == {"partition"}
    layer = ghostnoise.convert(convolutional(), "xbn", min_std=0.1, clamp_output=3.0, self_weight=0.05)[1]
    assert (layer.ghost_size, layer.min_std, layer.clamp_output, layer.self_weight) == (None, 0.1, 3.0, 0.05)


@every_method
def test_a_converted_layer_has_all_attributes_of_a_constructed_one(method):
    """Conversion sets every attribute that the constructor sets."""
    converted = ghostnoise.convert(nn.Sequential(nn.BatchNorm2d(3)), method, **SIZES[method])[0]
    built = type(converted)(3, **SIZES[method])
    extra = {"_ghostnoise_origin", "_ghostnoise_path"}
    assert vars(converted).keys() - extra == vars(built).keys() - extra
    own = registry.names()[method][1]
    assert {name: getattr(converted, name) for name in built.options if name not in own} == {
        name: getattr(built, name) for name in built.options if name not in own
    }


@every_method
def test_an_optimizer_created_before_updates_the_weights(method):
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ghostnoise.convert(model, method, **SIZES[method])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (model(images()) * torch.randn(8, 5)).square().sum().backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved[:4])


def test_everything_that_refers_to_a_layer_stays_valid():
    model = convolutional().double()
    norm, calls = model[1], []
    norm.register_forward_hook(lambda *args: calls.append(1))
    norm.eval()
    norm.weight.requires_grad_(False)
    tensors = {**norm._parameters, **norm._buffers}
    ghostnoise.convert(model, "gni", 4)
    assert model[1] is norm
    assert not norm.training
    assert not norm.weight.requires_grad
    assert {name: getattr(norm, name) for name in tensors} == tensors
    model(images().double())
    assert calls == [1]


@every_method
def test_state_dict_loads_in_both_directions(method):
    plain, model = trained(), ghostnoise.convert(convolutional(), method, **SIZES[method])
    model.load_state_dict(plain.state_dict(), strict=True)
    model(images())
    plain.load_state_dict(model.state_dict(), strict=True)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert "ghost" not in "".join(model.state_dict())


@every_method
def test_eval_output_changes_for_eval_norm_only(method):
    model = trained().eval()
    expected = model(images())
    output = ghostnoise.convert(model, method, **SIZES[method])(images())
    assert torch.equal(output, expected) != registry.names()[method][0].changes_inference


@every_method
def test_revert_restores_the_model(method):
    model = trained()
    before, weights = state(model), copy.deepcopy(model.state_dict())
    ghostnoise.convert(model, method, **SIZES[method])
    assert quiet_revert(model) is model
    assert state(model) == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("ghost" in name for module in model.modules() for name in vars(module))


def test_revert_keeps_what_was_learned():
    model = ghostnoise.convert(convolutional(), "gni", 4)
    model(images())
    learned = copy.deepcopy(model.state_dict())
    output = model.eval()(images())
    assert torch.equal(ghostnoise.revert(model)(images()), output)
    assert all(torch.equal(learned[name], tensor) for name, tensor in model.state_dict().items())


def test_revert_of_a_plain_model_changes_nothing():
    model = convolutional()
    before = state(model)
    assert ghostnoise.revert(ghostnoise.revert(model)) is model
    assert state(model) == before


def test_revert_of_layers_built_by_hand():
    model = nn.Sequential(ghostnoise.GhostNoiseBatchNorm3d(3, ghost_size=4), ghostnoise.GhostNoise(4))
    ghostnoise.revert(model)
    assert type(model[0]) is nn.BatchNorm3d
    assert vars(model[0]).keys() == vars(nn.BatchNorm3d(3)).keys()
    assert type(model[1]) is ghostnoise.GhostNoise
    ghostnoise.revert(ghostnoise.convert(nn.Sequential(ghostnoise.BatchNorm1d(3)), "gbn", 4))


def test_revert_warns_that_eval_norm_changes():
    model = ghostnoise.convert(convolutional(), "en", 4)
    with pytest.warns(UserWarning, match="2 EvalNorm layers become plain batch norm: their eval output changes"):
        ghostnoise.revert(model)


def test_converting_again_changes_the_method():
    model = convolutional()
    before = state(model)
    for method in SIZES:
        ghostnoise.convert(model, method, **SIZES[method])
    ghostnoise.convert(model, "gbn", 16)
    assert type(model[1]) is ghostnoise.GhostBatchNorm2d
    assert not vars(model[1]).keys() & {"noise_eps", "components", "generator", "law", "dof", "alpha", "min_std"}
    assert len(model._forward_pre_hooks) == 1
    ghostnoise.convert(model, "bn")
    assert "ghost_size" not in vars(model[1])
    ghostnoise.revert(model)
    assert state(model) == before


def test_the_model_itself_may_be_a_batch_norm():
    norm = nn.BatchNorm2d(3)
    assert type(ghostnoise.convert(norm, "gbn", 4)) is ghostnoise.GhostBatchNorm2d
    assert type(ghostnoise.revert(norm)) is nn.BatchNorm2d


def test_shared_layers_stay_shared():
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    ghostnoise.convert(model, "gni", 4)
    assert model[0] is norm
    assert model[2] is norm
    assert type(norm) is ghostnoise.GhostNoiseBatchNorm2d
    assert ghostnoise.summary(model)[0].notes == "also 2"


@every_method
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_work(method, how):
    model = ghostnoise.convert(trained(), method, **SIZES[method])
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    outputs = []
    for each in (model, twin):
        torch.manual_seed(0)
        outputs.append(each(images()))
    assert torch.equal(*outputs)
    quiet_revert(twin)
    assert type(twin[1]) is nn.BatchNorm2d
    assert isinstance(model[1], NormLayer)


@pytest.mark.parametrize("method", [name for name, (spec, _) in registry.names().items() if not spec.changes_inference])
def test_folding_into_a_convolution(method):
    model = ghostnoise.convert(trained(), method, **SIZES[method]).eval()
    folded = fuse_conv_bn_eval(model[0], model[1])
    torch.testing.assert_close(folded(images()), model[1](model[0](images())), rtol=1e-4, atol=1e-5)


@every_method
def test_compiles_as_one_graph(method):
    torch._dynamo.reset()
    model = ghostnoise.convert(trained(), method, **SIZES[method])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    outputs = []
    for each in (model, compiled):
        torch.manual_seed(0)
        outputs.append(each(images()))
    torch.testing.assert_close(*outputs)


def test_inserted_noise_compiles_as_one_graph():
    torch._dynamo.reset()
    for place in ({"after": nn.LayerNorm}, {"before": nn.GELU, "channel_dim": -1}):
        model = ghostnoise.convert(transformer(), "gni", 4, **place)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        outputs = []
        for each in (model, compiled):
            torch.manual_seed(0)
            outputs.append(each(tokens()))
        torch.testing.assert_close(*outputs)


# A reverted model needs this library no more.

PLAIN = {
    "bn": nn.BatchNorm2d, "lazy": lambda channels: nn.LazyBatchNorm2d(),
    "timm": lambda channels: networks.layer("BatchNormAct2d")(channels), "sync": nn.SyncBatchNorm,
}  # fmt: skip


def used(model, method):
    """Convert a model twice, and use every feature that stores something in it."""
    schedule = ghostnoise.LinearSchedule(2, 4, steps=3)
    sized = {"ghost_size": schedule} if registry.find(method)[0].ghost_size != "none" else {}
    ghostnoise.convert(model, "gni", 3, history=6, scope="local", where=lambda name, module: name == "1")
    model(images())
    ghostnoise.convert(model, method, **(SIZES[method] | sized), scope="local")
    if registry.find(method)[0].noise is not None:
        ghostnoise.convert(model, method, **(SIZES[method] | sized), after=nn.ReLU)
        ghostnoise.convert(model, method, **SIZES[method], before=nn.Conv2d)
    for _ in range(2):
        model(images()).sum().backward()
        schedule.step()
    ghostnoise.calibrate(model, [images()], keep=5)
    return model


def ours_in(pickled):
    """Return the names that a pickle imports from this library."""
    found = []

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            found.append(f"{module}.{name}")
            return super().find_class(module, name)

    Names(io.BytesIO(pickled)).load()
    return [name for name in found if "ghostnoise" in name]


@pytest.mark.filterwarnings("ignore:.* layers become plain batch norm")
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("method", SIZES)
def test_a_reverted_model_has_no_objects_of_this_library(method, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), PLAIN[kind](4), nn.ReLU())
    model[1].theirs = "an attribute of its own"
    names = {name for name, _ in model.named_modules()}
    used(model, method)
    assert ours_in(pickle.dumps(model))
    with ghostnoise.sampling(model.eval(), ghost_size=3):
        ghostnoise.revert(model)
    assert ours_in(pickle.dumps(model)) == ours_in(pickle.dumps(copy.deepcopy(model))) == []
    assert model[1].theirs == "an attribute of its own"
    assert {name for name, _ in model.named_modules()} == names
    for module in model.modules():
        assert not [name for name in vars(module) if "ghostnoise" in name]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_reverted_model_loads_without_this_library(tmp_path):
    model = ghostnoise.revert(used(convolutional(), "gni")).eval()
    torch.save(model, tmp_path / "model.pt")
    torch.save((images(), model(images())), tmp_path / "example.pt")
    code = """
import sys, torch
sys.modules["ghostnoise"] = None
x, expected = torch.load("example.pt")
model = torch.load("model.pt", weights_only=False)
assert torch.equal(model(x), expected)
model.train()(x).sum().backward()
assert not [name for name in sys.modules if name.startswith("ghostnoise.")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)

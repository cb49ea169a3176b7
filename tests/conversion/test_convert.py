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

import ghostnoise
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from support import networks
from support.models import SIZES, convolutional, images, state, trained

every_method = pytest.mark.parametrize("method", list(SIZES))


def quiet_revert(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* layers become plain batch norm")
        return ghostnoise.revert(model)


@every_method
def test_every_batch_norm_is_converted_in_place(method):
    """Parameters, buffers and eval output stay; the attributes are those of a layer that was constructed."""
    spec, fixed = registry.names()[method]
    model = trained()
    tensors, expected = dict(model.state_dict(keep_vars=True)), model.eval()(images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert ghostnoise.convert(model, method, **SIZES[method]) is model
    for layer, ndims, plain in ((model[1], (4,), nn.BatchNorm2d), (model[4][1], (2, 3), nn.BatchNorm1d)):
        assert isinstance(layer, NormLayer)
        assert layer.ndims == ndims
        assert isinstance(layer, plain) != spec.changes_inference
        built = type(layer)(layer.num_features, **SIZES[method], **fixed)
        assert vars(layer).keys() - {"_ghostnoise_origin", "_ghostnoise_path"} == vars(built).keys()
        assert {name: getattr(layer, name) for name in built.options} == {
            name: getattr(built, name) for name in built.options
        }
    assert [row.method for row in ghostnoise.summary(model)] == [method, method]
    assert list(model.state_dict()) == list(tensors)
    assert all(tensors[name] is tensor for name, tensor in model.state_dict(keep_vars=True).items())
    assert torch.equal(model(images()), expected) != spec.changes_inference
    before = copy.deepcopy(model.state_dict())
    (model.train()(images()) * torch.randn(8, 5)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(before[name], model.state_dict()[name]) for name in ("0.weight", "1.weight", "1.bias"))


@every_method
def test_revert_restores_the_model_and_keeps_what_was_learned(method):
    model = trained()
    before = state(model)
    ghostnoise.convert(model, method, **SIZES[method])
    model(images())
    learned, output = copy.deepcopy(model.state_dict()), model.eval()(images())
    assert quiet_revert(model.train()) is model
    assert state(model) == before
    assert all(torch.equal(learned[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model.eval()(images()), output) != registry.names()[method][0].changes_inference
    assert not any("ghost" in name for module in model.modules() for name in vars(module))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_method
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copies_work(method, copied):
    model = ghostnoise.convert(trained(), method, **SIZES[method])
    twin, outputs = copied(model), []
    for each in (model, twin):
        torch.manual_seed(0)
        outputs.append(each(images()))
    assert torch.equal(*outputs)
    quiet_revert(twin)
    assert type(twin[1]) is nn.BatchNorm2d
    assert isinstance(model[1], NormLayer)


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


def test_verbose_prints_the_summary(capsys):
    model = ghostnoise.convert(convolutional(), "GNI-4", verbose=True)
    assert capsys.readouterr().out == f"{ghostnoise.summary(model)}\n"
    ghostnoise.convert(model, ghostnoise.GhostBatchNorm, 8)
    assert capsys.readouterr().out == ""
    assert [row[3:5] for row in ghostnoise.summary(model)] == [("gbn", 8), ("gbn", 8)]


def test_options_reach_the_layers():
    generator = torch.Generator().manual_seed(0)
    for method, options in (
        ("agni", {"ghost_size": 4, "noise_eps": 1e-2, "dof": "exact", "generator": generator}),
        ("gbn", {"ghost_size": 4, "running_var_from": "batch"}),
        ("en", {"ghost_size": 4, "alpha": 0.5}),
        ("gni", {"ghost_size": 4, "draw": "partition", "normalizer": "exclusive"}),
        ("xbn", {"ghost_size": None, "min_std": 0.1, "clamp_output": 3.0, "self_weight": 0.05}),
        ("brn", {"r_max": 2.0, "d_max": 1.0, "warmup_steps": 7, "transition_steps": 9}),
    ):
        layer = ghostnoise.convert(convolutional(), method, **options)[1]
        assert {name: getattr(layer, name) for name in options} == options


def test_everything_that_refers_to_a_layer_stays_valid():
    model = convolutional().double()
    norm, calls = model[1], []
    norm.register_forward_hook(lambda *args: calls.append(1))
    norm.eval()
    norm.weight.requires_grad_(False)
    ghostnoise.convert(model, "gni", 4)
    assert model[1] is norm
    assert not norm.training
    assert not norm.weight.requires_grad
    model(images().double())
    assert calls == [1]


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


def test_the_model_itself_may_be_a_batch_norm_and_shared_layers_stay_shared():
    norm = nn.BatchNorm2d(3)
    assert type(ghostnoise.convert(norm, "gbn", 4)) is ghostnoise.GhostBatchNorm2d
    assert type(ghostnoise.revert(norm)) is nn.BatchNorm2d
    model = ghostnoise.convert(nn.Sequential(norm, nn.ReLU(), norm), "gni", 4)
    assert model[0] is model[2] is norm
    assert type(norm) is ghostnoise.GhostNoiseBatchNorm2d
    assert ghostnoise.summary(model)[0].notes == "also 2"


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
@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "bn") for method in SIZES), ("gni", "lazy"), ("en", "timm"), ("agni", "sync")]
)
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

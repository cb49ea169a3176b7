"""Networks of timm through the settings."""

import copy
import importlib
import sys

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError
from ghostnoise.methods.base import NormLayer
from support.lab_networks import SETTINGS, images, norm, trained

importlib.import_module("startup.sitecustomize")
METHODS = ("bn", "gbn", "xbn", "en", "gni", "agni")
NORMS = (nn.BatchNorm2d, ghostnoise.EvalNorm2d)  # EvalNorm2d is not a subclass of nn.BatchNorm2d


def build(name, method, place=None, shape=(3, 32, 32), classes=7, seed=0, **more):
    torch.manual_seed(seed)
    return models.build(ModelSettings(name=f"timm:{name}"), norm(method, placement=place, **more), shape, classes)


def refused(*arguments, **more):
    with pytest.raises(UserError) as caught:
        build(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(model):
    return [(row.method, row.notes) for row in ghostnoise.summary(model)]


@pytest.mark.parametrize("method", METHODS)
def test_batch_norms_are_converted(method):
    plain, model = trained(build("test_resnet", "none")), build("test_resnet", method)
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    assert len(norms) == sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules()) > 5
    assert all(isinstance(module, NormLayer) == (method != "bn") for module in norms)
    model.load_state_dict(plain.state_dict(), strict=True)
    if method != "en":
        x = images(3, (3, 32, 32))
        torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-4)


def test_none_leaves_the_network_as_timm_makes_it():
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("test_resnet", num_classes=7)
    ours = build("test_resnet", "none")
    assert [type(module) for module in ours.modules()] == [type(module) for module in theirs.modules()]
    assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in ours.state_dict().items())


def test_settings_reach_the_layers():
    model = build("test_resnet", "gni", components="scale", noise_eps=0.01, eps=1e-2, momentum=0.3)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen = {(m.eps, m.momentum, m.ghost_size, m.noise_eps, m.components) for m in norms}
    assert seen == {(1e-2, 0.3, 4, 0.01, "scale")}
    model = build("test_resnet", "gni", normalizer="exclusive")
    assert {module.normalizer for module in model.modules() if isinstance(module, nn.BatchNorm2d)} == {"exclusive"}
    model = build("test_vit", "agni", law="conv", dof="exact", noise_eps=0.01)
    layers = [module for module in model.modules() if isinstance(module, ghostnoise.AnalyticalGhostNoise)]
    assert {(m.law, m.dof, m.noise_eps, m.components) for m in layers} == {("conv", "exact", 0.01, "both")}


def test_default_placements():
    assert models.placement("timm:test_resnet", "gni") == "inside"
    assert models.placement("timm:test_vit", "agni") == "after"
    assert models.placement("timm:test_vit", "none") is models.placement("timm:test_resnet", "gbn") is None


@pytest.mark.parametrize(
    ("name", "place", "dims"),
    [
        ("test_resnet", "after", {1}),
        ("test_resnet", "activation", {1}),
        ("test_vit", "after", {-1}),
        ("test_vit", "activation", {-1}),
        ("test_convnext", "after", {1, -1}),  # between stages first, in blocks last
        ("test_convnext", "activation", {-1}),
        ("test_nfnet", "activation", {1}),
    ],
)
def test_noise_outside_of_batch_norms(name, place, dims):
    shape = (3, 32, 32)
    plain, model = trained(build(name, "none", shape=shape)), build(name, "gni", place, shape=shape)
    model.load_state_dict(plain.state_dict(), strict=True)
    x = images(4, shape)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-4)
    model.train()
    assert not torch.equal(model(x), copy.deepcopy(model)(x))
    layers = [module for module in model.modules() if isinstance(module, ghostnoise.GhostNoise)]
    assert {layer.channel_dim for layer in layers} == dims
    assert {method for method, _ in rows(model)} == {"gni"}
    side = "after" if place == "after" else "before"
    assert all(notes.startswith(side) for _, notes in rows(model))


def test_noise_after_every_norm_of_a_transformer_and_none_elsewhere():
    model = build("test_vit", "gni")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == len(rows(model)) > 5
    assert all(isinstance(module.ghost_noise, ghostnoise.GhostNoise) for module in norms)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_images_of_another_size_and_number_of_channels(name):
    shape = (1, 32, 48)
    assert build(name, "none", shape=shape)(images(2, shape)).shape == (2, 7)


def test_sizes_that_a_network_cannot_take():
    said = refused("vit_tiny_patch16_224", "none", shape=(3, 8, 8))
    assert said.startswith("images of 3x8x8 for 'timm:vit_tiny_patch16_224': not accepted (")


def test_unknown_networks_suggest_the_nearest():
    said = refused("resnet81", "bn")
    assert said == "model.name='timm:resnet81': timm has no such network; did you mean 'timm:resnet18'?"
    with pytest.raises(UserError, match="did you mean 'timm:resnet18'"):
        models.placement("timm:resnet81", "gni")
    assert "timm has no such network" in refused("hf-hub:timm/resnet18.a1_in1k", "bn")  # nothing is downloaded


def test_without_timm_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    said = refused("resnet18", "bn")
    assert said.startswith("model.name='timm:resnet18': timm cannot be imported (")
    assert said.endswith("); pip install timm")


@pytest.mark.parametrize("method", ["dropout", "eagn"])
def test_methods_that_are_not_available_for_timm(method):
    said = refused("test_resnet", method)
    assert f"norm.method={method!r} for 'timm:test_resnet': networks of timm and your own have 'none', 'bn'" in said
    assert "or one of the networks resnet18, resnet20, resnet8, resnet50, wsln-resnet18" in said


def test_methods_and_placements_that_need_batch_norms():
    said = "norm.method='gbn' for 'timm:test_vit': needs batch norms, and the network has none; use 'none', 'gni' or "
    assert refused("test_vit", "gbn") == said + "'agni'"
    assert "norm.method='bn'" in refused("test_vit", "bn")
    said = refused("test_vit", "gni", "inside")
    assert said.startswith("norm.placement='inside' for 'timm:test_vit': needs batch norms")
    assert "outside batch norms: an option of noise inside" in refused("test_vit", "gni", normalizer="exclusive")
    assert "settings of batch norms, which it does not have" in refused("test_vit", "none", eps=1e-3)
    assert "settings of batch norms, which it does not have" in refused("test_resnet", "none", momentum=0.2)


def test_placements_that_are_not_available():
    said = refused("test_resnet", "gni", "branch")
    assert said.endswith("must be one of 'inside', 'after', 'activation'; leave it out for the default")
    assert (
        refused("nf_resnet26", "gni")
        == "norm.placement='after' for 'timm:nf_resnet26': it has no norms; use 'activation'"
    )
    said = refused("test_efficientnet", "gni", "after")
    assert (
        "includes the activation, so that noise would come after the activation; use 'inside' or 'activation'" in said
    )


def test_widths_cannot_be_set():
    for more in ({"width": 8}, {"widths": [8]}):
        with pytest.raises(UserError, match="networks of timm have their own widths; leave them out"):
            models.build(ModelSettings(name="timm:test_resnet", **more), norm("bn"), (3, 32, 32), 10)


def test_errors_of_convert_are_user_errors():
    with pytest.raises(UserError, match="ghost_size=1: must be an integer from 2 to 65536"):
        models.build(ModelSettings(name="timm:test_resnet"), NormSettings(method="xbn", ghost_size=1), (3, 32, 32), 10)


def test_global_scope(one_rank):
    for method in METHODS:
        norms = [m for m in build("test_resnet", method, scope="global").modules() if isinstance(m, NORMS)]
        assert {module.process_group for module in norms} == {"world"}
    noises = [m for m in build("test_vit", "gni", scope="global").modules() if isinstance(m, ghostnoise.GhostNoise)]
    assert {module.process_group for module in noises} == {"world"}


def test_global_scope_of_one_process_is_local():
    for name, methods in (("test_resnet", METHODS), ("test_vit", ("gni", "agni"))):
        for method in methods:
            everyone, own = (build(name, method, scope=scope) for scope in ("global", "local"))
            assert repr(everyone) == repr(own)


def test_the_settings_of_the_tests_are_of_every_method():
    assert {"none", *METHODS} <= SETTINGS.keys()


def test_signals_are_refused():
    said = refused("test_resnet", "none", shape=(1, 40))
    assert said == "timm:test_resnet for signals of shape (1, 40): networks of timm take images; use conv1d"

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import ghostnoise
from ghostnoise import functional
from ghostnoise.methods import registry
from ghostnoise.methods.registry import MethodSpec
from ghostnoise.torch_private import AnyBatchNorm

SPECS = registry.specs()
CARDS = Path(__file__).parents[2] / "docs" / "methods"
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
NORMS = {name: spec for name, spec in SPECS.items() if spec.norm is not None}
every_norm = pytest.mark.parametrize("spec", NORMS.values(), ids=NORMS)


def test_names_in_the_order_of_the_paper():
    assert list(SPECS)[:6] == ["bn", "gbn", "xbn", "en", "gni", "agni"]
    assert {"dropout", "eagn"} <= set(SPECS)
    assert all(name == spec.name for name, spec in SPECS.items())


@every_spec
def test_every_spec_is_complete(spec):
    assert spec.label
    assert spec.title
    assert spec.equation
    assert (CARDS / spec.card).is_file(), f"docs/methods/{spec.card} is missing"
    assert spec.norm is not None or spec.noise is not None
    assert issubclass(spec.layer, nn.Module)
    if spec.norm is not None:
        assert issubclass(spec.norm, AnyBatchNorm)


def test_labels_and_cards_are_those_of_one_method():
    for attribute in ("label", "title", "card", "equation"):
        values = [getattr(spec, attribute) for spec in SPECS.values()]
        assert len(set(values)) == len(values)


@every_norm
def test_norms_of_every_rank(spec):
    assert [layer.__name__ for layer in spec.norms] == [f"{spec.norm.__name__}{rank}d" for rank in (1, 2, 3)]
    for layer, ndims, plain in zip(
        spec.norms, ((2, 3), (4,), (5,)), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), strict=True
    ):
        assert issubclass(layer, spec.norm)
        assert layer.ndims == ndims
        assert issubclass(layer, plain) != spec.changes_inference


@every_norm
def test_a_layer_passes_its_options_to_its_function(spec):
    """Every keyword of the function is an attribute of the layer, or an argument of the call."""
    parameters = inspect.signature(spec.norm.function).parameters
    keywords = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert set(spec.norm.options) <= keywords
    given = {"num_batches_tracked", "channel_dim", "indices", "draws", "mask"}
    assert keywords - set(spec.norm.options) <= given
    assert next(iter(parameters)) == "input"


@every_norm
def test_options_are_the_same_in_layers_and_functions(spec):
    parameters = inspect.signature(spec.norm.function).parameters
    for option in spec.options:
        if option.name == "history":  # a number for layers; functions take one that keeps the samples
            continue
        assert parameters[option.name].default == option.default
        assert parameters[option.name].annotation == option.type
    if spec.noise is not None:
        noise = {option.name: option for option in registry.options_of(spec.noise)}
        for option in spec.options:
            if option.name != "normalizer":  # of a batch norm only
                assert noise[option.name] == option


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bn", []),
        ("gbn", ["running_var_from"]),
        ("xbn", ["min_std", "clamp_output", "self_weight"]),
        ("en", ["alpha"]),
        ("gni", ["noise_eps", "components", "draw", "normalizer", "history"]),
        ("agni", ["noise_eps", "law", "dof", "components"]),
        ("dropout", ["p", "distribution", "per", "p_sets"]),
        ("eagn", ["std"]),
    ],
)
def test_options(name, options):
    assert [option.name for option in SPECS[name].options] == options


def test_ghost_sizes():
    modes = {name: spec.ghost_size for name, spec in SPECS.items()}
    expected = {
        "bn": "none", "gbn": "required", "xbn": "optional", "en": "required", "gni": "required", "agni": "required",
        "dropout": "none", "eagn": "none",
    }  # fmt: skip
    assert modes | expected == modes
    assert {name for name, spec in NORMS.items() if spec.least_ghost_size == 2} == {"xbn"}


def test_shorthands():
    names = registry.names()
    assert set(NORMS) <= set(names)
    assert registry.find("gni") == (SPECS["gni"], {})
    assert registry.find("gni-shift") == (SPECS["gni"], {"components": "shift"})
    assert registry.find("gni-scale") == (SPECS["gni"], {"components": "scale"})
    assert registry.find("agni-conv") == (SPECS["agni"], {"law": "conv"})
    for spec, options in names.values():
        assert options.keys() <= {option.name for option in spec.options}


def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match=r"method='gini': must be one of 'bn', .*; did you mean 'gni'\?"):
        registry.find("gini")
    for name in (None, 3, ["gni"], "dropout"):
        with pytest.raises(ValueError, match=r"method=.*: must be one of 'bn', 'gbn'"):
            registry.find(name)


def test_a_name_is_registered_once():
    spec = SPECS["gbn"]
    registry.register(spec)
    with pytest.raises(ValueError, match=r"method 'gbn' is registered twice, by .*GhostBatchNorm.* and .*BatchNorm"):
        registry.register(replace(SPECS["bn"], name="gbn"))
    assert registry._SPECS["gbn"] is spec


def test_a_specification_must_fit_its_layers(monkeypatch):
    norm = SPECS["gbn"].norm
    monkeypatch.setattr(norm, "options", ("ghost_size", "process_group", "uneven"))
    with pytest.raises(
        ValueError, match=r"method 'gbn': running_var_from must be both in GhostBatchNorm.options and a"
    ):
        registry.register(SPECS["gbn"])
    monkeypatch.undo()
    monkeypatch.delattr(sys.modules[norm.__module__], "GhostBatchNorm3d")
    with pytest.raises(ValueError, match="method 'gbn': define GhostBatchNorm3d beside GhostBatchNorm"):
        registry.register(SPECS["gbn"])


def test_exports():
    for name, value in registry.exports().items():
        assert getattr(ghostnoise if name in registry.layers() else functional, name) is value
    assert set(functional.__all__) == set(registry.functions()) == set(dir(functional))
    for spec in SPECS.values():
        for layer in (spec.norm, spec.noise, *(spec.norms or ())):
            assert layer is None or getattr(ghostnoise, layer.__name__) is layer
        if spec.norm is not None:
            assert functional.__getattr__(spec.norm.function.__name__) is spec.norm.function
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = functional.nothing


def test_an_example_is_an_instance():
    for spec in SPECS.values():
        options = ({} if spec.ghost_size == "none" else {"ghost_size": 4}) | spec.example
        spec.layer(*((3,) if spec.norm else ()), **options)


def test_a_spec_without_layers_is_refused():
    with pytest.raises(AssertionError):
        _ = MethodSpec("x", "X", "X", "y = x", "x.md").layer

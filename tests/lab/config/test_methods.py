"""The kinds of `[norm]`: what is derived from the registry, and a method that is added to it."""

import inspect
import pickle

import pytest

from ghostnoise.lab.config import methods, recipe
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.overrides import keys, unknown, validated
from ghostnoise.lab.errors import UserError
from ghostnoise.methods.registry import Option

TREE = {
    "model": {"name": "mlp", "widths": [8]},
    "norm": {"method": "new", "ghost_size": 4},
    "data": {"name": "digits"},
    "optim": {"lr": 0.1},
    "train": {"epochs": 1, "batch_size": 16},
}


@pytest.fixture
def added(described):
    """A method that only its description defines."""
    options = (Option("upper", float, 3.0), Option("lower", float, inspect.Parameter.empty), Option("clipped", bool, 1))
    norms = methods.methods()["bn"].norms
    described(methods.kind("new", "required", options, least_ghost_size=3, partitions=True, norms=norms))


def tree(**norm):
    return TREE | {"norm": TREE["norm"] | norm}


def refusal(**norm):
    with pytest.raises(UserError) as caught:
        validated(tree(**norm))
    return str(caught.value)


def test_options_of_an_added_method_are_settings(added):
    norm = validated(tree(lower=5)).norm
    assert norm.options == {"upper": 3.0, "lower": 5.0, "clipped": True}
    assert isinstance(norm.options["lower"], float)
    assert norm == validated(tree(lower=5.0, upper=3.0)).norm
    assert {"norm.upper", "norm.lower", "norm.clipped"} < set(keys())
    assert unknown("norm.upp") == "norm.upp: unknown; did you mean norm.upper?"
    loaded = recipe.load("digits", ["norm.method=new", "norm.lower=2", "norm.clipped=false"])
    assert loaded.settings.norm.options == {"upper": 3.0, "lower": 2.0, "clipped": False}
    assert recipe.stored(loaded.settings.model_dump(mode="json", exclude_none=True)) == loaded.settings


def test_errors_in_options_of_an_added_method(added):
    assert refusal() == "norm.lower: missing; new has no default for it, give one"
    assert refusal(lower="x") == "norm.lower='x': must be a number"
    assert refusal(lower=1.0, clipped=1) == "norm.clipped=1: must be true or false"
    assert refusal(lower=1.0, uppr=1.0) == "norm.uppr: unknown; did you mean norm.upper?"
    assert refusal(method="bn", ghost_size=None, upper=1.0) == (
        "norm.upper=1.0: a setting of new, and method is 'bn'; leave upper out"
    )
    assert refusal(method="nwe").endswith(" or 'new'; did you mean 'new'?")


def test_mistakes_in_options_and_settings_are_reported_together():
    lines = refusal(method="gni", ghost_size=0, components="shfit", noise_eps=-1, epz=1).splitlines()
    assert sorted(lines) == [
        "norm.components='shfit': must be 'both', 'shift' or 'scale'; did you mean 'shift'?",
        "norm.epz: unknown; did you mean norm.eps?",
        "norm.ghost_size=0: must be 1 or more",
        "norm.noise_eps=-1: must be 0 or more",
    ]


def test_a_size_below_the_least_ghost_size(added):
    with pytest.raises(UserError, match=r"norm\.ghost_size=2: new needs 3 or more; raise it"):
        recipe.complete(validated(tree(ghost_size=2, lower=1.0)))


def example(name):
    """Settings of a method with all that it needs."""
    kind = methods.methods()[name]
    values = {option: 1 if kind.model_fields[option].annotation is int else 0.1 for option in kind.defaults}
    needed = {option: values[option] for option, default in kind.defaults.items() if default is ...}
    return NormSettings(method=name, **({"ghost_size": 4} if kind.has("ghost_size") else {}), **needed)


@pytest.mark.parametrize("name", methods.methods())
def test_layers_have_the_options_of_their_methods(name):
    settings = example(name)
    for layer in settings.norms or ():
        assert set(settings.options) <= set(inspect.signature(layer).parameters)
    if settings.noise is not None:  # without the options of noise inside batch norms
        assert set(settings.options) - {"normalizer"} <= set(inspect.signature(settings.noise).parameters)


@pytest.mark.parametrize("name", methods.methods())
def test_settings_survive_pickling_and_copies(name):
    """Runs are sent to other processes, which have the kinds under no name."""
    settings = example(name)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.model_copy() == settings
    assert type(settings) is methods.methods()[name]


def test_flags():
    """Flags of the methods of the paper; others may be added to the registry."""
    paper = ["bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn"]
    known = methods.methods()
    assert next(iter(known)) == "none"
    assert [name for name in paper if known[name].partitions] == ["gbn", "xbn", "en"]
    assert [name for name in paper if known[name].replaces_batch_norm] == ["bn", "gbn", "xbn", "en"]


def test_the_numerics_number_of_a_method_counts_its_own_changes_and_those_of_all_methods(monkeypatch, raised):
    monkeypatch.setattr(methods, "NUMERICS", 4)
    assert {methods.numerics(name) for name in ("bn", "none", "of another version", None)} == {4}
    raised("gbn", 3)
    assert (methods.numerics("bn"), methods.numerics("gbn")) == (4, 6)

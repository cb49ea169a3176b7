"""The methods of `[norm]`: what is derived from their description, and a method that is added to it."""

import inspect

import pytest

from ghostnoise.lab.config import methods, recipe
from ghostnoise.lab.config.methods import REQUIRED, MethodInfo, Option
from ghostnoise.lab.config.overrides import keys, unknown, validated
from ghostnoise.lab.config.schema import NormSettings
from ghostnoise.lab.errors import UserError

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
    known = methods.methods()
    options = (Option("upper", float, 3.0), Option("lower", float), Option("clipped", bool, True))
    new = MethodInfo("new", "required", least_ghost_size=3, partitions=True, options=options, norms=known["bn"].norms)
    described(new)


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
    assert refusal() == "norm.method='new' without lower: it has no default; give one"
    assert refusal(lower="x") == "norm.lower='x': must be a number"
    assert refusal(lower=1.0, clipped=1) == "norm.clipped=1: must be true or false"
    assert refusal(lower=1.0, uppr=1.0) == "norm.uppr: unknown; did you mean norm.upper?"
    assert refusal(method="bn", ghost_size=None, upper=1.0) == (
        "norm.upper=1.0: a setting of new, and method is 'bn'; leave upper out"
    )
    assert refusal(method="nwe").endswith(" or 'new'; did you mean 'new'?")


def test_mistakes_in_options_and_settings_are_reported_together():
    lines = refusal(method="gni", ghost_size=0, components="shfit", noise_eps=-1, epz=1).splitlines()
    assert lines == [
        "norm.ghost_size=0: must be 1 or more",
        "norm.components='shfit': must be 'both', 'shift' or 'scale'; did you mean 'shift'?",
        "norm.noise_eps=-1: must be 0 or more",
        "norm.epz: unknown; did you mean norm.eps?",
    ]


def test_a_size_below_the_least_ghost_size(added):
    with pytest.raises(UserError, match=r"norm\.ghost_size=2: new needs 3 or more; raise it"):
        recipe.complete(validated(tree(ghost_size=2, lower=1.0)))


def test_layers_have_the_options_of_their_methods():
    for name, info in methods.methods().items():
        needed = {option.name: 0.1 for option in info.options if option.default is REQUIRED}
        size = {} if info.ghost_size == "none" else {"ghost_size": 4}
        settings = NormSettings(method=name, **size, **needed)
        for layer in info.norms or ():
            assert set(settings.options) <= set(inspect.signature(layer).parameters)
        if info.noise is not None:  # without the options of noise inside batch norms
            assert set(settings.options) - {"normalizer"} <= set(inspect.signature(info.noise).parameters)


def test_flags():
    """Flags of the methods of the paper; others may be added to the registry."""
    paper = ["bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn"]
    known = methods.methods()
    assert next(iter(known)) == "none"
    assert [name for name in paper if known[name].partitions] == ["gbn", "xbn", "en"]
    assert [name for name in paper if known[name].replaces_batch_norm] == ["bn", "gbn", "xbn", "en"]
    assert [name for name in paper if known[name].shares] == ["bn", "gbn", "xbn", "en", "gni", "agni"]


def test_the_numerics_number_of_a_method_counts_its_own_changes_and_those_of_all_methods(monkeypatch, raised):
    monkeypatch.setattr(methods, "NUMERICS", 4)
    assert {methods.numerics(name) for name in ("bn", "none", "of another version", None)} == {4}
    raised("gbn", 3)
    assert (methods.numerics("bn"), methods.numerics("gbn")) == (4, 6)

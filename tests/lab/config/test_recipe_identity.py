"""A run is identified by what it computes, and by all of it."""

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.methods import methods
from ghostnoise.lab.config.overrides import changed, keys, validated
from ghostnoise.lab.errors import UserError

FIXED = {
    "model": {"name": "mlp", "widths": [512, 300]},
    "norm": {"method": "bn"},
    "data": {"name": "mnist"},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": -0.0},
    "train": {"epochs": 3, "batch_size": 100},
}
GOLDEN = (
    '{"data":{"augment":"none","evaluate":"validation","name":"mnist","split_seed":0,"stand_in":false},'
    '"model":{"name":"mlp","widths":[512,300]},'
    '"norm":{"eps":1e-05,"method":"bn","momentum":0.1,"scope":"local"},'
    '"optim":{"betas":[0.9,0.999],"eps":1e-08,"lr":0.001,"name":"adamw","warmup_epochs":0.0,"weight_decay":0.0},'
    '"seed":0,'
    '"train":{"amp":"none","batch_size":100,"channels_last":false,"compile":false,"deterministic":false,"device":"auto","epochs":3,'
    '"label_smoothing":0.0,"processes":1,"smoke":false}}'
)


def test_canonical_form():
    settings = validated(FIXED)
    assert recipe.canonical(settings) == GOLDEN
    assert recipe.identity(settings) == hashlib.sha256(GOLDEN.encode()).hexdigest()[:12] == "d84d3c25e44a"
    assert validated(json.loads(GOLDEN)) == settings


def test_identity_of_a_recipe_is_that_of_its_settings():
    made = recipe.load("digits")
    assert made.canonical() == recipe.canonical(made.settings)
    assert made.identity == recipe.identity(made.settings)
    other = made.with_settings(changed(made.settings, train={"epochs": 1}))
    assert (other.name, other.text) == (made.name, made.text)
    assert other.settings.train.epochs == 1
    assert other.identity != made.identity


def spelling(draw, value):
    """One of the ways to write a value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return draw(st.sampled_from([f'"{value}"', f"'{value}'"]))
    if isinstance(value, tuple | list):
        return f"[{', '.join(spelling(draw, each) for each in value)}]"
    if isinstance(value, int):
        return draw(st.sampled_from([str(value), f"+{value}", hex(value)]))
    ways = [repr(value), f"{value:.17e}"]
    return draw(st.sampled_from([*ways, str(int(value))] if value == int(value) else ways))


# Defaults that depend on another setting.
OWN = {
    "norm.components": "both", "norm.draw": "replacement", "norm.normalizer": "batch", "norm.noise_eps": 1e-3,
    "norm.history": 0, "norm.law": "fc", "norm.dof": "paper",
    "norm.distribution": "bernoulli", "norm.per": "element", "data.padding": 4, "data.image_size": 224,
    "data.resize": 256, "optim.momentum": 0.9, "optim.nesterov": False, "optim.eps": 1e-8,
}  # fmt: skip


@st.composite
def writings(draw, settings):
    """TOML texts of the same settings: other orders, comments, spellings, with defaults or without."""
    tree, shortest = settings.model_dump(exclude_none=True), settings.model_dump(exclude_defaults=True)

    def lines(section, values):
        keys = draw(st.permutations(list(values)))
        if draw(st.booleans()):
            keys = [key for key in keys if key in shortest[section] and OWN.get(f"{section}.{key}") != values[key]]
        ends = st.sampled_from(["", "  # ours"])
        return [f"[{section}]", *(f"{key} = {spelling(draw, values[key])}{draw(ends)}" for key in keys)]

    seed = tree.pop("seed")
    made = [f"seed = {seed}"] if seed or draw(st.booleans()) else []
    made += draw(st.sampled_from([[], ["# a comment", ""]]))
    for section in draw(st.permutations(list(tree))):
        made += lines(section, tree[section])
    return "\n".join(made)


STRENGTHS = {
    "none": {}, "bn": {}, "xbn": {}, "gbn": {"ghost_size": 8}, "en": {"ghost_size": 4}, "gni": {"ghost_size": 16},
    "agni": {"ghost_size": 99}, "dropout": {"p": 0.0}, "eagn": {"std": 1.0},
}  # fmt: skip


@st.composite
def experiments(draw):
    method = draw(st.sampled_from(list(STRENGTHS)))
    optim = draw(st.sampled_from([{}, {"nesterov": True, "momentum": 0.5}, {"name": "adamw", "betas": [0.0, 0.5]}]))
    data = draw(st.sampled_from([{"name": "digits"}, {"name": "cifar10", "augment": "flip-crop"},
                                 {"name": "imagefolder", "folder": "there"}]))  # fmt: skip
    rates = st.one_of(st.integers(1, 3).map(float), st.floats(1e-6, 10))
    return validated(
        {
            "seed": draw(st.integers(0, 3)),
            "model": {"name": "wsln-resnet18" if method == "none" else draw(st.sampled_from(["resnet8", "resnet18"]))},
            "norm": {"method": method, **STRENGTHS[method]},
            "data": data,
            "optim": {"lr": draw(rates), "weight_decay": draw(st.sampled_from([0.0, 5e-4])), **optim},
            "train": {"epochs": draw(st.integers(1, 300)), "batch_size": draw(st.integers(8, 512))},
        }
    )


@given(st.data())
def test_identity_is_the_same_however_it_is_written(tmp_path_factory, data):
    settings = data.draw(experiments())
    path = tmp_path_factory.mktemp("written") / "mine.toml"
    path.write_text(data.draw(writings(settings)))
    made = recipe.load(str(path))
    placed = changed(settings, norm={"placement": made.settings.norm.placement})
    assert made.canonical() == recipe.canonical(placed)
    assert made.identity == recipe.identity(placed)


# Another value for every setting, and what it needs beside it.
OTHERS = {
    "seed": ("1", []),
    "model.name": ("resnet18", []),
    "model.width": ("8", []),
    "model.widths": ("[4]", []),
    "model.zero_init_last": ("true", []),
    "model.args": ("{width = 9}", ["model.name=support.own_parts:network"]),
    "norm.method": ("gbn", []),
    "norm.ghost_size": ("5", []),
    "norm.scope": ("global", []),
    "norm.components": ("scale", []),
    "norm.draw": ("partition", []),
    "norm.normalizer": ("exclusive", []),
    "norm.history": ("16", []),
    "norm.placement": ("after", []),
    "norm.law": ("conv", ["norm.method=agni"]),
    "norm.dof": ("exact", ["norm.method=agni"]),
    "norm.p": ("0.2", ["norm.method=dropout", "norm.p=0.1"]),
    "norm.distribution": ("gaussian", ["norm.method=dropout", "norm.p=0.1"]),
    "norm.per": ("channel", ["norm.method=dropout", "norm.p=0.1"]),
    "norm.p_sets": ("std", ["norm.method=dropout", "norm.p=0.1", "norm.distribution=gaussian"]),
    "norm.std": ("0.2", ["norm.method=eagn", "norm.std=0.1"]),
    "norm.eps": ("1e-4", []),
    "norm.momentum": ("0.2", []),
    "norm.noise_eps": ("0", []),
    "norm.running_var_from": ("batch", ["norm.method=gbn"]),
    "norm.min_std": ("0.1", ["norm.method=xbn"]),
    "norm.clamp_output": ("10", ["norm.method=xbn"]),
    "norm.self_weight": ("0.1", ["norm.method=xbn"]),
    "norm.alpha": ("0.1", ["norm.method=en"]),
    "data.name": ("mnist", []),
    "data.evaluate": ("validation", []),
    "data.limit": ("100", []),
    "data.test_limit": ("100", []),
    "data.split_seed": ("1", []),
    "data.augment": ("flip-crop", []),
    "data.padding": ("2", ["data.augment=flip-crop"]),
    "data.folder": ("there", ["data.name=imagefolder", "data.folder=here"]),
    "data.image_size": ("200", ["data.name=imagefolder", "data.folder=here"]),
    "data.resize": ("300", ["data.name=imagefolder", "data.folder=here"]),
    "data.args": ("{classes = 2}", ["data.name=support.own_parts:images"]),
    "optim.args": ("{beta = 0.1}", ["optim.name=support.own_parts:optimizer"]),
    "optim.name": ("adamw", []),
    "optim.lr": (repr(math.nextafter(0.2, 1)), []),
    "optim.momentum": ("0.8", []),
    "optim.nesterov": ("true", []),
    "optim.betas": ("[0.9, 0.9]", ["optim.name=adamw"]),
    "optim.eps": ("1e-3", ["optim.name=adamw"]),
    "optim.weight_decay": ("1e-4", []),
    "optim.warmup_epochs": ("0.5", []),
    "optim.warmup_lr": ("0", []),
    "optim.warmup_prefix": ("false", []),
    "optim.min_lr": ("1e-5", []),
    "optim.clip": ("1", []),
    "train.epochs": ("3", []),
    "train.batch_size": ("9", []),
    "train.accumulation_steps": ("2", []),
    "train.label_smoothing": ("0.1", []),
    "train.ema": ("0.9", []),
    "train.amp": ("none", []),
    "train.channels_last": ("false", []),
    "train.compile": ("true", []),
    "train.deterministic": ("true", []),
    "train.device": ("cuda", []),
    "meter.every": ("2", []),
    "meter.batches": ("2", ["meter.every=2"]),
    "meter.ghost_size": ("2", ["meter.every=2"]),
    "meter.draws": ("2", ["meter.every=2"]),
}
PAPER = ["none", "bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn"]
BY_THE_MACHINE = {"model.init", "train.processes", "train.smoke", "data.stand_in"}
WITHOUT_EFFECT = {"train.evaluate_every"}


def test_identity_changes_with_every_setting():
    added = {f"norm.{option}" for name, kind in methods().items() if name not in PAPER for option in kind.defaults}
    assert set(keys()) - added <= set(OTHERS) | BY_THE_MACHINE | WITHOUT_EFFECT <= set(keys())
    seen = {}
    for key, (value, beside) in OTHERS.items():
        before, after = recipe.load("cpu-resnet", beside), recipe.load("cpu-resnet", [*beside, f"{key}={value}"])
        assert before.identity != after.identity, key
        assert seen.setdefault(after.identity, key) == key  # nor are two of them the same
    plain = recipe.load("cpu-resnet")
    assert recipe.load("cpu-resnet", ["data.split_seed=run"]).identity not in {plain.identity, *seen}
    written = ["model.zero_init_last=false", "optim.warmup_prefix=true", "optim.min_lr=0", "train.accumulation_steps=1"]
    assert recipe.load("cpu-resnet", written).identity == plain.identity  # explicit defaults
    assert recipe.load("cpu-resnet", smoke=True).identity != plain.identity
    resolved = {
        recipe.identity(recipe.resolve(plain.settings, device=device, processes=processes, stand_in=stand_in))
        for device in ("cpu", "cuda")
        for processes in (1, 2)
        for stand_in in (False, True)
    }
    assert len(resolved) == 8


def test_identity_does_not_depend_on_how_often_a_run_is_evaluated():
    plain = recipe.load("cpu-resnet")
    for value in ("1", "2", "1000"):
        made = recipe.load("cpu-resnet", [f"train.evaluate_every={value}"])
        assert made.settings.train.evaluate_every == int(value)
        assert "evaluate_every" not in made.canonical()
        assert made.canonical() == plain.canonical()
        assert made.identity == plain.identity
        assert recipe.key(made.settings) == recipe.key(plain.settings)
        resolved = [recipe.resolve(each.settings, device="cpu", processes=2) for each in (made, plain)]
        assert len({recipe.identity(each) for each in resolved}) == 1
        stored = recipe.stored(json.loads(resolved[0].model_dump_json(exclude_none=True)))
        assert stored.train.evaluate_every == int(value)
        assert recipe.identity(stored) == recipe.identity(resolved[0])


@pytest.mark.parametrize(
    ("value", "rule"),
    [("0", "must be 1 or more"), ("-1", "must be 1 or more"), ("1.5", "must be an integer"), ("true", "must be an "
     "integer"), ("often", "must be an integer")],
)  # fmt: skip
def test_invalid_values_of_evaluate_every(value, rule):
    with pytest.raises(UserError) as caught:
        recipe.load("digits", [f"train.evaluate_every={value}"])
    said = str(caught.value)
    assert said.startswith(f"train.evaluate_every={value!r}" if value == "often" else f"train.evaluate_every={value}")
    assert said.endswith(f": {rule}")
    assert "\n" not in said

import math

import pytest

from ghostnoise.lab.config.overrides import overridden

TREE = {
    "seed": 1,
    "model": {"name": "mlp", "widths": [64, 32]},
    "norm": {"method": "gni", "ghost_size": 16, "components": "shift", "placement": "after", "eps": 1e-4},
    "data": {"name": "cifar10", "augment": "flip-crop", "padding": 2, "limit": 100},
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.8, "clip": 1.0},
    "train": {"epochs": 10, "batch_size": 64},
}


def refusal(*overrides):
    made, lines = overridden(TREE, overrides)
    assert made == TREE
    return "\n".join(lines)


def changed(tree, *overrides):
    made, lines = overridden(tree, overrides)
    assert not lines
    return made


def after(section, *overrides):
    return changed(TREE, *overrides)[section]


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("norm.ghost_size=32", "norm", "ghost_size", 32),
        (" norm.ghost_size = 32 ", "norm", "ghost_size", 32),
        ("model.widths=[512,300]", "model", "widths", [512, 300]),
        ("norm.method=bn", "norm", "method", "bn"),
        ("norm.method='bn'", "norm", "method", "bn"),
        ("train.amp=none", "train", "amp", "none"),
        ("train.channels_last=true", "train", "channels_last", True),
        ("train.channels_last=True", "train", "channels_last", "True"),  # not TOML's: validation refuses it
        ("optim.lr=5e-4", "optim", "lr", 5e-4),
        ("optim.lr=.5", "optim", "lr", 0.5),
        ("optim.lr=1.", "optim", "lr", 1.0),
        ("optim.lr=-.5e1", "optim", "lr", -5.0),
        ("optim.lr=inf", "optim", "lr", math.inf),
        ("data.folder=my images", "data", "folder", "my images"),
        ("data.folder=2012", "data", "folder", "2012"),
        ("data.folder=.5", "data", "folder", ".5"),
        ("data.folder='2012'", "data", "folder", "2012"),
        ("data.folder='unset'", "data", "folder", "unset"),
        ("data.folder=a=b", "data", "folder", "a=b"),
        ("data.folder='a,b'", "data", "folder", "a,b"),
        ("model.name=timm:resnet10t", "model", "name", "timm:resnet10t"),
    ],
)
def test_values_are_toml_or_bare_words(override, section, name, value):
    made = after(section, override)[name]
    assert made == value
    assert type(made) is type(value)


def test_top_level_keys_and_missing_sections():
    assert changed(TREE, "seed=3")["seed"] == 3
    assert "seed" not in changed(TREE, "seed=unset")
    assert changed({}, "norm.method=bn") == {"norm": {"method": "bn"}}


def test_later_ones_win():
    assert after("norm", "norm.ghost_size=2", "norm.ghost_size=4")["ghost_size"] == 4
    assert after("norm", "norm.ghost_size=unset", "norm.ghost_size=4")["ghost_size"] == 4
    assert "ghost_size" not in after("norm", "norm.ghost_size=4", "norm.ghost_size=")


def test_a_section_of_which_nothing_is_left_is_none():
    assert changed(TREE, "meter.every=2")["meter"] == {"every": 2}
    assert "meter" not in changed(TREE | {"meter": {"every": 2}}, "meter.every=unset")


@pytest.mark.parametrize("override", ["data.limit=", "data.limit=unset", "data.test_limit=unset"])
def test_settings_can_be_removed(override):
    name = override.partition("=")[0].removeprefix("data.")
    assert name not in after("data", override)


def test_the_given_tree_stays():
    before = repr(TREE)
    changed(TREE, "norm.method=bn", "model.name=resnet8", "seed=9")
    assert repr(TREE) == before


@pytest.mark.parametrize(
    ("overrides", "section", "left"),
    [
        (["norm.method=bn"], "norm", {"method", "eps"}),
        (["norm.method=gbn"], "norm", {"method", "eps", "ghost_size"}),
        (["norm.method=agni"], "norm", {"method", "eps", "ghost_size", "components"}),  # the placement is its own
        (["norm.method=gni"], "norm", {"method", "eps", "ghost_size", "components", "placement"}),
        (["norm.method=dropout", "norm.p=0.1"], "norm", {"method", "eps", "p"}),
        (["norm.p=0.1", "norm.method=dropout"], "norm", {"method", "eps", "p"}),
        (["optim.name=adamw"], "optim", {"name", "lr", "clip"}),
        (["optim.name=sgd"], "optim", {"name", "lr", "clip", "momentum"}),
        (["optim.name=unset"], "optim", {"lr", "clip", "momentum"}),  # sgd
        (["data.augment=none"], "data", {"name", "augment", "limit"}),
        (["data.augment=unset"], "data", {"name", "limit"}),
        (["data.name=mnist"], "data", {"name", "augment", "padding", "limit"}),
        (["data.name=imagefolder", "data.folder=x"], "data", {"name", "folder", "limit"}),
        (["model.name=resnet18"], "model", {"name"}),
        (["model.name=resnet18", "model.width=8"], "model", {"name", "width"}),
        (["model.name=mlp"], "model", {"name", "widths"}),
        (["model.name=resnet18"], "norm", {"method", "eps", "ghost_size", "components"}),
    ],
)
def test_a_new_choice_drops_what_does_not_belong_to_it(overrides, section, left):
    assert set(after(section, *overrides)) == left


def test_from_a_folder_of_images():
    tree = {"data": {"name": "imagefolder", "folder": "x", "image_size": 64, "augment": "resized-crop", "limit": 9}}
    assert changed(tree, "data.name=cifar10")["data"] == {"name": "cifar10", "limit": 9}


def test_what_is_given_by_hand_stays():
    made = after("norm", "norm.method=bn", "norm.ghost_size=4")
    assert made["ghost_size"] == 4  # for validation to refuse


def test_what_is_no_section_is_left_to_validation():
    assert changed({"norm": 3}, "norm.method=bn", "model.name=mlp") == {"norm": 3, "model": {"name": "mlp"}}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("norm.ghost_size", "'norm.ghost_size': must be key=value, such as norm.ghost_size=16"),
        ("=3", "'=3': must be key=value, such as norm.ghost_size=16"),
        ("norm.ghost_sise=3", "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
        ("ghost_size=3", "ghost_size: unknown; did you mean norm.ghost_size or meter.ghost_size?"),
        ("eps=3", "eps: unknown; did you mean norm.eps or optim.eps?"),
        ("sed=3", "sed: unknown; did you mean seed?"),
        ("norm.ghost_size=4,8", "'norm.ghost_size=4,8': several values are for `ghostnoise sweep`; give one, or quote a text"),  # noqa: E501
        ("norm=bn", "norm: a section; name one of its settings, such as norm.method=..."),
        ("train.smoke=true", "train.smoke: set by --smoke, not by hand; leave it out"),
        ("data.stand_in=true", "data.stand_in: set by --smoke, not by hand; leave it out"),
        ("train.processes=2", "train.processes: set by torchrun, not by hand; leave it out"),
        ("model.widths=[1,", "'model.widths=[1,': the value is not valid TOML; write a number, true, false, a word, 'text' or "  # noqa: E501
         "[1, 2]"),
        ("seed=1\nother=2", "'seed=1\\nother=2': the value is not valid TOML; write a number, true, false, a word, 'text' or "  # noqa: E501
         "[1, 2]"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(override, line):
    assert refusal(override) == line


def test_every_mistake_gets_its_line():
    assert len(refusal("seed", "x.y=1", "train.smoke=true").splitlines()) == 3


def test_what_is_right_is_applied_all_the_same():
    made, lines = overridden(TREE, ["x.y=1", "seed=2"])
    assert made == {**TREE, "seed": 2}
    assert len(lines) == 1

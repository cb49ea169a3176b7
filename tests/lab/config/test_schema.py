import pytest
from pydantic import ValidationError

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.overrides import SECTIONS, validated
from ghostnoise.lab.config.schema import (
    AdamW,
    DataSettings,
    ImageFolder,
    ModelSettings,
    OptimSettings,
    Section,
    Settings,
    Sgd,
    TrainSettings,
)
from ghostnoise.lab.errors import UserError

VALID = {
    "model": {"name": "resnet18"}, "norm": {"method": "bn"}, "data": {"name": "cifar10"}, "optim": {"lr": 1.0},
    "train": {"epochs": 10, "batch_size": 64},
}  # fmt: skip


def refusal(section, **given):
    """The line that a recipe with these settings in a section gets, without the name of the section."""
    name = next(name for name, kind in SECTIONS.items() if kind is section)
    with pytest.raises(UserError) as error:
        validated(VALID | {name: given})
    return str(error.value).removeprefix(f"{name}.").replace(f"\n{name}.", "\n")


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("gni", {"ghost_size": 4, "components": "both", "noise_eps": 1e-3}),
        ("agni", {"ghost_size": 4, "components": "both", "noise_eps": 1e-3, "law": "fc", "dof": "paper"}),
        ("dropout", {"p": 0.1, "distribution": "bernoulli", "per": "element"}),
        ("bn", {"eps": 1e-5, "momentum": 0.1, "scope": "local"}),
    ],
)
def test_defaults_of_a_method_are_the_same_written_or_not(method, written):
    needed = {name: value for name, value in written.items() if name in ("ghost_size", "p")}
    assert NormSettings(method=method, **needed) == NormSettings(method=method, **written)


def test_the_base_makes_instances_of_its_kinds():
    assert type(OptimSettings(lr=1)) is Sgd
    assert type(OptimSettings.model_validate({"lr": 1, "name": "adamw"})) is AdamW
    assert type(DataSettings(name="imagefolder", folder="x")) is ImageFolder
    assert type(NormSettings(method="bn")) is type(NormSettings(method="bn", eps=1e-3))
    with pytest.raises(ValidationError, match="'sgd', 'adamw' or"):
        OptimSettings(lr=1, name="adam")
    with pytest.raises(ValidationError, match="frozen"):
        OptimSettings(lr=1).lr = 2


def test_a_copy_with_other_values_has_texts_of_its_own():
    """The texts of a section are kept, since thousands of runs share it."""
    settings = recipe.load("table1").settings
    before = recipe.identity(settings), recipe.key(settings)
    other = settings.model_copy(update={"optim": settings.optim.model_copy(update={"lr": 0.7})})
    assert not set(before) & {recipe.identity(other), recipe.key(other)}
    assert recipe.identity(other) == recipe.load("table1", ["optim.lr=0.7"]).identity


def test_defaults_of_the_others():
    assert OptimSettings(lr=1) == OptimSettings(lr=1.0, name="sgd", momentum=0.9, nesterov=False)
    assert OptimSettings(lr=1, name="adamw") == OptimSettings(lr=1, name="adamw", betas=[0.9, 0.999], eps=1e-8)
    assert DataSettings(name="cifar10", augment="flip-crop").padding == 4
    folder = DataSettings(name="imagefolder", folder="here")
    assert (folder.image_size, folder.resize) == (224, 256)


BELONGING = {
    "ghost_size": (4, {"gbn", "xbn", "en", "gni", "agni"}),
    "scope": ("global", {"bn", "gbn", "xbn", "en", "gni", "agni"}),
    "components": ("shift", {"gni", "agni"}),
    "noise_eps": (1e-4, {"gni", "agni"}),
    "law": ("conv", {"agni"}),
    "dof": ("exact", {"agni"}),
    "p": (0.1, {"dropout"}),
    "distribution": ("gaussian", {"dropout"}),
    "per": ("channel", {"dropout"}),
    "p_sets": ("std", {"dropout"}),
    "std": (0.1, {"eagn"}),
    "placement": ("after", {"gni", "agni", "dropout", "eagn"}),
}
NEEDED = {"gbn": "ghost_size", "en": "ghost_size", "gni": "ghost_size", "agni": "ghost_size", "dropout": "p",
          "eagn": "std"}  # fmt: skip


@pytest.mark.parametrize("method", ["none", "bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn"])
def test_a_method_takes_its_own_settings_and_no_others(method):
    needed = {name: BELONGING[name][0] for name in [NEEDED.get(method)] if name}
    NormSettings(method=method, **needed)
    for name, (value, methods) in BELONGING.items():
        if method in methods:
            assert getattr(NormSettings(method=method, **{**needed, name: value}), name) == value
        else:
            line = refusal(NormSettings, method=method, **needed, **{name: value})
            assert line.startswith(f"{name}={value!r}: a setting of ")
            assert line.endswith(f"and method is {method!r}; leave {name} out")


@pytest.mark.parametrize(("method", "name"), NEEDED.items())
def test_a_method_needs_its_strength(method, name):
    assert refusal(NormSettings, method=method) == f"{name}: missing; {method} has no default for it, give one"


def test_every_stray_setting_is_named():
    lines = refusal(NormSettings, method="bn", ghost_size=4, p=0.1).splitlines()
    assert [line.partition("=")[0] for line in lines] == ["ghost_size", "p"]


@pytest.mark.parametrize(
    ("section", "given", "line"),
    [
        (DataSettings, {"name": "mnist", "padding": 2}, "padding=2: a setting of flip-crop, and augment is 'none'"),
        (DataSettings, {"name": "mnist", "folder": "x"}, "folder='x': a setting of imagefolder, and name is 'mnist'"),
        (DataSettings, {"name": "mnist", "resize": 9}, "resize=9: a setting of imagefolder, and name is 'mnist'"),
        (DataSettings, {"name": "imagefolder"}, "folder: missing; imagefolder has no default for it, give one"),
        (
            DataSettings,
            {"name": "imagefolder", "folder": "x", "image_size": 300},
            "resize=256: must be image_size=300 or more; raise it",
        ),
        (
            DataSettings,
            {"name": "cifar10", "augment": "resized-crop"},
            "augment='resized-crop': must be 'none' or 'flip-crop'",
        ),
        (
            DataSettings,
            {"name": "imagefolder", "folder": "x", "augment": "flip-crop"},
            "augment='flip-crop': must be 'none' or 'resized-crop'",
        ),
        (
            DataSettings,
            {"name": "mnist1d", "augment": "flip-crop"},
            "augment='flip-crop': a setting of digits, mnist, fashion-mnist, cifar10, cifar100, ",
        ),
        (
            DataSettings,
            {"name": "mnist1d", "split_seed": 1},
            "split_seed=1: a setting of digits, mnist, fashion-mnist, cifar10, cifar100, imagefolder, ",
        ),
        (OptimSettings, {"lr": 1, "eps": 1e-3}, "eps=0.001: a setting of adamw, and name is 'sgd'; leave eps out"),
        (OptimSettings, {"lr": 1, "name": "adamw", "momentum": 0.5}, "momentum=0.5: a setting of sgd, and name is"),
        (
            OptimSettings,
            {"lr": 1, "nesterov": True, "momentum": 0.0},
            "nesterov with momentum=0.0: it needs momentum above 0",
        ),
        (OptimSettings, {"lr": 1, "min_lr": 1.0}, "min_lr=1: must be below lr=1; lower it or leave it out"),
        (
            OptimSettings,
            {"lr": 0.1, "warmup_epochs": 1, "warmup_lr": 0.2},
            "warmup_lr=0.2: must be below lr=0.1; lower it or leave it out",
        ),
        (OptimSettings, {"lr": 1, "warmup_lr": 0.0}, "warmup_lr with warmup_epochs=0: there is no warm-up; leave"),
        (OptimSettings, {"lr": 1, "warmup_prefix": False}, "warmup_prefix with warmup_epochs=0: there is no warm-up"),
        (DataSettings, {"name": "mnist", "split_seed": -1}, "split_seed=-1: must be an integer of 0 or more, or 'run'"),
        (
            DataSettings,
            {"name": "mnist", "split_seed": "seed"},
            "split_seed='seed': must be an integer of 0",
        ),
    ],
)
def test_what_does_not_go_together(section, given, line):
    assert refusal(section, **given).startswith(line)


@pytest.mark.parametrize(
    ("section", "given"),
    [
        (TrainSettings, {"epochs": 2.0, "batch_size": 4}),
        (TrainSettings, {"epochs": True, "batch_size": 4}),
        (TrainSettings, {"epochs": 2, "batch_size": "4"}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "compile": 1}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "evaluate_every": 0}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "evaluate_every": -1}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "evaluate_every": 1.5}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "evaluate_every": True}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "device": "gpu"}),
        (TrainSettings, {"epochs": 2, "batch_size": 4, "ema": float("nan")}),
        (OptimSettings, {"lr": float("inf")}),
        (OptimSettings, {"lr": True}),
        (OptimSettings, {"lr": 0.1, "warmup_epochs": float("nan")}),
        (NormSettings, {"method": "dropout", "p": 1.0}),
        (NormSettings, {"method": "dropout", "p": float("nan")}),
        (ModelSettings, {"name": "mlp", "widths": []}),
    ],
)
def test_nothing_is_converted_or_infinite(section, given):
    refusal(section, **given)


@pytest.mark.parametrize("section", [Settings, ModelSettings, NormSettings, DataSettings, OptimSettings, TrainSettings])
def test_every_setting_is_explained_or_plain(section):
    plain = {"name", "lr", "epochs", "label_smoothing", "channels_last", "compile", "seed"} | set(Settings.model_fields)
    assert issubclass(section, Section)
    for kind in (section, *section.kinds().values()):
        for name, field in kind.model_fields.items():
            known = field.description or section.model_fields.get(name, field).description
            assert known or name in plain or name in getattr(kind, "defaults", ())

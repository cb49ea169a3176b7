"""A user's own networks, data sets and optimizers: names, errors before training, identities, and whole runs."""

import io
import json
import pickle

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import ghostnoise
from ghostnoise import cli
from ghostnoise.cli import recipes
from ghostnoise.lab import data, models
from ghostnoise.lab.config import grid, own, recipe
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import DataSettings, ModelSettings, OptimSettings
from ghostnoise.lab.data import DatasetInfo
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.train.session import build_optimizer

PARTS = "support.own_parts"
NET, IMAGES, SIGNALS, OPTIMIZER = (f"{PARTS}:{name}" for name in ("network", "images", "signals", "optimizer"))
CPU = torch.device("cpu")


def refusal(function, *given, **options):
    with pytest.raises(UserError) as error:
        function(*given, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "mine"),
    [(NET, True), ("nets:Net.of", True), ("torch.optim:RMSprop", True), ("timm:resnet18", False), ("resnet18", False),
     (":f", False), ("m:", False), ("a/b.py:f", False), ("C:\\nets:f", False), (None, False)],
)  # fmt: skip
def test_names_of_own_parts(name, mine):
    assert own.named(name) is mine


@pytest.mark.parametrize("section", ["model", "data", "optim"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package.nets:f", "no_such_package.nets cannot be imported (there is no module 'no_such_package'); "
         "install its package, or run this from the folder that contains it"),
        (f"{PARTS}:netwrk", f"{PARTS} has no 'netwrk'; did you mean network?"),
        (f"{PARTS}:NUMBER", "is not a function but int; name a function or class"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_an_error_of_the_recipe(section, name, said):
    assert refusal(recipe.load, "digits", [f"{section}.name={name}"]) == f"{section}.name={name!r}: {said}"
    assert said in refusal(lambda: grid.load("digits", [f"{section}.name={name}"], seeds=[0, 1]).cells())


def test_a_module_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_nets.py").write_text("raise RuntimeError('two\\nlines')")
    said = refusal(recipe.load, "digits", ["model.name=failing_nets:f"])
    assert "failing_nets cannot be imported (RuntimeError: two lines); correct it" in said


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_of_this_folder.py").write_text("def f(shape, classes): pass")
    assert recipe.load("digits", ["model.name=nets_of_this_folder:f"]).settings.model.name == "nets_of_this_folder:f"


def test_identities_hold_the_name_and_the_arguments():
    def made(*overrides):
        return recipe.load("digits", [f"model.name={NET}", *overrides])

    plain, wide = made(), made("model.args.width=16", "model.args.norm=false")
    assert wide.settings.model.args == {"width": 16, "norm": False}
    assert f'"model":{{"args":{{"norm":false,"width":16}},"name":"{NET}"}}' in wide.canonical()
    assert wide.identity == made("model.args={norm = false, width = 16}").identity
    assert len({plain.identity, wide.identity, made("model.args.width=9").identity}) == 3
    assert made("model.args.width=9", "model.args.width=").identity == plain.identity
    stored = json.loads(wide.settings.model_dump_json(exclude_none=True))
    assert recipe.stored(stored) == wide.settings == pickle.loads(pickle.dumps(wide.settings))


def test_an_argument_can_be_an_axis():
    cells = grid.load("digits", [f"model.name={NET}", "model.args.width=4,8"]).cells()
    assert [cell.cell for cell in cells] == ["GNI width=4", "GNI width=8"]
    assert [cell.settings.model.args for cell in cells] == [{"width": 4}, {"width": 8}]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.args.x=3"], "model.args: a setting of your own networks, and name is 'digits-net'; leave args out"),
        ([f"model.name={NET}", "model.width=3"], "model.width: a setting of the networks of this library, and name is "
         f"'{NET}'; leave width out"),
        (["optim.args.x=1"], "optim.args={'x': 1}: a setting of package.module:function, and name is 'sgd'; leave "
         "args out"),
        (["model.arg.x=1"], "model.arg.x: unknown; did you mean"),
    ],
)  # fmt: skip
def test_arguments_without_an_own_part(overrides, line):
    assert refusal(recipe.load, "digits", overrides).startswith(line)


def test_another_network_drops_the_arguments_of_the_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    text = recipe.read("digits").replace('name = "digits-net"', f'name = "{NET}"\nargs.width = 5')
    path.write_text(text)
    assert recipe.load(str(path)).settings.model.args == {"width": 5}
    assert recipe.load(str(path), [f"model.name={PARTS}:Net"]).settings.model.args is None
    assert recipe.load(str(path), ["model.name=digits-net"]).settings.model.args is None


def built(method, name=NET, **given):
    norm = {"ghost_size": 4} if method == "gni" else {}
    settings = ModelSettings(name=name, **given)
    return models.build(settings, NormSettings(method=method, eps=1e-3, **norm), (2, 6, 6), 3)


def test_batch_norms_of_an_own_network_are_converted():
    assert isinstance(built("gni")[2], ghostnoise.GhostNoiseBatchNorm1d)
    plain = built("bn", args={"width": 16})[2]
    assert (type(plain), plain.num_features, plain.eps) == (nn.BatchNorm1d, 16, 1e-3)


def test_noise_of_an_own_network_without_batch_norm_follows_its_norms():
    norm = NormSettings(method="gni", ghost_size=4)
    model = models.build(ModelSettings(name=NET, args={"norm": False}), norm, (2, 6, 6), 3)
    assert any(isinstance(layer, ghostnoise.GhostNoise) for layer in model.modules())
    assert models.placement(NET, "gni") is None


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        (NET, {"widht": 3}, "cannot be called with them (got an unexpected keyword argument 'widht'); correct model."),
        (IMAGES, {"folder": 1}, "cannot be called with them (multiple values for argument 'folder')"),
        (f"{PARTS}:Net", {"x": 1}, "cannot be called with them (got an unexpected keyword argument 'x')"),
        (SIGNALS, {"kind": "float32"}, "returned tuple; must return a torch.nn.Module"),
    ],
)
def test_a_function_that_is_no_network(name, args, said):
    assert said in refusal(models.build, ModelSettings(name=name, args=args), NormSettings(method="none"), (1, 8, 8), 3)


def opened(name=IMAGES, **given):
    settings = DataSettings(name=name, **given)
    return data.open_source(settings, data.data_folder(None), batch_size=10, seed=0, device=CPU)


def test_own_images_are_split_normalized_and_augmented():
    source = opened()
    assert source.info == DatasetInfo((2, 6, 6), 3, 108, 12)
    x = torch.cat([x for x, _ in [*source.batches(0), *source.evaluation()]])
    assert x.dtype == torch.float32
    tested = opened(evaluate="test")
    assert tested.info == DatasetInfo((2, 6, 6), 3, 120, 60)
    whole = torch.cat([x for x, _ in tested.batches(0)])  # all training images, with which they are normalized
    assert whole.mean((0, 2, 3)).abs().max() < 1e-4
    assert (whole.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-3
    crops = opened(evaluate="test", augment="flip-crop", padding=1)
    assert not torch.equal(next(crops.batches(0))[0], next(tested.batches(0))[0])
    assert opened(limit=50, args={"classes": 2}).info == DatasetInfo((2, 6, 6), 2, 45, 5)


def test_own_signals_are_used_as_they_are():
    source = opened(SIGNALS, evaluate="test")
    x = torch.cat([x for x, _ in source.batches(0)])
    assert (x.shape, x.dtype, source.info.classes) == ((90, 1, 12), torch.float32, 2)
    assert abs(float(x.mean()) - 0.5) < 5 / x.numel() ** 0.5


def returning(value, monkeypatch):
    from support import own_parts

    monkeypatch.setattr(own_parts, "images", lambda folder, split: value[split] if isinstance(value, dict) else value)
    own.load.cache_clear()
    return opened


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, "returned int for the split 'train'; must return a pair (images, labels)"),
        ((np.zeros((4, 5)), np.zeros(4, int)), "returned images of shape (4, 5) in float64"),
        ((np.zeros((4, 1, 2, 2), np.int64), np.zeros(4, int)), "in int64 for the split"),
        ((np.zeros((4, 1, 2, 2)), np.zeros(4)), "returned labels of shape (4,) in float64"),
        ((np.zeros((4, 1, 2, 2)), np.zeros(3, int)), "for each of the 4 images"),
        ((np.zeros((4, 1, 2, 2)), -np.ones(4, int)), "an integer of 0 or more"),
        ((np.zeros((40, 1, 2, 2), np.uint8), np.arange(40)), "a channel of its images is constant"),
    ],
)
def test_a_function_that_returns_no_data_set(returned, said, monkeypatch):
    assert said in refusal(returning(returned, monkeypatch))
    own.load.cache_clear()


def test_test_images_must_fit_the_training_images(monkeypatch):
    ramp = np.arange(160, dtype=np.uint8).reshape(40, 1, 2, 2)
    parts = {"train": (ramp, np.arange(40) % 2), "test": (ramp, np.arange(40) % 3)}
    said = refusal(returning(parts, monkeypatch), evaluate="test")
    assert "with labels up to 2 for the split 'test'; must return a pair (images, labels) that fits" in said
    own.load.cache_clear()


def test_crops_of_values_in_float_are_refused():
    assert "needs images in uint8, not float64" in refusal(opened, SIGNALS, augment="flip-crop")


def test_an_own_optimizer_gets_the_groups_and_the_learning_rate():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    settings = OptimSettings(name=OPTIMIZER, lr=0.3, weight_decay=0.01, args={"beta": 0.7})
    made = build_optimizer(model, settings)
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in made.param_groups] == [
        (0.3, 0.7, 0.01), (0.3, 0.7, 0.0),
    ]  # fmt: skip
    library = build_optimizer(model, OptimSettings(name="torch.optim:RMSprop", lr=0.1, args={"alpha": 0.5}))
    assert (type(library), library.param_groups[0]["alpha"]) == (torch.optim.RMSprop, 0.5)


RECIPE = f"""
[model]
name = "{NET}"
args.width = 6
[norm]
method = "gni"
ghost_size = 4
[data]
name = "{IMAGES}"
[optim]
name = "{OPTIMIZER}"
lr = 0.05
[train]
epochs = 2
batch_size = 12
"""


def test_a_run_with_own_parts_only(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    words = ["train", str(path), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    assert cli.main(words) == 0
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    made = recipe.load(str(path)).settings
    assert folder.name == recipe.identity(recipe.resolve(made, device="cpu", processes=1))
    assert "GNI-4" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_recipe_is_shown_with_what_its_identity_leaves_out(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    shown = Console(file=io.StringIO(), width=200)
    recipes.print_recipe(str(tmp_path / "mine.toml"), shown)
    line = f"the identity holds name and args of model.name={NET} and data.name={IMAGES} and optim.name={OPTIMIZER}, "
    assert f"{line}but not the code" in shown.file.getvalue()

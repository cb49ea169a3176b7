"""Loading, identity and resolution; the files themselves are in test_recipes.py."""

import os
import tomllib

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.overrides import changed, validated
from ghostnoise.lab.errors import UserError

MINE = """# Claim: it works
# Command: ghostnoise train mine
# Time: 1 s (a core)
# Score: none

seed = 3
[model]
name = "resnet8"
[norm]
method = "gni"
ghost_size = 4
[data]
name = "digits"
[optim]
lr = 0.1
[train]
epochs = 2
batch_size = 8
"""


def write(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*arguments, **named):
    with pytest.raises(UserError) as error:
        recipe.load(*arguments, **named)
    return str(error.value)


def test_a_recipe_of_the_package():
    made = recipe.load("digits")
    assert made.name == "digits"
    assert made.command == "ghostnoise train digits"
    assert made.text == recipe.read("digits")
    assert made.settings.data.name == "digits"


def test_a_recipe_of_ones_own(tmp_path, monkeypatch):
    path = write(tmp_path, MINE)
    made = recipe.load(path)
    assert (made.name, made.claim, made.command) == ("mine", "it works", "ghostnoise train mine")
    assert (made.time, made.score, made.text) == ("1 s (a core)", "none", MINE)
    assert made.settings.seed == 3
    monkeypatch.chdir(tmp_path)
    assert recipe.load("mine.toml") == recipe.load(os.path.join(".", "mine.toml")) == made


def test_a_header_is_not_needed_in_ones_own(tmp_path):
    made = recipe.load(write(tmp_path, MINE.partition("\n\n")[2]))
    assert (made.claim, made.command, made.time, made.score) == ("", "", "", "")


def test_a_header_ends_with_the_first_comments():
    found = recipe.header("# Claim: a: b\n# more\n# Time: 1\n\n# Score: 3\n")
    assert found == {"claim": "a: b", "command": "", "time": "1", "score": ""}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tabel1", "recipe 'tabel1': not found; did you mean table1 or "),
        ("cpu", "recipe 'cpu': not found; did you mean cpu-mlp"),
        ("xyzzy", "recipe 'xyzzy': not found; `ghostnoise recipes` lists all"),
    ],
)
def test_unknown_names_get_the_nearest(name, line):
    text = refusal(name)
    assert text.startswith(line)
    assert text.endswith("`ghostnoise recipes` lists all")
    assert "\n" not in text


def test_files_that_cannot_be_read(tmp_path):
    remedy = "give the path of a .toml file, or a name that `ghostnoise recipes` lists"
    gone, folder = str(tmp_path / "gone.toml"), str(tmp_path / "folder.toml")
    os.mkdir(folder)
    assert refusal(gone) == f"recipe {gone}: cannot be read (No such file or directory); {remedy}"
    assert refusal(folder) == f"recipe {folder}: cannot be read (a folder instead of a file); {remedy}"
    latin = tmp_path / "latin.toml"
    latin.write_bytes("# Größe\n".encode("latin-1"))
    assert refusal(str(latin)) == f"recipe {latin}: is not UTF-8 text; save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("seed = 1\nseed = = 2\n", "line 2, column 8: "),
        ("seed = 1\nseed = 2\n", "line 2, "),
        ("seed", "end of document"),
    ],
)
def test_bad_toml_names_file_and_line(tmp_path, text, where):
    path = write(tmp_path, text)
    line = refusal(path)
    assert line.startswith(f"recipe {path}, ")
    assert where in line
    assert line.endswith("; fix the TOML there")
    assert "\n" not in line


def test_mistakes_in_files_and_overrides_get_the_same_lines(tmp_path):
    path = write(tmp_path, MINE)
    unknown = "norm.ghost_sise: unknown; did you mean norm.ghost_size?"
    assert refusal(write(tmp_path, MINE.replace("ghost_size", "ghost_sise"), "other.toml")).splitlines()[0] == unknown
    assert refusal(path, ["norm.ghost_sise=4"]) == unknown
    small = "norm.ghost_size=0: must be 1 or more"
    assert refusal(write(tmp_path, MINE.replace("ghost_size = 4", "ghost_size = 0"), "other.toml")) == small
    assert refusal(path, ["norm.ghost_size=0"]) == small
    misfit = "norm.ghost_size=9: larger than the batch of train.batch_size=8"
    assert refusal(path, ["norm.method=gbn", "norm.ghost_size=9"]).startswith(misfit)
    assert "resnet9" in refusal(path, ["model.name=resnet9"])
    assert "resnet9" in refusal(path, ["model.name=resnet9", "norm.method=bn"])


def test_all_mistakes_are_in_one_error():
    lines = refusal("table1", ["norm.ghost_sise=4", "optim.lr=0", "train.smoke=true", "seed=x"]).splitlines()
    assert lines == [
        "norm.ghost_sise: unknown; did you mean norm.ghost_size?",
        "train.smoke: set by --smoke, not by hand; leave it out",
        "optim.lr=0: must be above 0",
        "seed='x': must be an integer",
    ]


def test_overrides_change_settings_and_not_the_text(tmp_path):
    path = write(tmp_path, MINE)
    made = recipe.load(path, ["norm.method=bn", "seed=4"])
    assert made.settings.norm.method == "bn"
    assert made.settings.norm.ghost_size is None
    assert made.settings.seed == 4
    assert made.text == MINE
    stray = "norm.ghost_size=16: a setting of gbn, xbn, en, gni, agni, sgbn, and method is 'bn'; leave ghost_size out"
    assert refusal(path, ["norm.method=bn", "norm.ghost_size=16"]) == stray


@pytest.mark.parametrize(
    ("network", "overrides", "placement"),
    [
        ("resnet18", [], "inside"),
        ("simple-vit", [], "after"),
        ("nf-resnet26", [], "activation"),
        ("resnet18", ["norm.method=dropout", "norm.p=0.1"], "branch"),
        ("resnet18", ["norm.placement=after"], "after"),
        ("resnet18", ["norm.method=gbn"], None),
        ("resnet18", ["norm.method=bn"], None),
    ],
)
def test_noise_is_placed_where_the_network_has_it(tmp_path, network, overrides, placement):
    made = recipe.load(write(tmp_path, MINE), [f"model.name={network}", *overrides])
    assert made.settings.norm.placement == placement


def test_a_default_placement_is_the_same_run_written_or_not(tmp_path):
    path = write(tmp_path, MINE)
    assert recipe.load(path).identity == recipe.load(path, ["norm.placement=inside"]).identity
    assert recipe.load(path).identity != recipe.load(path, ["norm.placement=after"]).identity


def test_resolving_fills_in_the_machine(tmp_path):
    settings = recipe.load(write(tmp_path, MINE)).settings
    made = recipe.resolve(settings, device="cpu", processes=2)
    assert made == changed(settings, train={"device": "cpu", "processes": 2})
    assert recipe.resolve(made, device="cpu", processes=2) == made
    with pytest.raises(UserError, match=r"train\.device='tpu': must be 'auto', 'cpu', 'cuda' or 'mps'"):
        recipe.resolve(settings, device="tpu", processes=1)


def test_resolving_places_noise_of_settings_made_in_python():
    settings = validated({**tomllib.loads(MINE), "model": {"name": "simple-vit"}})
    assert settings.norm.placement is None
    assert recipe.resolve(settings, device="cpu", processes=1).norm.placement == "after"


def test_half_precision_is_left_for_check_to_refuse():
    settings = recipe.load("table3-vit").settings
    made = recipe.resolve(settings, device="cpu", processes=1)
    assert made.train.amp == "fp16"
    with pytest.raises(UserError, match="needs a GPU"):
        recipe.check(made)
    recipe.check(recipe.resolve(settings, device="cuda", processes=1))

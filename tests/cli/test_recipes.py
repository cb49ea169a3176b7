import io

import pytest
from rich.console import Console

from ghostnoise import cli
from ghostnoise.cli import recipes
from ghostnoise.lab.config import recipe


def printed(name=None, **options):
    console = Console(file=io.StringIO(), width=80, **options)
    if name is None:
        recipes.print_list(console)
    else:
        recipes.print_recipe(name, console)
    return console.file.getvalue()


def test_list_has_every_recipe_cpu_sized_ones_first():
    text = printed()
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0] in recipe.names()]
    assert sorted(rows) == recipe.names()
    assert rows[0] == "digits"
    on_cpu = ["CPU" in recipe.header(recipe.read(name))["time"] for name in rows]
    assert on_cpu == sorted(on_cpu, reverse=True)
    on_signals = {name for name in recipe.names() if name.startswith("mnist1d-")}
    resnets = {name for name in recipe.names() if name.startswith(("cpu-resnet", "resnet8-"))}
    assert {"digits", "demo", "cpu-mlp", "fig6", "table4"} | resnets | on_signals == set(rows[: sum(on_cpu)])
    assert "about 5 s" in text
    assert "ghostnoise sweep NAME" in text
    assert "ghostnoise train NAME" in text
    assert "--variant released" in text


@pytest.mark.parametrize("name", recipe.names())
def test_one_recipe_is_its_text_and_identity(name):
    text = printed(name)
    assert [line.rstrip() for line in text.splitlines()[: recipe.read(name).count("\n")]] == (
        recipe.read(name).splitlines()
    )
    assert f"identity {recipe.load(name).identity}" in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fig1", "runs of a sweep: 27; methods: 2; seeds: 3"),
        ("table1", "runs of a sweep: 111; methods: 5; seeds: 3; test runs of the best cell of each tuned method: 12"),
        ("digits", None),
    ],
)
def test_one_recipe_shows_the_number_of_runs_of_its_sweep(name, line):
    last = printed(name).splitlines()[-1]
    assert last == line if line else "a sweep" not in last


def test_a_variant_has_its_own_identity_and_number_of_runs(capsys):
    assert cli.main(["recipes", "fig3-dropout", "--variant", "released"]) == 0
    out = capsys.readouterr().out
    assert f"identity {recipe.load('fig3-dropout', variant='released').identity}" in out
    assert "runs of a sweep: 122; methods: 6; seeds: 5 or 3" in out
    assert cli.main(["recipes", "--variant", "released"]) == 2
    err = capsys.readouterr().err
    assert "--variant released: needs a recipe; the recipes that have this variant are fig1, fig3-agni, " in err
    assert err.count("\n") == 1


def test_a_terminal_gets_colours():
    assert "\x1b[" in printed("digits", force_terminal=True, color_system="truecolor")
    assert "\x1b[" not in printed("digits")


def test_the_command_lists_recipes_and_prints_one(capsys):
    assert cli.main(["recipes"]) == 0
    assert "table2-c10" in capsys.readouterr().out
    assert cli.main(["recipes", "digits"]) == 0
    assert 'method = "gni"' in capsys.readouterr().out


def test_an_unknown_recipe_is_one_line_with_a_suggestion(capsys):
    assert cli.main(["recipes", "digit"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean digits?" in err
    assert err.count("\n") == 1


def test_a_second_recipe_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["recipes", "a", "b"])
    assert exit_.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err

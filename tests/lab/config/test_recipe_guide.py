"""docs/guides/recipes.md documents all settings and recipes."""

import re
from pathlib import Path

import pytest

from ghostnoise.lab.config import grid, inheritance, recipe
from ghostnoise.lab.config.methods import methods
from ghostnoise.lab.config.overrides import SECTIONS
from ghostnoise.lab.config.schema import Settings

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")

# The methods of the paper; the options of others are documented in their cards.
PAPER = ("bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn")
DOCUMENTED = {option for name in PAPER for option in methods()[name].defaults}
ADDED = {option for kind in methods().values() for option in kind.defaults} - DOCUMENTED


def rows(heading):
    """Return the first and second cells of the table below a heading."""
    below = re.split(r"^#", GUIDE.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `([a-z0-9_-]+)` \|(.*?)\|", below, flags=re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_and_its_default(section):
    fields, table = SECTIONS[section].model_fields, rows(f"### [{section}]")
    documented = [name for name in SECTIONS[section].fields() if name not in ADDED]
    assert set(table) == set(documented)
    for name, field in fields.items():
        cell = table[name].strip().strip("`")
        if field.is_required():
            assert cell == ""
        elif field.default is not None:
            assert cell == str(field.default).lower() or float(cell) == field.default


def test_defaults_of_options():
    table = rows("### [norm]")
    for name in PAPER:
        for option, default in methods()[name].defaults.items():
            cell = table[option].strip().strip("`")
            if default is ...:
                assert cell == "required"
            elif default is None:
                assert cell == "unset"
            else:
                assert cell == str(default) or float(cell) == default


def test_settings_before_the_sections():
    assert list(rows("## The settings")) == [name for name in Settings.model_fields if name not in SECTIONS]


def test_every_recipe():
    assert sorted(rows("## The recipes")) == recipe.names()


@pytest.mark.parametrize("name", recipe.names())
def test_base_settings_are_the_recipes(name):
    line = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |"))
    norm, score = recipe.load(name).settings.norm, recipe.load(name).score
    if norm.ghost_size:
        assert f" {norm.method.upper()}-{norm.ghost_size} |" in line
    if found := re.match(r"[\d.]+( ± [\d.]+)?(?= %)", score):
        assert line.endswith(f"| {found[0]} |")
    else:
        assert line.endswith("| |")


def test_the_guides_example_is_a_grid(tmp_path):
    text = re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    made = grid.load(str(path))
    assert [cell.cell for cell in made.cells()] == ["BN", *(f"GNI ghost_size={size}" for size in (8, 16, 32))]
    assert made.seeds == [0, 1, 2]
    assert {cell.settings.data.evaluate for cell in made.cells()} == {"validation"}


def test_the_guide_has_every_key_of_a_variant():
    table = GUIDE.partition("\n| in `[variants.NAME]` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", table, flags=re.MULTILINE) == list(inheritance.KEYS)


@pytest.mark.parametrize(
    ("heading", "part"),
    [
        ("[grid]", grid.GridSettings),
        ("[[grid.methods]]", grid.Method),
        ("[select]", grid.Select),
        ("[report]", grid.ReportSettings),
    ],
)
def test_the_guide_has_every_setting_of_a_grid(heading, part):
    table = GUIDE.partition(f"\n| in `{heading}` |")[2].partition("\n\n")[0]
    cells = dict(re.findall(r"^\| `([a-z_]+)` \|(.*?)\|", table, flags=re.MULTILINE))
    assert list(cells) == list(part.model_fields)
    for name, field in part.model_fields.items():
        assert (cells[name].strip() == "") == field.is_required()
        if isinstance(field.default, str):
            assert cells[name].strip() == f"`{field.default}`"


def test_the_guides_extension_is_a_recipe(tmp_path):
    (text,) = (each for each in re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL) if "extends" in each)
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    made = grid.load(str(path))
    assert {run.label for run in made.cells()} == {"BN", "GNI"}
    assert (made.seeds, made.recipe.settings.data.evaluate) == ([0], "validation")

from pathlib import Path

import pytest

from ghostnoise import cli
from ghostnoise.cli import methods
from ghostnoise.methods import registry

INDEX = Path(__file__).parents[2] / "docs" / "methods" / "README.md"


def test_it_lists_every_method_with_its_options(capsys):
    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    for name, spec in registry.specs().items():
        assert f"{name}" in out
        assert spec.equation in out
        assert all(option.name in out for option in spec.options)
    assert "gni, gni-shift, gni-scale: Ghost noise injection (GNI)" in out


def documented():
    return INDEX.read_text().partition(methods.BEGIN)[2].partition(methods.END)[0].splitlines()


def test_the_documentation_has_no_stale_row():
    assert set(documented()) <= set(methods.table().splitlines())


@pytest.mark.slow
def test_the_documentation_has_every_row():
    """Run `ghostnoise methods --write docs/methods/README.md` after adding a method."""
    assert documented() == methods.table().splitlines()


def test_it_writes_the_table_between_the_markers(tmp_path, capsys):
    path = tmp_path / "index.md"
    path.write_text(f"before\n{methods.BEGIN}old\n{methods.END}\nafter\n")
    assert cli.main(["methods", "--write", str(path)]) == 0
    assert path.read_text() == f"before\n{methods.BEGIN}{methods.table()}{methods.END}\nafter\n"
    path.write_text("no markers")
    assert cli.main(["methods", "--write", str(path)]) == 2
    assert "must contain the markers" in capsys.readouterr().err

"""`ghostnoise report` as a user calls it."""

import os
from datetime import UTC, datetime

import pytest

from ghostnoise import cli
from ghostnoise.text import install_command
from support.records import experiment_with_runs
from support.run_folders import experiment, fill

GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, "GNI ghost_size=16": {0: 93.0, 1: 93.6}}


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "runs", experiment(tmp_path), GOOD)
    return tmp_path


def test_report_prints_the_table_and_the_page_last(there, capsys):
    assert cli.main(["report", "tiny.toml"]) == 0
    out, err = capsys.readouterr()
    assert "90.20 ± 0.20 (3)" in out
    assert "GNI > BN: inconclusive. GNI ghost_size=16" in out
    assert "5 of 9 runs finished; 4 missing." in out
    assert out.splitlines()[-1] == os.path.join("out", "tiny", "index.html")
    assert err == ""
    assert "ghostnoise report tiny.toml --runs runs" in (there / "out/tiny/index.html").read_text()


@pytest.mark.parametrize("seeds", ["0-1", "0..1", "0,1"])
def test_seeds_and_methods_can_be_chosen(there, capsys, seeds):
    assert cli.main(["report", "tiny.toml", "--seeds", seeds, "--only", "BN", "--out", "here"]) == 0
    assert "90.20 ± 0.28 (2)" in capsys.readouterr().out
    assert (there / "here" / "table.tex").exists()


def test_the_runs_of_a_variant_have_a_report_of_their_own(there, capsys):
    """The runs of the recipe itself, which are in another folder, are not mixed in."""
    with (there / "tiny.toml").open("a") as file:
        file.write("[variants.slow]\nset.optim.lr = 0.01\n")
    assert cli.main(["report", "tiny.toml", "--variant", "slow"]) == 0
    out = capsys.readouterr().out
    assert "0 of 9 runs finished; 9 missing." in out
    assert "90.1 ± 0.2" in out  # the paper's result
    assert out.splitlines()[-1] == os.path.join("out", "tiny-slow", "index.html")
    page = (there / "out/tiny-slow/index.html").read_text()
    assert "ghostnoise report tiny.toml --variant slow --runs runs" in page


def test_open_opens_the_page(there, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["report", "tiny.toml", "--open"]) == 0
    assert opened == [(there / "out" / "tiny" / "index.html").as_uri()]


def test_a_folder_without_runs_is_noted(there, capsys):
    assert cli.main(["report", "tiny.toml", "--runs", "mistyped"]) == 0
    out, err = capsys.readouterr()
    assert "9 missing" in out
    assert "warning: mistyped/tiny: not found, so there is no run to report; run `ghostnoise sweep tiny" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["report", "tiny.toml", "--out", "runs/tiny"], "which reports only read"),
        (["report", "tiny.toml", "--out", "tiny.toml"], "give another folder with --out"),
        (["report", "tiny.toml", "--only", "XBN"], "no such method; there are BN, GNI"),
        (["report", "tiny.toml", "--only", "gni"], "no such method; there are BN, GNI; did you mean GNI?"),
        (["report", "tini"], "not found"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("there")
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, line):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1


def test_what_is_missing_is_named(there, monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else real(name, *rest))
    assert cli.main(["report", "tiny.toml"]) == 2
    assert "scipy not installed; run " + install_command("lab") in capsys.readouterr().err


def test_the_report_of_records_is_that_of_the_runs(tmp_path, monkeypatch, capsys):
    """In every file, once from a file of records alone and once from imported runs; only the command differs."""
    monkeypatch.chdir(tmp_path)
    experiment_with_runs(tmp_path)
    assert cli.main(["runs", "export", "tiny", "--out", "tiny.jsonl"]) == 0
    assert cli.main(["runs", "import", "tiny.jsonl", "--runs", "imported"]) == 0
    (tmp_path / "none").mkdir()
    sources = {"runs": [], "records": ["--records", "tiny.jsonl", "--runs", "none"], "imported": ["--runs", "imported"]}
    monkeypatch.setattr("ghostnoise.cli.report.command_line", lambda options: "ghostnoise report tiny.toml")
    monkeypatch.setattr("ghostnoise.cli.report.datetime", Now)
    made = {}
    for name, options in sources.items():
        assert cli.main(["report", "tiny.toml", *options, "--out", f"out-{name}"]) == 0
        made[name] = {path.name: path.read_bytes() for path in (tmp_path / f"out-{name}").iterdir()}
    assert made["runs"].keys() >= {"table.md", "table.csv", "figure.png", "index.html"}
    for name in ("records", "imported"):
        assert made[name].keys() == made["runs"].keys()
        for file, content in made["runs"].items():
            place = {"records": b"tiny.jsonl", "imported": b"imported/tiny"}[name]
            assert made[name][file].replace(place, b"runs/tiny") == content, file


class Now(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2030, 1, 2, tzinfo=UTC)


def test_records_of_another_experiment_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment_with_runs(tmp_path)
    experiment(tmp_path, name="other")
    assert cli.main(["runs", "export", "tiny"]) == 0
    assert cli.main(["report", "other.toml", "--records", "results/tiny/records.jsonl"]) == 2
    assert "has the records of tiny, not of other" in capsys.readouterr().err

"""`ghostnoise uncertainty` as a user calls it."""

import csv

import pytest

from ghostnoise import cli

SHORT = ["train.epochs=1", "train.batch_size=64", "train.device=cpu", "optim.warmup_epochs=0", "data.limit=256"]
SELECTION = ["--seeds", "0", "--only", "GNI-16", "--only", "dropout-0.1", "--only", "GBN-16"]
SIZES = ["--samples", "3", "--test", "60", "--shifted", "40"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of runs and of data."""
    made = tmp_path_factory.mktemp("uncertainty")
    return ["--runs", str(made / "runs"), "--data-dir", str(made / "data")]


@pytest.fixture(scope="module")
def trained(folders):
    words = ["mnist1d-table1", *SHORT, *SELECTION, *folders]
    assert cli.main(["sweep", *words, "--workers", "1", "--threads", "1", "--quiet"]) == 0
    return words


@pytest.mark.slow
def test_runs_are_measured_once_and_shown(trained, tmp_path, capsys):
    out = tmp_path / "figures.csv"
    words = ["uncertainty", *trained, *SIZES, "--out", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader(out.read_text().splitlines()))
    kinds = [(row["method"], row["inference"]) for row in rows]
    assert kinds == [
        ("GBN-16", "deterministic"), ("GBN-16", "MC batch norm"), ("GNI-16", "deterministic"),
        ("GNI-16", "ghost noise"), ("dropout-0.1", "deterministic"), ("dropout-0.1", "MC dropout"),
    ]  # fmt: skip
    assert {row["samples"] for row in rows} == {"1", "3"}
    assert f"| GNI-16 | ghost noise | 1 | {float(rows[3]['accuracy']):.2f} |" in said
    before = out.read_bytes()
    assert cli.main(words) == 0
    assert out.read_bytes() == before
    assert cli.main([*words, "--test", "50"]) == 2
    assert "give another file with --out" in capsys.readouterr().err


def test_an_experiment_without_runs(folders, tmp_path, capsys):
    assert cli.main(["uncertainty", "mnist1d-fig3", *folders, "--out", str(tmp_path / "figures.csv")]) == 2
    assert "has no finished run; run `ghostnoise sweep mnist1d-fig3` first" in capsys.readouterr().err

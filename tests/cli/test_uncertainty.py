"""`ghostnoise uncertainty` as a user calls it."""

import csv

import pytest

from ghostnoise import cli
from support.records import change, experiment_with_runs

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


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measurement; the folders that it was called with."""
    folders = []

    def evaluate(folder, request, samples, test, shifted):
        folders.append(folder)
        sizes = {"samples": 1, "keep": 0, "test": test, "shifted": shifted}
        yield {"inference": "deterministic", **sizes, "accuracy": 90.0, "nll": 0.1, "ece": 1.0, "auroc a": 60.0,
               "seconds": 0.1, "date": "2026-01-31", "device": "cpu", "threads": 1, "torch": "2",
               "commit": "c"}  # fmt: skip

    monkeypatch.setattr("ghostnoise.lab.uncertainty.evaluate", evaluate)
    return folders


def test_a_row_names_the_run_on_disk_and_a_run_that_was_trained_again_is_measured_again(tmp_path, measured):
    """The identity of the settings as planned, without the device, is no run."""
    experiment_with_runs(tmp_path)
    out, folder = tmp_path / "figures.csv", tmp_path / "runs" / "tiny"
    words = ["uncertainty", str(tmp_path / "tiny.toml"), "--runs", str(tmp_path / "runs"), "--out", str(out)]
    assert cli.main(words) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["identity"] for row in rows} == {path.name for path in folder.iterdir()}
    assert {path.name for path in measured} == {row["identity"] for row in rows}
    again = measured[3]
    change(again, weights_sha256="0" * 64)
    measured.clear()
    assert cli.main(words) == 0
    assert measured == [again]
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 9
    assert [row["weights"] for row in rows if row["identity"] == again.name] == ["0" * 64]

"""`ghostnoise meter` as a user calls it."""

import csv

import pytest
import torch

from ghostnoise import cli
from ghostnoise.meter import Meter, Reading

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that recorded noise after its first epoch and its last."""
    runs = tmp_path_factory.mktemp("runs")
    meter = ["meter.every=5", "meter.batches=2", "meter.draws=16"]
    assert cli.main(["train", "digits", *SHORT, *meter, "--runs", str(runs), "--threads", "1", "--quiet"]) == 0
    (folder,) = (runs / "digits").iterdir()
    return folder


def test_a_run_is_measured_shown_and_written(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["meter", str(run), "--out", str(tmp_path), "--batches", "2", "--draws", "32"]) == 0
    said = capsys.readouterr().out
    assert f"{run}, epoch 2 (final-" in said.replace("\n", "")
    for name in ("noise.png", "noise.pdf", "noise.npz", "noise.csv"):
        assert (tmp_path / name).stat().st_size > 0
        assert name in said
    reading = Reading.load(tmp_path / "noise.npz")
    rows = list(csv.DictReader((tmp_path / "noise.csv").read_text().splitlines()))
    assert [row["layer"] for row in rows] == list(reading)
    assert float(rows[0]["gni_shift_std"]) == reading.rows()[0]["gni_shift_std"]
    assert {row["when"] for row in rows} == {"after epoch 2"}


@pytest.mark.slow
def test_epochs_that_training_recorded_are_compared(run, tmp_path, capsys, monkeypatch):
    from ghostnoise.lab import data

    monkeypatch.setattr(data, "open_source", lambda *args, **options: pytest.fail("what is recorded needs no data"))
    words = ["meter", str(run), "--epoch", "1", "--epoch", "2", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    for epoch in (1, 2):
        shown = Reading.load(tmp_path / f"noise-epoch-{epoch}.npz")
        assert shown.rows() == Reading.load(run / "noise" / f"epoch-000{epoch}.npz").rows()
    assert {row["when"] for row in csv.DictReader((tmp_path / "noise.csv").read_text().splitlines())} == {
        "epoch 1",
        "epoch 2",
    }
    monkeypatch.undo()
    assert cli.main([*words, "--ghost-size", "4"]) == 0  # not recorded: measured at the checkpoints
    assert {layer.ghost_size for layer in Reading.load(tmp_path / "noise-epoch-1.npz").layers} == {4}
    capsys.readouterr()
    assert cli.main(["meter", str(run), "--epoch", "9", "--out", str(tmp_path)]) == 2
    assert "epoch 9 of " in capsys.readouterr().err


def test_a_network_and_data_of_the_users_are_measured_as_by_hand(nets, tmp_path, capsys):
    words = ["meter", f"{nets}:net", "--data", f"{nets}:batches", "--ghost-size", "16", "--batches", "3"]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = Reading.load(tmp_path / "out" / "noise.npz")
    import importlib

    module = importlib.import_module(nets)
    model = module.net()
    with torch.no_grad(), Meter(model, 16) as meter:
        for images, _ in module.batches()[:3]:
            model(images)
    assert shown.rows() == meter.result().rows()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{nets}:bare", "--data", "digits"], "no normalization layer in this Sequential: give --modules"),
        (["{nets}:net", "--data", "digits", "--modules", "relu"], "modules has 'relu', which nothing"),
        (
            ["{nets}:net", "--data", "digits", "--epoch", "1"],
            "only a run has epochs; leave it out, or give a run folder",
        ),
        (["{nets}:net"], "without --data"),
        (["{nets}:net", "--variant", "released"], "only recipes have variants; leave it out"),
        (["fig6", "--variant", "released"], "fig6 has no variants; the recipes that have this one are fig1, "),
    ],
)
def test_mistakes_are_a_line(nets, capsys, words, said):
    words = [word.format(nets=nets) for word in words]
    assert cli.main(["meter", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_file_in_the_place_of_the_folder_is_refused_before_anything_is_measured(nets, tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert cli.main(["meter", f"{nets}:net", "--data", "digits", "--out", str(tmp_path / "taken")]) == 2
    said = capsys.readouterr()
    assert "taken: is a file; give another folder" in said.err
    assert said.out == ""
    assert (tmp_path / "taken").read_text() == "mine"


def test_modules_that_are_no_norms_can_be_named(nets, tmp_path):
    words = ["meter", f"{nets}:bare", "--data", "digits", "--modules", "2", "--batches", "1", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    assert list(Reading.load(tmp_path / "noise.npz")) == ["2"]

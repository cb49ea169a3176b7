import json

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import check, comparison
from ghostnoise.bench.comparison import Comparison


def run(tmp_path, *words):
    return cli.main(["check", "--device", "cpu", "--quick", "--no-compile", "--out", str(tmp_path), *words])


@pytest.mark.filterwarnings("ignore:.*with a single ghost batch it is plain batch norm")  # of the tiny shapes
def test_it_compares_and_times_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "LAYOUTS", {"features": comparison.LAYOUTS["features"]})
    monkeypatch.setattr(comparison, "BOUNDS", {torch.float64: 1e-10, torch.float32: 1e-5})
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# ghostnoise check: all ")
    assert (tmp_path / "check.md").read_text() == shown
    found = json.loads((tmp_path / "check.json").read_text())
    assert {each["level"] for each in found["comparisons"]} >= {"operator", "general"}
    assert {each["name"] for each in found["times"]} == {check.BASELINE, *check.TIMED, "GNI-16"}
    assert {each["mode"] for each in found["times"]} == {"eager"}


def test_a_failed_comparison_is_exit_code_1(tmp_path, monkeypatch, capsys):
    failed = Comparison("BN", "general", "features", "float32", 3.0, "output: the error is 3 times the bound")
    monkeypatch.setattr(check, "compare", lambda *given: [failed])
    monkeypatch.setattr(check, "_time", lambda *given: None)
    assert run(tmp_path) == 1
    assert "| BN | general | features | float32 | output: the error is 3 times the bound |" in capsys.readouterr().out


def test_a_device_that_does_not_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "empty", lambda *given, **options: (_ for _ in ()).throw(RuntimeError("no device")))
    assert run(tmp_path) == 2
    assert "--device cpu: torch cannot use it on this machine" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "check", lambda *given: check.Found({}))
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err

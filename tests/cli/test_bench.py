import csv
import json
import sys

import pytest
import torch

import ghostnoise
from ghostnoise import cli
from ghostnoise.bench import allocator
from ghostnoise.cli.bench import QUICK_ROUNDS
from ghostnoise.text import install_command

CONDITIONS = {"operators", "device", "device_name", "threads", "torch", "ghostnoise", "allocator", "date", "dtype"}
TIMES = {"p20_ms", "p50_ms", "p80_ms", "best_ms", "ratio_p50", "ratio_best", "n"}


@pytest.fixture(autouse=True)
def default_thresholds(monkeypatch):
    """Use malloc's default thresholds."""
    for name in allocator.RAISED:
        monkeypatch.delenv(name, raising=False)


def outputs(folder, bench):
    stored = json.loads((folder / f"{bench}.json").read_text())
    with (folder / f"{bench}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == [record["contender"] for record in stored["records"]]
    assert list(lines[0]) == list(stored["records"][0])
    assert (folder / f"{bench}.png").read_bytes().startswith(b"\x89PNG")
    for record in stored["records"]:
        assert record.keys() >= CONDITIONS
        assert record["torch"] == torch.__version__
        assert record["ghostnoise"] == ghostnoise.__version__
    return stored


def by_row(records):
    rows = {}
    for record in records:
        rows.setdefault(record["row"], []).append(record)
    return rows


def test_layers(tmp_path, capsys):
    assert cli.main(["bench", "layers", "--quick", "--threads", "1", "--out", str(tmp_path / "new")]) == 0
    stored = outputs(tmp_path / "new", "layers")
    rows = by_row(stored["records"])
    assert list(rows) == ["64x8x4x4 contiguous", "64x8x4x4 channels_last", "64x16", "64x4x16"]
    printed = capsys.readouterr().out
    for text in (*rows, *stored["left_out"], "bandwidth limit", "BN+GNI-32", "flex BN", "worst"):
        assert text in printed
    for records in rows.values():
        assert records[0]["kind"] == "torch"
        assert records[0]["ratio_p50"] == records[0]["ratio_best"] == 1
        assert {record["kind"] for record in records} == {"torch", "ours", "peer", "limit"} | (
            set() if "64x4x16" in records[0]["row"] else {"flex"}
        )
        for record in records:
            assert record.keys() >= TIMES | {"over_limit"}
            assert record["threads"] == 1
            assert record["allocator"] == "default"
            assert record["n"] == QUICK_ROUNDS
            assert 0 < record["best_ms"] <= record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
            assert record["ratio_p50"] == pytest.approx(record["p50_ms"] / records[0]["p50_ms"])
            assert record["ratio_best"] == pytest.approx(record["best_ms"] / records[0]["best_ms"])
    limits = [record["over_limit"] for record in stored["records"] if record["kind"] == "limit"]
    assert limits == [1.0] * len(limits)


@pytest.mark.slow
def test_net_in_both_allocator_modes(tmp_path):
    """The mode that this process does not run in gets one of its own."""
    arguments = ["bench", "net", "--quick", "--only", "resnet-20", "--allocator", "both", "--out", str(tmp_path)]
    if allocator.missing("raised"):
        assert cli.main(arguments) == 2
        return
    assert cli.main(arguments) == 0
    records = outputs(tmp_path, "net")["records"]
    assert {record["allocator"] for record in records} == {"default", "raised"}
    here = [record for record in records if record["allocator"] == "default"]
    assert [record["contender"] for record in here] == ["nn.BatchNorm2d", "GNI-16", "GBN-16", "XBN-32"]
    assert {record["row"] for record in records} == {"resnet-20 batch 32 contiguous"}
    for record in records:
        assert record.keys() >= TIMES


def test_net_takes_batch_size_and_format(tmp_path):
    arguments = ["bench", "net", "--quick", "--rounds", "1", "--batch", "40", "--memory-format", "channels_last"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    records = outputs(tmp_path, "net")["records"]
    assert {record["row"] for record in records} == {
        "resnet-20 batch 40 channels_last", "resnet-18 batch 40 channels_last",
    }  # fmt: skip
    assert {record["n"] for record in records} == {1}


def test_memory(tmp_path):
    assert cli.main(["bench", "memory", "--quick", "--out", str(tmp_path)]) == 0
    rows = by_row(outputs(tmp_path, "memory")["records"])
    assert list(rows) == ["64x8x4x4 contiguous", "64x8x4x4 channels_last", "64x16", "64x4x16"]
    for records in rows.values():
        assert records[0]["ratio_kept"] == records[0]["ratio_peak"] == 1
        for record in records:
            noise = record["contender"].startswith(("GNI", "AGNI", "MixStyle"))
            assert record["saved_x_bytes"] == (0 if noise else record["x_bytes"])
            assert record["held_bytes"] >= record["saved_tables_bytes"]
            assert record["peak_bytes"] >= record["x_bytes"]


def test_a_single_json_file_can_be_written_instead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "memory", "--quick", "--only", "64x16", "--json", "results/bench/features.json"]) == 0
    stored = json.loads((tmp_path / "results" / "bench" / "features.json").read_text())
    assert stored["bench"] == "memory"
    assert {record["row"] for record in stored["records"]} == {"64x16"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["features.json"]


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "layers", "--quick", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err == "ghostnoise bench: rich and matplotlib not installed; run " + install_command("lab") + "\n"
    assert printed.out == ""


def test_refusals_are_one_line_and_exit_with_2(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for arguments, line in (
        (["--out", str(file / "folder")], "cannot be created"),
        (["--json", str(file / "layers.json")], f"--json {file}: cannot be created"),
        (["--device", "nowhere"], "--device nowhere: torch cannot use it on this machine; try cpu"),
        (
            ["--only", "nothing"],
            "--only nothing: matches no row; the rows are 64x8x4x4 contiguous, 64x8x4x4 channels_last",
        ),
    ):
        assert cli.main(["bench", "layers", "--quick", "--out", str(tmp_path), *arguments]) == 2
        printed = capsys.readouterr().err
        assert line in printed
        assert printed.count("\n") == 1


def test_a_mode_that_the_system_lacks_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert cli.main(["bench", "layers", "--quick", "--allocator", "raised", "--out", str(tmp_path)]) == 2
    assert "glibc" in capsys.readouterr().err


def test_a_process_that_fails_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(allocator, "missing", lambda mode: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert cli.main(["bench", "layers", "--quick", "--allocator", "raised", "--out", str(tmp_path)]) == 2
    assert "--allocator raised ended with exit code 1" in capsys.readouterr().err


def test_threads_are_restored(tmp_path):
    before = torch.get_num_threads()
    cli.main(["bench", "memory", "--quick", "--only", "64x16", "--threads", str(before + 1), "--out", str(tmp_path)])
    assert torch.get_num_threads() == before

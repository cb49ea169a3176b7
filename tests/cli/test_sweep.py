"""`ghostnoise sweep` as a user calls it: mistakes are one line and exit code 2, and leave nothing behind."""

import pytest

from ghostnoise import cli
from support import experiment


@pytest.mark.parametrize(
    ("plan", "words", "line"),
    [
        ("", [], "has no [grid]"),
        ("[grid]\nmethods = []\n", [], "grid.methods=[]: must have 1 value or more"),
        ("[grid]\naxes.norm.size = [1]\n[[grid.methods]]\nlabel = 'A'\n", [], "norm.size: unknown"),
        ("[grid]\naxes.optim.lr = [0.1, 0.1]\n[[grid.methods]]\nlabel = 'A'\n", [], "are the same run"),
        (experiment.THREE, ["--runner", "slurm"], "--runner slurm: must be local or ray"),
        (experiment.THREE, ["--gpus-per-run", "0.5"], "add --runner ray, or leave them out"),
        (experiment.THREE, ["--runner", "ray", "--workers", "2"], "give --cpus-per-run"),
        (experiment.THREE, ["--only", "XBN"], "--only XBN: no such method"),
        (experiment.THREE, ["--variant", "released"], "small.toml has no variants; the recipes that have this one are"),
        (experiment.THREE + "[variants.a]\n", ["--variant", "b"], "small.toml has no such variant; it has a"),
        (experiment.THREE, ["norm.method=bn"], "choose one with --only LABEL"),
        (experiment.THREE, ["train.device=tpu"], "train.device='tpu'"),
        (experiment.THREE, ["train.amp=fp16", "--device", "cpu"], "needs a GPU"),
        (experiment.THREE, ["data.name=cifar10"], "`ghostnoise data get cifar10`"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, plan, words, line):
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path / "data"))
    path = experiment.write(tmp_path, plan)
    assert cli.main(["sweep", path, *words, "--runs", str(tmp_path / "runs")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_runs_of_a_variant_have_their_own_folder(capsys, tmp_path):
    words = ["sweep", "table2-i1k", "--variant", "released", "--smoke", "--dry-run", "--runs", str(tmp_path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "table2-i1k-released") in "".join(out.split("\n"))
    seeds = {row[1]: row[-1] for line in out.splitlines() if (row := line.split()) and row[0] == "test"}
    assert (seeds["BN"], seeds["GBN-16"]) == ("1", "0")  # the last of its first two seeds, and its only one


@pytest.mark.parametrize(
    "words", [["--workers", "0"], ["--threads", "-1"], ["--unknown"], ["word"], ["--seeds", "4..1"]]
)
def test_bad_options_are_refused(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["sweep", experiment.write(tmp_path), "--dry-run", *words])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("seeds", ["0..2", "0-2", "0,1,2", "2,0..1"])
def test_overrides_may_follow_options(tmp_path, capsys, seeds):
    words = ["--dry-run", "norm.ghost_size=8", "--runs", str(tmp_path / "runs"), "--seeds", seeds, "optim.lr=0.5"]
    assert cli.main(["sweep", experiment.write(tmp_path), *words, "--only", "BN", "--only", "GNI"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("6 to run, 0 finished")
    assert "GNI ghost_size=8" in out
    assert "GBN" not in out

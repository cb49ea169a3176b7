"""`ghostnoise runs` as a user calls it."""

import csv
import json
import shutil

import pytest
import torch

from ghostnoise import cli
from ghostnoise.lab import data, load_runs, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.store.folder import RunFolder, read
from support.experiment import write
from support.records import experiment_with_runs
from support.training import trained

GRID = """
[grid]
seeds = [0, 1]
[[grid.methods]]
label = "GNI"
"""
RESULT = {"status": "finished", "accuracy": 91.234, "epochs": 3, "seconds": 4.5}


def lay_out(runs, recipe, identity, method="gni", **files):
    folder = runs / recipe / identity
    folder.mkdir(parents=True)
    settings = {"recipe": recipe, "identity": identity, "norm": {"method": method, "eps": 1e-5}, "seed": 1}
    for name, record in ({"settings": settings} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def runs(tmp_path):
    lay_out(tmp_path, "digits", "aaa111", result=RESULT)
    lay_out(tmp_path, "digits", "aab222", method="bn", result=RESULT | {"status": "diverged", "accuracy": None})
    lay_out(tmp_path, "fig1", "ccc333", failure={"message": "out of memory", "traceback": "in here", "time": "now"})
    (lay_out(tmp_path, "fig1", "ddd444") / "result.json").write_text("{")
    return tmp_path


def called(runs, capsys, *words, code=0):
    assert cli.main(["runs", *words, "--runs", str(runs)]) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == bool(code)
    return err if code else out


def listed(out):
    return [line.split()[1] for line in out.splitlines() if line.startswith((" digits ", " fig1 "))]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["aaa111", "aab222", "ccc333", "ddd444"]),
        (["digits"], ["aaa111", "aab222"]),
        (["norm.method=gni"], ["aaa111", "ccc333"]),
        (["digits", "norm.method=gni", "seed=1"], ["aaa111"]),
        (["norm.method=gni", "seed=2"], []),
        (["norm.ghost_size=unset", "--status", "failed"], ["ccc333"]),
        (["--status", "damaged", "fig1"], ["ddd444"]),
    ],
)
def test_runs_are_listed_by_recipe_status_and_settings(runs, capsys, words, expected):
    out = called(runs, capsys, *words)
    assert listed(out) == expected
    assert out.splitlines()[-1] == f"{len(expected)} run" + "s" * (len(expected) != 1)


def test_columns_are_selected_sorted_and_written(tmp_path, capsys):
    experiment_with_runs(tmp_path)
    runs = tmp_path / "runs"
    words = ["--columns", "norm.ghost_size,seed,accuracy", "--sort", "accuracy", "--reverse"]
    lines = [line.split() for line in called(runs, capsys, *words).splitlines() if line.strip()]
    assert lines[0] == ["norm.ghost_size", "seed", "accuracy"]
    accuracies = [float(line[-1]) for line in lines[2:-1]]
    assert len(accuracies) == 9
    assert accuracies == sorted(accuracies, reverse=True)
    assert lines[2][:2] == ["16", "2"]
    assert "no run has this column; did you mean accuracy?" in called(runs, capsys, "--sort", "acuracy", code=2)
    path = tmp_path / "out" / "runs.csv"
    assert called(runs, capsys, "norm.method=gni", "--csv", str(path)) == f"6 runs; {path}\n"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {row["norm.method"] for row in rows} == {"gni"}
    assert {"train.epochs", "weights_sha256", "environment.torch"} <= rows[0].keys()


def test_runs_without_a_value_are_last(runs, capsys):
    rows = called(runs, capsys, "--sort", "accuracy", "--columns", "identity").split()
    assert rows[2] == "aaa111"


def test_two_runs_are_compared(tmp_path, capsys):
    experiment_with_runs(tmp_path)
    runs = tmp_path / "runs"
    by = {(run.settings.norm.ghost_size, run.seed): run.identity for run in load_runs(runs)}
    out = called(runs, capsys, "diff", by[4, 0], by[16, 1])
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if len(line.split()) == 3}
    assert rows["norm.ghost_size"] == ["4", "16"]
    assert rows["seed"] == ["0", "1"]
    assert not {"optim.lr", "norm.method", "environment.torch", "recipe"} & rows.keys()
    assert out.splitlines()[-1] == "different settings: 2"
    assert called(runs, capsys, "diff", by[4, 0], by[4, 0]) == "equal settings\n"
    assert "needs exactly 2 runs" in called(runs, capsys, "diff", by[4, 0], code=2)


def test_weights_are_exported_as_a_plain_state_dict(tmp_path, capsys):
    """Those that were evaluated: of the averaged network, if there is one."""
    short = ["train.epochs=3", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]
    outcome = trained(recipe.load("digits", [*short, "train.ema=0.5"]), tmp_path, threads=1, keep="best")
    out = tmp_path / "out.pt"
    said = called(tmp_path, capsys, "export-weights", outcome.run.identity, str(out))
    assert said.endswith(f" after epoch 3; {out}\n")
    settings = outcome.run.settings
    source = data.open_source(settings.data, tmp_path, batch_size=64, seed=0, device=torch.device("cpu"))
    model = models.build(settings.model, settings.norm, source.info.shape, source.info.classes).eval()
    model.load_state_dict(torch.load(out, weights_only=True))
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in source.evaluation())
    assert 100 * right / source.info.eval_size == pytest.approx(outcome.result["accuracy"])
    called(tmp_path, capsys, "export-weights", outcome.run.identity, str(tmp_path / "best.pt"), "--best")
    assert "needs a run and a file" in called(tmp_path, capsys, "export-weights", "x", code=2)
    shutil.rmtree(outcome.folder / "checkpoints")
    assert "has no weights that can be read" in called(
        tmp_path, capsys, "export-weights", outcome.run.identity, "x.pt", code=2
    )


def test_a_row_has_the_result(runs, capsys):
    row = called(runs, capsys, "--status", "finished").splitlines()[-3].split()
    assert row[:8] == ["digits", "aaa111", "GNI", "1", "finished", "91.23", "3", "4.5"]


def test_the_ghost_size_smoke_runs_and_random_data_are_marked(tmp_path, capsys):
    settings = {"norm": {"method": "gbn", "ghost_size": 16}, "seed": 7}
    for identity, marks in {"a1": {}, "b2": {"train": {"smoke": True}, "data": {"stand_in": True}}}.items():
        lay_out(tmp_path, "digits", identity, settings=settings | marks, result=RESULT)
    plain, marked = (" ".join(line.split()) for line in called(tmp_path, capsys).splitlines()[3:5])
    assert plain.startswith("digits a1 GBN-16 7 finished 91.23 ")
    assert marked.startswith("digits b2 GBN-16 7 finished, smoke, random data 91.23 ")


@pytest.mark.parametrize("width", [40, 50])
def test_a_narrow_terminal_gets_a_list_in_which_nothing_is_cut_off(runs, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = called(runs, capsys).splitlines()
    assert lines[0].split() == ["recipe", "identity"]
    assert lines[1] == "digits aaa111"
    damaged = [line for line in lines if str(runs) in line]  # with a command to copy, which is not broken
    assert len(damaged) == 1
    assert max(len(line) for line in lines if line not in damaged) <= width
    text = " ".join(" ".join(lines).split())
    assert "digits aaa111 method: GNI; seed: 1; status: finished; accuracy: 91.23; epochs: 3; seconds: 4.5; " in text


def test_a_mistyped_action_is_suggested(runs, capsys):
    assert "did you mean show?" in called(runs, capsys, "shwo", code=2)


def test_one_run_is_shown(runs, capsys):
    out = called(runs, capsys, "show", "aaa")
    assert f"{runs / 'digits' / 'aaa111'}: finished" in out
    assert "norm.method = gni" in out
    assert "norm.eps" not in out, "a default"
    assert "accuracy = 91.234" in out
    failed = called(runs, capsys, "show", str(runs / "fig1" / "ccc333"))
    assert "message = out of memory" in failed
    assert "in here" in failed
    assert "is damaged" in called(runs, capsys, "show", "ddd444")


def test_runs_are_removed_when_they_are_named_or_fit(runs, capsys):
    called(runs, capsys, "remove", "aaa111", "--yes")
    called(runs, capsys, "remove", "norm.method=bn", "--yes")
    assert not list((runs / "digits").iterdir())
    called(runs, capsys, "remove", "fig1", "seed=1", "--yes")
    assert [path.name for path in (runs / "fig1").iterdir()] == ["ddd444"], "damaged ones only by name"
    assert "give its full identity" in called(runs, capsys, "remove", "ddd", "--yes", code=2)
    called(runs, capsys, "remove", "ddd444", "--yes")
    assert not list((runs / "fig1").iterdir())


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("", False), ("n", False), (None, False)])
def test_it_asks_before_it_removes(runs, capsys, monkeypatch, answer, gone):
    def asked(*_):
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", asked)
    called(runs, capsys, "remove", "aaa111")
    assert (runs / "digits" / "aaa111").exists() != gone


def test_a_run_that_a_process_has_is_not_removed(runs, capsys):
    folder = RunFolder(runs / "digits" / "aaa111", pytest.fail)
    folder.own()
    assert "another process is training this run" in called(runs, capsys, "remove", "aaa111", "--yes", code=2)
    assert folder.path.exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nothing"], "has no runs of this recipe; give one of digits, fig1"),
        (["digit"], "has no runs of this recipe; did you mean digits?"),
        (["digits", "fig1"], "must be one recipe at most"),
        (["norm.metod=bn"], "did you mean norm.method?"),
        (["show"], "needs exactly 1 run"),
        (["show", "zzz"], "zzz: not found in"),
        (["show", "aa"], "aa: matches 2 runs"),
        (["remove"], "remove: needs runs"),
        (["export"], "export: needs recipes; give their names"),
        (["export", "digits", "fig1", "--out", "x"], "a file has the records of one recipe"),
        (["export", "nothing"], "has no runs of this recipe"),
        (["import"], "needs files of records"),
        (["import", "none.jsonl"], "cannot be read (No such file or directory)"),
        (["digits", "--out", "file"], "an option of `ghostnoise runs export RECIPE`"),
        (["remove", "digits", "fig1", "seed=1"], "give one or none"),
    ],
)
def test_mistakes_are_one_line(runs, capsys, words, line):
    assert line in called(runs, capsys, *words, code=2)


def test_no_runs_at_all_are_no_mistake(tmp_path, capsys):
    assert cli.main(["runs", "--runs", str(tmp_path / "none")]) == 0
    out, err = capsys.readouterr()
    assert out == "0 runs\n"
    assert err.endswith("none: not found; give the folder that contains the runs with --runs, or train a recipe\n")
    assert called(tmp_path, capsys) == "0 runs\n"  # a folder without runs


def test_runs_are_exported_and_imported(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment_with_runs(tmp_path)
    runs = tmp_path / "runs"
    assert called(runs, capsys, "export", "tiny") == "9 new records, 9 in all; results/tiny/records.jsonl\n"
    assert called(runs, capsys, "export", "tiny.toml") == "0 new records, 9 in all; results/tiny/records.jsonl\n"
    new = tmp_path / "new"
    assert called(new, capsys, "import", "results/tiny/records.jsonl") == f"imported 9 runs, 0 already there; {new}\n"
    assert called(new, capsys, "import", "results/tiny/records.jsonl") == f"imported 0 runs, 9 already there; {new}\n"
    assert called(new, capsys).count("finished, imported") == 9
    assert "finished, imported" not in called(runs, capsys)


def test_nothing_is_imported_from_files_of_which_one_is_bad(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment_with_runs(tmp_path)
    called(tmp_path / "runs", capsys, "export", "tiny")
    good = tmp_path / "results" / "tiny" / "records.jsonl"
    (tmp_path / "bad.jsonl").write_bytes(good.read_bytes()[:-9])
    assert cli.main(["runs", "import", str(good), "bad.jsonl", "--runs", "new"]) == 2
    assert "bad.jsonl, line 10: not complete JSON" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_sweep_skips_imported_runs_and_their_weights_are_repeatable(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = write(tmp_path, plan=GRID)
    assert cli.main(["sweep", made, "--runs", "first", "--workers", "1", "--threads", "1"]) == 0
    called(tmp_path / "first", capsys, "export", "small", "--out", "small.jsonl")
    called(tmp_path / "second", capsys, "import", "small.jsonl")
    assert cli.main(["sweep", made, "--runs", "second", "--workers", "1", "--threads", "1"]) == 0
    assert "2 finished (2 of them earlier)" in capsys.readouterr().out
    # A removed run is trained again, and its record then has the same weights.
    folder = next(path for path in (tmp_path / "second" / "small").iterdir() if path.is_dir())
    before = read(folder).result
    called(tmp_path / "second", capsys, "remove", folder.name, "--yes")
    assert cli.main(["sweep", made, "--runs", "second", "--workers", "1", "--threads", "1"]) == 0
    after = read(folder).result
    assert after["weights_sha256"] == before["weights_sha256"]
    assert after["ended"] >= before["ended"]

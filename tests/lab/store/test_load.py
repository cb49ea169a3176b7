"""Runs as data: from folders and from records, as rows and as a DataFrame."""

import csv
import io

import pytest

from ghostnoise.lab import load_runs
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import records
from ghostnoise.lab.store.load import Runs, write_csv
from support.records import experiment_with_runs


@pytest.fixture
def there(tmp_path):
    experiment_with_runs(tmp_path)
    records.export(tmp_path / "runs" / "tiny", tmp_path / "records.jsonl", pytest.fail)
    return tmp_path


@pytest.mark.parametrize("place", ["runs", "runs/tiny", "records.jsonl"])
def test_runs_are_the_same_wherever_they_are_read_from(there, place):
    runs = load_runs(there / place)
    assert len(runs) == 9
    assert sorted(run.accuracy for run in runs) == pytest.approx([90 + at / 7 for at in range(9)])
    by_size = {run.settings.norm.ghost_size for run in runs if run.settings.norm.method == "gni"}
    assert by_size == {4, 16}
    assert isinstance(runs[:2], Runs)
    assert len(runs.curves()) == 27
    rows = sorted(runs.table(["identity", "norm.method", "norm.ghost_size", "seed", "accuracy"]), key=str)
    assert rows == sorted(load_runs(there / "runs").table(list(rows[0])), key=str)


def test_a_single_run_and_a_damaged_one(there):
    first, second, *_ = sorted((there / "runs" / "tiny").iterdir())
    (run,) = load_runs(str(first))
    assert (run.recipe, run.identity, run.folder) == ("tiny", first.name, first)
    (second / "run.json").write_text("{")
    damaged = [run for run in load_runs(there / "runs") if run.status == "damaged"]
    assert [run.folder for run in damaged] == [second]
    assert damaged[0].reason.startswith("run.json: not complete JSON")


def test_the_table_has_settings_results_and_environment(there):
    rows = load_runs(there / "runs").table()
    assert list(rows[0])[:4] == ["recipe", "identity", "seed", "status"]
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    base = next(row for row in rows if row["norm.method"] == "bn")
    assert (base["norm.ghost_size"], base["optim.lr"], base["train.epochs"]) == (None, 0.1, 3)
    assert (base["segments"], base["environment.torch"], base["parameters"]) == (1, "2.8.0+cpu", 1234)
    assert next(csv.DictReader(io.StringIO(write_csv(rows).decode())))["recipe"] == "tiny"


def test_a_column_that_no_run_has_is_an_error(there):
    with pytest.raises(UserError, match=r"norm.metod: no run has this column; did you mean norm.method\?"):
        load_runs(there / "runs").table(["norm.metod"])


def test_a_data_frame_has_the_same_numbers(there):
    pandas = pytest.importorskip("pandas")
    frame = load_runs(there / "runs").to_pandas(["norm.method", "accuracy"])
    means = frame.groupby("norm.method")["accuracy"].mean()
    assert isinstance(frame, pandas.DataFrame)
    assert means["bn"] == pytest.approx(90 + 1 / 7)


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UserError, match="not found; give a folder of runs, or a file that"):
        load_runs(tmp_path / "none")
    assert len(load_runs(tmp_path)) == 0

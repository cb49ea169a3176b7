"""Matching run folders with the runs that an experiment defines."""

import dataclasses
import json
import os
from collections import Counter

import pytest

from ghostnoise.lab.report.collect import collect
from support.run_folders import experiment, points, write


def look(runs, made):
    lines = []
    return collect(made, runs / "tiny", lines.append), lines


def test_every_run_is_missing_before_there_is_a_folder(tmp_path):
    made = experiment(tmp_path)
    found, lines = look(tmp_path, made)
    assert Counter(run.status for run in found.runs) == {"missing": 9}
    assert not lines
    assert not (tmp_path / "tiny").exists()


def test_each_status_is_recognized(tmp_path):
    made = experiment(tmp_path)
    for point, status in zip(points(made), ("finished", "diverged", "failed", "interrupted"), strict=False):
        write(tmp_path, point, 91.5, status=status)
    found, lines = look(tmp_path, made)
    assert [run.status for run in found.runs[:5]] == ["finished", "diverged", "failed", "interrupted", "missing"]
    assert [run.accuracy for run in found.runs[:5]] == [91.5, None, None, None, None]
    assert found.runs[2].failed_for == "RuntimeError: no luck"
    assert not lines


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_runs_are_found_whatever_machine_made_them(tmp_path, device):
    made = experiment(tmp_path)
    write(tmp_path, points(made)[0], device=device)
    assert look(tmp_path, made)[0].count("finished") == 1


def test_of_two_folders_of_one_run_the_further_advanced_is_used(tmp_path):
    made = experiment(tmp_path)
    write(tmp_path, points(made)[0], 91.0, status="interrupted", device="cpu")
    write(tmp_path, points(made)[0], 92.0, device="cuda")
    found, _ = look(tmp_path, made)
    assert found.runs[0].accuracy == 92.0
    assert found.duplicates == 1
    assert found.others == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", '{"status": "finis'), ("result.json", "[]"), ("result.json", '{"accuracy": 90}'),
        ("result.json", '{"status": "finished", "accuracy": NaN}'), ("result.json", '{"status": "finished"}'),
        ("result.json", '{"status": "finished", "accuracy": "90"}'), ("settings.json", "\x00"),
    ],
)  # fmt: skip
def test_damaged_folders_are_reported_and_ignored(tmp_path, name, content):
    made = experiment(tmp_path)
    folder = write(tmp_path, points(made)[0])
    write(tmp_path, points(made)[1])
    (folder / name).write_text(content)
    found, lines = look(tmp_path, made)
    assert found.damaged == (folder,)
    assert found.count("finished") == 1
    assert len(lines) == 1
    assert str(folder) in lines[0]


def test_runs_of_other_experiments_are_counted(tmp_path):
    made = experiment(tmp_path)
    write(tmp_path, points(made)[0])
    write(tmp_path, points(experiment(tmp_path, seeds="[7]"))[0])
    strange = write(tmp_path, points(experiment(tmp_path, seeds="[8]"))[0])
    settings = json.loads((strange / "settings.json").read_text())
    (strange / "settings.json").write_text(json.dumps(settings | {"of_a_later_version": 1}))
    (tmp_path / "tiny" / "empty").mkdir()
    found, lines = look(tmp_path, made)
    assert found.others == 3
    assert found.count("finished") == 1
    assert not lines


def test_nothing_in_the_run_folders_is_changed(tmp_path):
    made = experiment(tmp_path)
    for point in points(made):
        write(tmp_path, point, status="failed" if point.seed else "finished")

    def listing():
        return {
            (folder, name): os.stat(os.path.join(folder, name)).st_mtime_ns
            for folder, _, names in os.walk(tmp_path / "tiny")
            for name in names
        }

    before = listing()
    look(tmp_path, made)
    assert listing() == before


TUNED = '[select]\naxes = ["norm.ghost_size"]\n'


def test_winners_are_tested_after_the_tuning_has_finished(tmp_path):
    made = experiment(tmp_path, more=TUNED)
    tuned = [point for point in points(made) if point.stage == "tune"]
    assert len(tuned) == 6
    for point in tuned[:-1]:
        write(tmp_path, point, 90.0 + (point.settings.norm.ghost_size == 16))
    assert look(tmp_path, made)[0].winners == {}
    write(tmp_path, tuned[-1], 91.0)
    found, _ = look(tmp_path, made)
    assert {method: dict(run.at) for method, run in found.winners.items()} == {"GNI": {"norm.ghost_size": 16}}
    tests = [run for run in found.runs if run.stage == "test" and run.label == "GNI"]
    assert [run.settings.data.evaluate for run in tests] == ["test"] * 3


def test_smoke_runs_in_bf16_on_a_cpu_are_found_for_fp16(tmp_path):
    made = experiment(tmp_path, overrides=["train.amp=fp16"], smoke=True)
    point = points(made)[0]
    train = point.settings.train.model_copy(update={"amp": "bf16"})
    settings = point.settings.model_copy(update={"train": train})
    write(tmp_path, dataclasses.replace(point, given=settings))
    assert look(tmp_path, made)[0].count("finished") == 1


def test_numerics_are_read_from_the_environment_and_default_to_one(tmp_path):
    made = experiment(tmp_path)
    recorded = [{"numerics": 3}, {}, {"numerics": "3"}, {"numerics": None}, {"numerics": True}]
    folders = [write(tmp_path, point, environment=each) for point, each in zip(points(made), recorded, strict=False)]
    folders.append(write(tmp_path, points(made)[5], environment={"numerics": 3}))
    (folders[-1] / "environment.json").unlink()
    write(tmp_path, points(made)[6], status="interrupted", environment={"numerics": 4})
    found, lines = look(tmp_path, made)
    assert [run.numerics.number for run in found.runs] == [3, 1, 1, 1, 1, 1, 4, 1, 1]
    assert {str(each): count for each, count in found.numerics.items()} == {
        "1": 2,
        "3 instead of 1": 1,
    }  # only runs that have a result
    assert found.damaged == tuple(sorted(folders[2:5])), "what is not a number is damage"
    assert all("environment.json: numerics: must be an integer" in line for line in lines)


def test_of_two_finished_folders_of_one_run_the_newer_numerics_are_used(tmp_path):
    made = experiment(tmp_path)
    write(tmp_path, points(made)[0], 91.0, device="cpu", environment={"numerics": 1})
    write(tmp_path, points(made)[0], 92.0, device="cuda", environment={"numerics": 2})
    write(tmp_path, points(made)[0], 93.0, device="mps", status="interrupted", environment={"numerics": 3})
    found, _ = look(tmp_path, made)
    assert (found.runs[0].accuracy, found.runs[0].numerics.number, found.duplicates) == (92.0, 2, 2)

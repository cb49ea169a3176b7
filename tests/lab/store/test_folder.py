import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.run import Run
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import Busy, RunFolder, locked, read
from ghostnoise.version import NUMERICS
from support.checkpoints import state
from support.records import finished, on_cpu
from support.run_folders import experiment, points


@pytest.fixture
def planned(tmp_path):
    """A run that was not trained yet."""
    return Run.planned("digits", on_cpu(points(experiment(tmp_path))[0].settings))


def folder(tmp_path, planned, warn=pytest.fail):
    return RunFolder(tmp_path / "runs" / "digits" / planned.identity, warn)


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def ended(tmp_path, planned, environment, said=None):
    """The released folder of a run that has ended in this environment, with all files that a run makes."""
    run = folder(tmp_path, planned, pytest.fail if said is None else said.append)
    run.own()
    run.begin(planned.tree, [environment], [])
    run.record({"epoch": 1})
    run.save(3, state(3))
    path = tmp_path / "done" / "digits" / planned.identity
    done = read(path if path.exists() else finished(tmp_path / "done", "digits", planned.settings))
    run.finish(replace(done, environments=[environment]), state(3), 3, keep_all=False)
    run.release()
    return run


def test_metrics_are_lines_of_strict_json(tmp_path, planned):
    run = folder(tmp_path, planned)
    run.own()
    run.begin(planned.tree, [{}], [{"epoch": 1, "loss": 0.5}])
    run.record({"epoch": 2, "loss": None})
    assert lines(run) == [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.record({"epoch": 3, "loss": math.nan})
    run.begin(planned.tree, [{}, {}], [{"epoch": 1, "loss": 0.5}])
    assert lines(run) == [{"epoch": 1, "loss": 0.5}]


def test_a_run_has_one_owner(tmp_path, planned, monkeypatch):
    monkeypatch.setattr("ghostnoise.lab.store.folder.ASKED_WITHIN", 0.1)
    run = folder(tmp_path, planned)
    run.own()
    with pytest.raises(UserError, match="another process is training this run"):
        folder(tmp_path, planned).own()
    run.release()
    folder(tmp_path, planned).own()


def test_asking_who_trains_a_run_never_makes_its_training_fail(tmp_path, planned):
    """Sweeps and reports ask again and again."""
    run = folder(tmp_path, planned)
    assert not locked(run.path)
    assert not run.path.exists()
    over = threading.Event()

    def ask():
        while not over.wait(0.001):
            locked(run.path)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            run.own()
            assert locked(run.path)
            run.release()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not locked(run.path)


def test_a_killed_process_releases_the_run(tmp_path, planned):
    code = """
import os, signal, sys
from pathlib import Path
from ghostnoise.lab.store.folder import RunFolder
run = RunFolder(Path(sys.argv[1]), print)
run.own()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = folder(tmp_path, planned)
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == -9
    run.own()


def test_the_record_replaces_the_other_files(tmp_path, planned):
    run = folder(tmp_path, planned)
    assert run.ended() is None
    run = ended(tmp_path, planned, {"numerics": NUMERICS})
    assert run.ended().result["accuracy"] == 90.0
    assert {path.name for path in run.path.iterdir()} == {".lock", "run.json", "checkpoints"}
    assert [path.name[:14] for path in (run.path / "checkpoints").iterdir()] == ["final-00000003"]


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_process_that_was_killed_after_the_record_leaves_files_that_are_removed_later(tmp_path, planned, keep_all):
    run = ended(tmp_path, planned, {})
    assert not run.untidy()
    run.save(3, state(3))
    (run.path / "metrics.jsonl").write_text("")
    assert run.untidy()
    assert read(run.path).status == "finished"
    run.tidy(keep_all)
    assert not run.untidy()
    assert len(checkpoints.saved(run.path / "checkpoints")) == keep_all


def test_a_damaged_record_is_reported_and_ignored(tmp_path, planned):
    said = []
    run = folder(tmp_path, planned, said.append)
    run.own()
    (run.path / "run.json").write_text('{"identity": "fin')
    assert run.ended() is None
    assert "run.json cannot be read" in said[0]


def test_resuming_on_another_machine_is_reported_and_each_segment_has_its_environment(tmp_path, planned):
    said = []
    run = folder(tmp_path, planned, said.append)
    run.own()
    first, second, third = (
        {"torch": torch, "threads": threads, "started": f"2026-01-31T12:00:0{n}"}
        for n, (torch, threads) in enumerate([("2.8", 2), ("2.8", 2), ("2.8", 4)])
    )
    run.begin(planned.tree, [first], [])
    run.begin(planned.tree, [first, second], [])
    assert said == []
    run.begin(planned.tree, [first, second, third], [])
    assert len(said) == 1
    assert "threads 2 -> 4" in said[0]
    assert read(run.path).environments == [first, second, third]


@pytest.mark.parametrize("environment", [{}, {"numerics": 1}])
def test_runs_without_a_numerics_number_have_the_first(tmp_path, planned, environment):
    run = ended(tmp_path, planned, environment)
    assert (run.ended() is not None) == (NUMERICS == 1)


def test_files_of_another_numerics_number_are_moved_and_reported(tmp_path, planned):
    said = []
    run = ended(tmp_path, planned, {"numerics": NUMERICS + 1}, said)
    run.record_noise(1, b"noise")
    assert run.ended() is None
    assert run.start() is None
    moved = run.path / "earlier" / f"numerics-{NUMERICS + 1}"
    assert said == [
        f"{run.path} was trained with numerics {NUMERICS + 1}, and this version has numerics {NUMERICS}: the run "
        f"starts again, and its earlier files are in {moved}"
    ]
    assert {path.name for path in moved.iterdir()} == {"run.json", "noise", "checkpoints"}
    assert {path.name for path in run.path.iterdir()} == {".lock", "earlier"}
    run.release()
    ended(tmp_path, planned, {"numerics": NUMERICS + 1}, said).start()
    assert {path.name for path in (run.path / "earlier").iterdir()} == {moved.name, f"{moved.name}-2"}


def test_a_move_that_was_interrupted_is_completed(tmp_path, planned):
    """The record goes first: what is left without it is no result."""
    run = ended(tmp_path, planned, {"numerics": NUMERICS + 1}, [])
    moved = run.path / "earlier" / f"numerics-{NUMERICS + 1}"
    moved.mkdir(parents=True)
    (run.path / "run.json").rename(moved / "run.json")
    assert run.start() is None, "final weights are nothing to resume from"


def test_unfinished_runs_of_another_numerics_number_do_not_resume(tmp_path, planned):
    said = []
    run = folder(tmp_path, planned, said.append)
    run.own()
    run.begin(planned.tree, [{"numerics": NUMERICS + 1}], [])
    run.save(3, state(3))
    run.release()
    assert run.start() is None
    assert len(said) == 1


def test_a_folder_that_holds_only_a_checkpoint_is_current(tmp_path, planned):
    run = folder(tmp_path, planned)
    run.path.mkdir(parents=True)
    run.save(3, state(3))
    assert run.start() is not None


def test_a_run_that_has_ended_meanwhile_is_not_taken(tmp_path, planned):
    run = ended(tmp_path, planned, {})
    with pytest.raises(Busy, match="has just finished this run"):
        run.start()
    assert not locked(run.path)


def test_more_than_two_checkpoints_of_a_killed_run_are_removed_at_its_end(tmp_path, planned, monkeypatch):
    run = folder(tmp_path, planned)
    run.own()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "prune", lambda *given: None)
        for step in range(3):
            run.save(step, state(step))
    assert len(checkpoints.saved(run.path / "checkpoints")) == 3
    done = read(finished(tmp_path / "done", "digits", planned.settings))
    run.finish(done, state(3), 3, keep_all=True)
    assert [path.name[:13] for path in checkpoints.saved(run.path / "checkpoints")] == [
        "step-00000002",
        "step-00000001",
    ]


@pytest.mark.slow
def test_reading_a_run_takes_less_than_a_millisecond(tmp_path, planned):
    run = ended(tmp_path, planned, {})
    read(run.path)
    began = time.process_time()
    for _ in range(200):
        read(run.path)
    assert time.process_time() - began < 0.2

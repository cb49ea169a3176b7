import json
import math
import subprocess
import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.store.folder import outdated
from ghostnoise.version import NUMERICS
from support.checkpoints import state


def folder(path, warn=pytest.fail):
    return RunFolder(path / "runs" / "digits" / "abc", warn)


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_lines_of_strict_json(tmp_path):
    run = folder(tmp_path)
    run.own()
    run.record({"epoch": 1, "loss": 0.5})
    run.record({"epoch": 2, "loss": math.nan})
    assert lines(run) == [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None}]
    run.cut_back([{"epoch": 1, "loss": 0.5}])
    assert lines(run) == [{"epoch": 1, "loss": 0.5}]


def test_a_run_has_one_owner(tmp_path):
    run = folder(tmp_path)
    run.own()
    with pytest.raises(UserError, match="another process is training this run"):
        folder(tmp_path).own()
    run.release()
    folder(tmp_path).own()


def test_a_killed_process_releases_the_run(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.store.folder import outdated
from ghostnoise.version import NUMERICS
run = RunFolder(Path(sys.argv[1]), print)
run.own()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = folder(tmp_path)
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == -9
    run.own()


def test_the_result_is_written_at_the_end(tmp_path):
    run = folder(tmp_path)
    run.own()
    assert run.result() is None
    run.finish({"status": "finished", "accuracy": math.inf})
    assert run.result() == {"status": "finished", "accuracy": None}


def test_a_damaged_result_is_reported_and_ignored(tmp_path):
    said = []
    run = folder(tmp_path, said.append)
    run.own()
    (run.path / "result.json").write_text('{"status": "fin')
    assert run.result() is None
    assert "cannot be read" in said[0]


def test_resuming_on_another_machine_is_reported(tmp_path):
    said = []
    run = folder(tmp_path, said.append)
    run.own()
    run.begin({"seed": 0}, {"torch": "2.8", "threads": 2, "started": "2026-01-31T12:00:00"})
    run.begin({"seed": 0}, {"torch": "2.9", "threads": 2, "started": "2026-01-31T12:00:01"})
    assert said == []
    run.save(3, state(3))
    run.begin({"seed": 0}, {"torch": "2.9", "threads": 4, "started": "2026-01-31T12:00:02"})
    assert len(said) == 1
    assert "threads 2 -> 4" in said[0]


def ended(tmp_path, environment, said=None):
    """A run that has ended in this environment, with all files that a run makes."""
    run = folder(tmp_path, pytest.fail if said is None else said.append)
    run.own()
    run.begin({"seed": 0}, environment)
    run.record({"epoch": 1})
    run.record_noise(1, b"noise")
    run.save(3, state(3))
    run.finish({"status": "finished"})
    run.release()
    return run


@pytest.mark.parametrize("environment", [{}, {"numerics": 1}, {"numerics": "1"}])
def test_runs_without_a_numerics_number_have_the_first(tmp_path, environment):
    run = ended(tmp_path, environment)
    assert (outdated(run.path) is None) == (NUMERICS == 1)


def test_files_of_another_numerics_number_are_moved_and_reported(tmp_path):
    said = []
    run = ended(tmp_path, {"numerics": NUMERICS + 1}, said)
    assert run.result() is None
    assert run.own_and_read() is None
    moved = run.path / "earlier" / f"numerics-{NUMERICS + 1}"
    assert said == [
        f"{run.path} was trained with numerics {NUMERICS + 1}, and this version has numerics {NUMERICS}: the run "
        f"starts again, and its earlier files are in {moved}"
    ]
    assert {path.name for path in moved.iterdir()} == {
        "result.json", "environment.json", "metrics.jsonl", "noise", "checkpoints"
    }  # fmt: skip
    assert {path.name for path in run.path.iterdir()} == {".lock", "settings.json", "earlier"}
    run.release()
    ended(tmp_path, {"numerics": NUMERICS + 1}, said).own_and_read()
    assert {path.name for path in (run.path / "earlier").iterdir()} == {moved.name, f"{moved.name}-2"}


def test_a_move_that_was_interrupted_is_completed(tmp_path):
    run = ended(tmp_path, {"numerics": NUMERICS + 1}, [])
    moved = run.path / "earlier" / f"numerics-{NUMERICS + 1}"
    moved.mkdir(parents=True)
    (run.path / "result.json").rename(moved / "result.json")
    run.own_and_read()
    assert [path.name for path in (run.path / "earlier").iterdir()] == [moved.name]
    assert (moved / "environment.json").exists()


def test_unfinished_runs_of_another_numerics_number_do_not_resume(tmp_path):
    said = []
    run = ended(tmp_path, {"numerics": NUMERICS + 1}, said)
    (run.path / "result.json").unlink()
    assert run.own_and_read() is None
    assert len(said) == 1


def test_a_folder_that_holds_only_a_checkpoint_is_current(tmp_path):
    run = folder(tmp_path)
    run.path.mkdir(parents=True)
    run.save(3, state(3))
    assert run.own_and_read() is not None


def test_a_finished_run_has_two_checkpoints(tmp_path, monkeypatch):
    """Even if it was killed between writing the last one and removing the first."""
    run = RunFolder(tmp_path, pytest.fail)
    run.own()
    monkeypatch.setattr(checkpoints, "prune", lambda *arguments: None)
    for step in range(3):
        run.save(step, state(step))
    monkeypatch.undo()
    assert len(checkpoints.saved(tmp_path / "checkpoints")) == 3
    run.finish({"status": "diverged"})
    assert [path.name[:13] for path in checkpoints.saved(tmp_path / "checkpoints")] == [
        "step-00000002",
        "step-00000001",
    ]

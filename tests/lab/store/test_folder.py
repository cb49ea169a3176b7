import json
import math
import subprocess
import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder


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
    with pytest.raises(UserError, match="another process trains this run"):
        folder(tmp_path).own()
    run.release()
    folder(tmp_path).own()


def test_a_killed_owner_owns_nothing(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from ghostnoise.lab.store import RunFolder
run = RunFolder(Path(sys.argv[1]), print)
run.own()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = folder(tmp_path)
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == -9
    run.own()


def test_the_result_is_there_when_the_run_is_over(tmp_path):
    run = folder(tmp_path)
    run.own()
    assert run.result() is None
    run.finish({"status": "finished", "accuracy": math.inf})
    assert run.result() == {"status": "finished", "accuracy": None}


def test_a_damaged_result_is_said_and_not_believed(tmp_path):
    said = []
    run = folder(tmp_path, said.append)
    run.own()
    (run.path / "result.json").write_text('{"status": "fin')
    assert run.result() is None
    assert "cannot be read" in said[0]


def test_another_machine_is_said_where_there_is_something_to_resume(tmp_path):
    said = []
    run = folder(tmp_path, said.append)
    run.own()
    run.begin({"seed": 0}, {"torch": "2.8", "threads": 2, "started": "a"})
    run.begin({"seed": 0}, {"torch": "2.9", "threads": 2, "started": "b"})
    assert said == []
    run.save(3, {"step": 3})
    run.begin({"seed": 0}, {"torch": "2.9", "threads": 4, "started": "c"})
    assert len(said) == 1
    assert "threads 2 -> 4" in said[0]

"""Runs that crash or run out of space at any operation of the store lose nothing, and resume to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import crash_points
from support.faults import KILLED, Faults

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc, and forks")
SHARDS = 3


def called(folder, *arguments):
    """Run the script, and return the lines that it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(crash_points.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "support.crash_points", str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found):
    """Check a point: nothing was lost, and the second call ended like an undisturbed run, in silence."""
    saved = max(found["first"]["steps"], default=0)
    assert found["kept"] >= saved, f"checkpoint {saved} is lost"
    assert (found["exit of second"], found["second"]) == (0, {"code": 0, "errors": []})
    assert found["same"]


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_every_operation_and_resumed(tmp_path, shard):
    *found, last = called(tmp_path, "points", "kill", shard, SHARDS)
    assert last["operations"] > 500
    assert len(found) == len(range(shard, last["operations"], SHARDS))
    assert {each["kind"] for each in found} >= {"open", "create", "write", "fsync", "rename", "unlink"}
    for each in found:
        assert each["exit"] == KILLED, each
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("action", ["full", "full on"])
def test_the_disk_is_full_at_every_operation(tmp_path, action, shard):
    """Once, or from there on: the run continues or fails with one line, and the next call resumes it."""
    *found, last = called(tmp_path, "points", action, shard, SHARDS)
    assert last["operations"] > 500
    assert {each["kind"] for each in found} == {"create", "write", "fsync", "rename", "mkdir"}
    for each in found:
        first = each["first"]
        assert (each["exit"], first["failed"]) == (0, True), each
        if first["code"]:
            (line,) = first["errors"]
            assert first["code"] == 2
            assert line.startswith("ghostnoise train: cannot write ")
            assert "the disk is full; make room and run the same command again" in line
        else:
            assert first["errors"] == [], each
        check(each)


@pytest.mark.slow
def test_killed_a_hundred_times_at_random(tmp_path):
    found = called(tmp_path, "kills", 25, 0)
    assert [each["kind"] for each in found] == ["plain", "bf16", "EMA", "metered"]
    for each in found:
        assert each["kills"] == 25
        assert each["finished"] > 1
        assert each["left"] == []


@pytest.mark.parametrize("action", ["full", "full on"])
def test_the_disk_is_full_at_some_operations(tmp_path, action, one_thread):
    """The same in this process, and for a shorter run, in the tests of every change."""
    settings = ["train.epochs=1", "train.batch_size=64"]
    counted = Faults(tmp_path / "whole")
    assert crash_points.train(tmp_path / "whole", counted, settings)["code"] == 0
    expected = crash_points.outcome(tmp_path / "whole")
    places = [at for at, kind in enumerate(counted.kinds) if kind in ("write", "rename")]
    for at in places[1::5]:
        runs = tmp_path / f"{at}"
        faults = Faults(runs, at, action)
        found = crash_points.train(runs, faults, settings)
        assert (found["code"], len(found["errors"]), faults.failed) == (2, 1, True), found
        assert "the disk is full; make room and run the same command again" in found["errors"][0]
        assert crash_points.train(runs, more=settings) == {"code": 0, "errors": []}
        assert crash_points.outcome(runs) == expected

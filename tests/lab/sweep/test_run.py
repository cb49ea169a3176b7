"""Sweeps: missing runs are run once, and finished ones are left alone."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from ghostnoise.lab.config import grid
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.sweep import Options, list_runs, machine, sweep
from ghostnoise.version import NUMERICS
from support import experiment, jobs

SELECT = experiment.THREE.replace("[0, 1]", "[0]") + '[select]\naxes = ["norm.ghost_size"]\n'


class Ran:
    """A sweep in this process, and what it printed."""

    def __init__(self, path, runs, *overrides, run=sweep, quiet=False, terminal=False, **options):
        self.out, self.err = io.StringIO(), io.StringIO()
        given = Options(
            runs=runs, quiet=quiet, errors=Console(file=self.err, width=1000),
            console=Console(file=self.out, width=1000, force_terminal=terminal),
        )  # fmt: skip
        self.outcome = run(grid.load(path, ["train.device=cpu", *overrides], **options), given)
        self.lines = self.out.getvalue().splitlines()


@pytest.fixture
def inline(monkeypatch):
    """Sweeps without worker processes; the runners that were made."""
    made = []

    def make_runner(name, place, *_):
        made.append(jobs.Inline(place))
        return made[-1]

    monkeypatch.setattr(machine, "make_runner", make_runner)
    return made


def results(runs):
    """The time of each run's result."""
    return {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("small/*/result.json")}


def weights(runs):
    return {path.parent.name: json.loads(path.read_text())["weights_sha256"] for path in runs.glob("*/*/result.json")}


def test_all_are_run_once_and_only_what_is_missing_after_that(tmp_path, inline):
    path = experiment.write(tmp_path)
    ran = Ran(path, tmp_path / "runs", seeds=[0])
    assert ran.outcome.code == 0
    assert ran.lines[-1] == f"5 finished; {tmp_path / 'runs' / 'small'}"
    assert ran.lines[0] == "5 runs of small to train, 0 ended earlier"
    assert re.fullmatch(r"finished BN seed 0: \d+\.\d\d %, \d.*", ran.lines[1])
    assert inline[0].closed
    before = results(tmp_path / "runs")
    assert len(before) == 5
    shutil.rmtree(tmp_path / "runs" / "small" / min(before))
    again = Ran(path, tmp_path / "runs", seeds=[0])
    assert again.outcome.code == 0
    assert again.lines[-1].startswith("5 finished (4 of them earlier)")
    after = results(tmp_path / "runs")
    assert {name for name in before if before[name] != after[name]} == {min(before)}
    Ran(path, tmp_path / "runs", seeds=[0])
    assert len(inline) == 2, "a sweep without missing runs needs no runner"


def test_what_is_tuned_best_is_tested_and_nothing_else(tmp_path, inline):
    ran = Ran(experiment.write(tmp_path, SELECT), tmp_path / "runs")
    assert ran.outcome.code == 0
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("runs/small/*/settings.json")]
    by_split = {
        split: sorted(f"{run['norm']['method']} {run['norm'].get('ghost_size')}" for run in runs
                      if run["data"]["evaluate"] == split)
        for split in ("validation", "test")
    }  # fmt: skip
    assert by_split["validation"] == ["gbn 16", "gbn 4", "gni 16", "gni 4"]
    assert [name.split()[0] for name in by_split["test"]] == ["bn", "gbn", "gni"]
    scores = {
        (run["norm"]["method"], run["norm"]["ghost_size"]): json.loads(
            (tmp_path / "runs" / "small" / run["identity"] / "result.json").read_text()
        )["accuracy"]
        for run in runs
        if run["data"]["evaluate"] == "validation"
    }
    for method in ("gbn", "gni"):
        best = max((4, 16), key=lambda size: scores[method, size])
        assert f"{method} {best}" in by_split["test"]


def test_a_failing_run_is_recorded_tried_again_and_stops_no_other(tmp_path, inline):
    plan = experiment.THREE.replace('label = "GNI"', 'label = "GNI"\naxes.train.batch_size = [4096]')
    ran = Ran(experiment.write(tmp_path, plan), tmp_path / "runs", seeds=[0])
    assert ran.outcome.code == 1
    assert ran.lines[-1].startswith("3 finished, 2 failed")
    (first, second) = (line for line in ran.lines if line.endswith(")") and line.startswith("failed GNI"))
    assert "must be at most the number of training images" in first
    folder = first.rpartition("(")[2].removesuffix(")")
    assert os.path.exists(os.path.join(folder, "failure.json"))
    assert first != second
    again = Ran(experiment.write(tmp_path, plan), tmp_path / "runs", seeds=[0])
    assert again.lines[-1].startswith("3 finished, 2 failed (3 of them earlier)")
    assert len(inline) == 2, "failed runs are tried again"


def test_a_method_whose_tuning_failed_is_not_tested(tmp_path, inline):
    plan = SELECT.replace('label = "GNI"', 'label = "GNI"\naxes.train.batch_size = [4096]')
    ran = Ran(experiment.write(tmp_path, plan), tmp_path / "runs")
    assert ran.outcome.code == 1
    assert "GNI batch_size=4096: not tested, because 2 tuning runs failed" in ran.lines
    assert any(re.match(r"GBN: GBN ghost_size=\d+ is the best cell", line) for line in ran.lines)


def test_a_method_whose_tuning_diverged_is_not_tested(tmp_path, inline):
    ran = Ran(experiment.write(tmp_path, SELECT), tmp_path / "runs", "optim.lr=1e30", "train.epochs=2", only=["GNI"])
    assert ran.outcome.code == 0
    assert "GNI: not tested, because all of its tuning runs diverged" in ran.lines
    assert ran.lines[-1].startswith("0 finished, 2 diverged;")


def test_a_damaged_folder_is_failed_and_left_alone(tmp_path, inline):
    path = experiment.write(tmp_path)
    Ran(path, tmp_path / "runs", only=["BN"], seeds=[0])
    (result,) = tmp_path.glob("runs/small/*/result.json")
    result.write_text("{")
    ran = Ran(path, tmp_path / "runs", only=["BN"], seeds=[0])
    assert ran.outcome.code == 1
    assert "is damaged" in ran.err.getvalue()
    assert "is damaged" in ran.lines[-2]
    assert ran.lines[-1].startswith("0 finished, 1 failed")
    assert result.read_text() == "{"


def test_runs_that_another_sweep_owns_are_waited_for(tmp_path, inline, monkeypatch):
    path = experiment.write(tmp_path)
    listed = Ran(path, tmp_path / "runs", only=["BN"], seeds=[0, 1], run=lambda made, _: made).outcome
    from ghostnoise.lab.config import plan

    points = plan.first_points(listed, machine.resolver(None))
    folders = [RunFolder(tmp_path / "runs" / "small" / point.identity, pytest.fail) for point in points]
    for folder in folders:
        folder.own()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            folders[0].finish({"status": "finished", "accuracy": 1.0, "seconds": 1.0})
            folders[0].release()
        if len(waits) == 4:
            folders[1].release()

    from ghostnoise.lab.runners import execution

    monkeypatch.setattr(execution, "CHECK_EVERY", 0)
    monkeypatch.setattr(execution, "pause", lambda: sleep(0))
    ran = Ran(path, tmp_path / "runs", only=["BN"], seeds=[0, 1])
    assert ran.outcome.code == 0
    assert ran.lines[-1].startswith("2 finished;")
    assert len(waits) >= 4


def test_quiet_prints_one_line_and_a_terminal_keeps_no_line_of_what_went_well(tmp_path, inline):
    path = experiment.write(tmp_path)
    assert len(Ran(path, tmp_path / "quiet", only=["BN"], quiet=True).lines) == 1
    live = Ran(path, tmp_path / "live", only=["BN"], terminal=True)
    assert "2 finished;" in live.lines[-1]
    assert "finished BN" not in live.out.getvalue()


def test_a_dry_run_lists_missing_runs_and_runs_nothing(tmp_path, inline):
    path = experiment.write(tmp_path, SELECT)
    Ran(path, tmp_path / "runs", only=["BN"])
    before = results(tmp_path / "runs")
    ran = Ran(path, tmp_path / "runs", seeds=[0, 1], run=list_runs)
    assert results(tmp_path / "runs") == before
    rows = [line.split() for line in ran.lines]
    assert ["test", "BN", "0", "1"] in rows
    assert ["tune", "GNI", "ghost_size=16", "0", "1"] in rows
    assert ran.lines[-1].startswith("9 to run, 1 finished;")
    assert ran.lines[-1].endswith("then up to 4 tests of the best tuned cells")


def start(path, runs, *more):
    command = [sys.executable, "-m", "ghostnoise", "sweep", path, "--runs", str(runs), "--device", "cpu", "--workers",
               "1", "--threads", "1", *more]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_runs_whose_folders_are_deleted_are_trained_again(tmp_path, inline, monkeypatch):
    """One that had ended before the sweep, and one that ended in it."""
    path, runs = experiment.write(tmp_path), tmp_path / "runs"
    assert Ran(path, runs, only=("BN",), seeds=[0]).outcome.tally.finished == 1
    (early,) = results(runs)
    expected = {}

    class Deleting(jobs.Inline):
        def run(self, given, emit, stop):
            super().run(given, emit, stop)
            if not expected:
                expected.update(weights(runs))
                for name in (early, given[-1].identity):
                    shutil.rmtree(runs / "small" / name)

    monkeypatch.setattr(machine, "make_runner", lambda name, place, *_: Deleting(place))
    ran = Ran(path, runs, only=("BN", "GNI"), seeds=[0])
    assert weights(runs) == expected
    again = [line for line in ran.lines if "deleted" in line]
    assert len(again) == 2
    assert all(line.endswith(": its folder was deleted during the sweep; it is trained again") for line in again)
    assert ran.lines[-1] == f"3 finished; {runs}/small"
    assert ran.outcome.code == 0


def test_a_folder_that_is_deleted_again_and_again_does_not_keep_a_sweep_running(tmp_path, inline, monkeypatch):
    path, runs = experiment.write(tmp_path), tmp_path / "runs"

    class Deleting(jobs.Inline):
        def run(self, given, emit, stop):
            super().run(given, emit, stop)
            shutil.rmtree(runs / "small")

    monkeypatch.setattr(machine, "make_runner", lambda name, place, *_: Deleting(place))
    ran = Ran(path, runs, only=("BN",), seeds=[0])
    assert sum("it is trained again" in line for line in ran.lines) == 2


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_next_call_resumes(tmp_path, inline):
    """As a terminal does it: the signal goes to the whole group of processes."""
    path = experiment.write(tmp_path, base=experiment.BASE.replace("epochs = 1", "epochs = 60"))
    process = start(path, tmp_path / "runs", "--only", "BN", "--seeds", "0,1")
    while process.poll() is None and not list(tmp_path.glob("runs/small/*/checkpoints/*.pt")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert out.splitlines()[-1].startswith("stopped; run the same command to resume: 0 finished, 2 waiting")
    assert errors == "ghostnoise sweep: loading PyTorch, which takes a few seconds, and longer the first time ...\n"
    assert results(tmp_path / "runs") == {}
    ran = Ran(path, tmp_path / "runs", only=["BN"], seeds=[0, 1])
    assert ran.lines[-1].startswith("2 finished;")
    whole = Ran(path, tmp_path / "whole", only=["BN"], seeds=[0, 1])
    assert whole.outcome.code == 0
    assert weights(tmp_path / "runs") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_sweeps_killed_at_random_end_with_the_same_bits(tmp_path, inline):
    import random

    chance = random.Random(0)
    path = experiment.write(tmp_path, base=experiment.BASE.replace("epochs = 1", "epochs = 30"))
    for _ in range(10):
        process = start(path, tmp_path / "runs", "--checkpoint-seconds", "0.02")
        before = len(list(tmp_path.glob("runs/small/*/environment.json")))
        while process.poll() is None and len(list(tmp_path.glob("runs/small/*/environment.json"))) <= before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1))
        process.kill()
        process.communicate()
    assert Ran(path, tmp_path / "runs").outcome.code == 0
    assert Ran(path, tmp_path / "whole").outcome.code == 0
    assert len(weights(tmp_path / "runs")) == 10
    assert weights(tmp_path / "runs") == weights(tmp_path / "whole")


def test_runs_of_another_numerics_number_are_trained_again(tmp_path, inline):
    path, runs = experiment.write(tmp_path), tmp_path / "runs"
    Ran(path, runs, seeds=[0])
    before = results(runs)
    outdated = runs / "small" / min(before)
    environment = json.loads((outdated / "environment.json").read_text())
    (outdated / "environment.json").write_text(json.dumps(environment | {"numerics": NUMERICS + 1}))
    listed = Ran(path, runs, seeds=[0], run=list_runs)
    assert listed.lines[-1] == f"1 to run, 4 finished; {runs / 'small'}"
    again = Ran(path, runs, seeds=[0])
    assert again.lines[-1].startswith("5 finished (4 of them earlier)")
    assert "was trained with numerics" in again.out.getvalue()
    after = results(runs)
    assert {name for name in before if before[name] != after[name]} == {outdated.name}

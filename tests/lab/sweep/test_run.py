"""Sweeps: missing runs are run once, and finished ones are left alone."""

import io
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
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store.folder import read
from ghostnoise.lab.sweep import run as sweeping
from ghostnoise.lab.sweep.run import Options, list_runs, sweep
from ghostnoise.version import NUMERICS
from support import experiment, jobs
from support.records import change

SELECT = experiment.THREE.replace("[0, 1]", "[0]") + '[select]\naxes = ["norm.ghost_size"]\n'


class Ran:
    """A sweep in this process, and what it printed."""

    def __init__(
        self, path, runs, *overrides, run=sweep, quiet=False, terminal=False, workers=None, data=None, **options
    ):  # fmt: skip
        self.out, self.err = io.StringIO(), io.StringIO()
        given = Options(
            runs=runs, quiet=quiet, workers=workers, data=data, errors=Console(file=self.err, width=1000),
            console=Console(file=self.out, width=1000, force_terminal=terminal),
        )  # fmt: skip
        self.outcome = run(grid.load(path, ["train.device=cpu", *overrides], **options), given)
        self.lines = self.out.getvalue().splitlines()
        self.next = self.lines.pop() if self.lines[-1].startswith("next: ") else ""


@pytest.fixture
def inline(monkeypatch):
    """Sweeps without worker processes; the runners that were made."""
    made = []

    def make_runner(options, place, runs):
        made.append(jobs.Inline(place))
        return made[-1]

    monkeypatch.setattr(sweeping, "make_runner", make_runner)
    return made


def results(runs):
    """The time of each run's result."""
    return {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("small/*/run.json")}


def weights(runs):
    return {path.parent.name: read(path.parent).result["weights_sha256"] for path in runs.glob("*/*/run.json")}


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
    runs = [read(path) for path in tmp_path.glob("runs/small/*")]
    by_split = {
        split: sorted(f"{run.settings.norm.method} {run.settings.norm.ghost_size}" for run in runs
                      if run.settings.data.evaluate == split)
        for split in ("validation", "test")
    }  # fmt: skip
    assert by_split["validation"] == ["gbn 16", "gbn 4", "gni 16", "gni 4"]
    assert [name.split()[0] for name in by_split["test"]] == ["bn", "gbn", "gni"]
    scores = {
        (run.settings.norm.method, run.settings.norm.ghost_size): run.accuracy
        for run in runs
        if run.settings.data.evaluate == "validation"
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
    (result,) = tmp_path.glob("runs/small/*/run.json")
    result.write_text("{")
    ran = Ran(path, tmp_path / "runs", only=["BN"], seeds=[0])
    assert ran.outcome.code == 1
    assert "is damaged" in ran.err.getvalue()
    assert "is damaged" in ran.lines[-2]
    assert ran.lines[-1].startswith("0 finished, 1 failed")
    assert result.read_text() == "{"


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
    assert "; then up to 4 tests of the best tuned cells; about " in ran.lines[-1]


def start(path, runs, *more):
    command = [sys.executable, "-m", "ghostnoise", "sweep", path, "--runs", str(runs), "--device", "cpu", "--workers",
               "1", "--threads", "1", *more]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


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
        before = len(list(tmp_path.glob("runs/small/*/environments.json")))
        while process.poll() is None and len(list(tmp_path.glob("runs/small/*/environments.json"))) <= before:
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
    content = (outdated / "run.json").read_text()
    (outdated / "run.json").write_text(content.replace(f'"numerics":{NUMERICS},', f'"numerics":{NUMERICS + 1},'))
    listed = Ran(path, runs, seeds=[0], run=list_runs)
    assert listed.lines[-1].startswith(f"1 to run, 4 finished; {runs / 'small'}; about ")
    assert any("0 (outdated)" in line for line in listed.lines)
    again = Ran(path, runs, seeds=[0])
    assert again.lines[-1].startswith("5 finished (4 of them earlier)")
    assert "was trained with numerics" in again.out.getvalue()
    after = results(runs)
    assert {name for name in before if before[name] != after[name]} == {outdated.name}


def test_a_sweep_ends_with_the_command_to_type_next(tmp_path, inline):
    ran = Ran(experiment.write(tmp_path), tmp_path / "runs", only=["BN"], seeds=[0])
    assert ran.next == f"next: ghostnoise report --runs {tmp_path / 'runs'}"  # `words` are those of the command line


def test_a_dry_run_counts_what_the_sweep_would_do(tmp_path, inline):
    """Diverged runs have ended but not finished, and damaged ones are not run."""
    path, runs = experiment.write(tmp_path), tmp_path / "runs"
    Ran(path, runs, "train.epochs=2", only=["BN"])
    assert Ran(path, runs, "optim.lr=1e30", "train.epochs=2", only=["BN"], seeds=[0]).outcome.tally.diverged == 1
    assert (
        Ran(path, runs, "optim.lr=1e30", "train.epochs=2", only=["BN"], seeds=[0], run=list_runs)
        .lines[-1]
        .startswith("0 to run, 0 finished, 1 diverged; ")
    )
    first = min((runs / "small").iterdir())
    for folder in (runs / "small").iterdir():
        if read(folder).status == "finished" and folder != first:
            (folder / "run.json").write_text("{")
            break
    listed = Ran(path, runs, "train.epochs=2", only=["BN"], seeds=[0, 1, 2], run=list_runs)
    assert listed.lines[-1].startswith("1 to run, 1 finished, 1 damaged; ")
    done = Ran(path, runs, "train.epochs=2", only=["BN"], seeds=[0, 1, 2])
    assert done.lines[0] == "1 run of small to train, 1 ended earlier"
    assert done.lines[-1].startswith("2 finished, 1 failed (1 of them earlier)")


def test_the_time_of_the_missing_runs_is_estimated_from_those_of_the_same_cell(tmp_path, inline):
    path, runs = experiment.write(tmp_path), tmp_path / "runs"
    Ran(path, runs, seeds=[0])
    for folder in (runs / "small").iterdir():
        seconds = 3600.0 if read(folder).settings.norm.method == "bn" else 36.0
        change(folder, seconds=seconds)
    (line,) = [Ran(path, runs, seeds=[0, 1], run=list_runs, workers=1).lines[-1]]
    assert line.endswith("; about 62 min with 1 worker")  # an hour, and four times 36 s
    assert (
        Ran(path, tmp_path / "none", run=list_runs).lines[-1] == f"10 to run, 0 finished; {tmp_path / 'none' / 'small'}"
    )


def test_winners_that_were_tested_long_ago_are_not_tested_now(tmp_path, inline):
    path = experiment.write(tmp_path, SELECT)
    first = Ran(path, tmp_path / "runs", only=["GNI"])
    again = Ran(path, tmp_path / "runs", only=["GNI"])
    assert sum(line.endswith("is the best cell and is tested now") for line in first.lines) == 1
    assert sum(line.endswith("is the best cell and has been tested") for line in again.lines) == 1
    assert not any("is tested now" in line for line in again.lines)


def test_data_of_the_tests_are_looked_for_before_the_tuning(tmp_path, inline):
    """An image folder without test images is found at once, and not after hours."""
    from PIL import Image

    for name in ("a", "b"):
        folder = tmp_path / "data" / "images" / "train" / name
        folder.mkdir(parents=True)
        for at in range(20):
            Image.new("RGB", (8, 8), (10 * at, 0, 0)).save(folder / f"{at}.png")
    base = experiment.BASE.replace('name = "digits"\nlimit = 256', 'name = "imagefolder"\nfolder = "images"')
    base = base.replace('name = "digits-net"', 'name = "resnet20"')
    path = experiment.write(tmp_path, SELECT, base=base)
    with pytest.raises(UserError, match="images: its images were not found in"):
        Ran(path, tmp_path / "runs", only=["GNI"], data=tmp_path / "data")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_drivers_on_one_folder_train_each_run_once(tmp_path, inline):
    path = experiment.write(tmp_path, base=experiment.BASE.replace("epochs = 1", "epochs = 30"))
    processes = [start(path, tmp_path / "runs", "--log", "tensorboard") for _ in range(2)]
    printed = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    for out, _ in printed:
        assert out.splitlines()[-2].startswith("10 finished")
    assert len(results(tmp_path / "runs")) == 10
    for folder in (tmp_path / "runs" / "small").iterdir():
        if folder.is_dir():
            assert len(read(folder).environments) == 1, "one segment: nobody else has trained it"
            assert len(list((folder / "tensorboard").iterdir())) == 1, "one process has logged it"
    assert Ran(path, tmp_path / "whole").outcome.code == 0
    assert weights(tmp_path / "runs") == weights(tmp_path / "whole")

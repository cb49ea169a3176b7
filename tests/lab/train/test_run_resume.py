"""Runs that are killed, stopped or damaged end with the results of uninterrupted runs."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import history, read
from ghostnoise.lab.train.machine import Stop
from support.training import trained

TIMINGS = ("seconds", "images_per_second", "ended")
SETTINGS = ["digits", "train.batch_size=64", "train.ema=0.99", "optim.clip=1.0", "optim.warmup_epochs=2"]
SHORT, LONG = "train.epochs=6", "train.epochs=60"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(runs, *more, length=SHORT):
    return [sys.executable, "-m", "ghostnoise", "train", *SETTINGS, length, "--runs", str(runs), "--quiet", *more]


def finish(runs, length=SHORT):
    done = subprocess.run(command(runs, length=length), capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done


def folder(runs):
    (found,) = (runs / "digits").iterdir()
    return found


def outcome(runs):
    """Return the result and the metrics, without timings."""
    path = folder(runs)
    run = read(path)
    each_line = (run.result, *history(run))
    return [{name: value for name, value in each.items() if name not in TIMINGS} for each in each_line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("uninterrupted")
    finish(runs)
    return outcome(runs)


def kill(runs, delay, number=signal.SIGKILL, *more, length=SHORT):
    """Start the run, send a signal `delay` seconds after it starts training, and return its exit code."""
    marker = runs / "digits"
    before = {path: path.stat().st_mtime_ns for path in marker.glob("*/environments.json")}
    process = subprocess.Popen(
        command(runs, *more, length=length), env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    while process.poll() is None:
        now = {path: path.stat().st_mtime_ns for path in marker.glob("*/environments.json")}
        if now and now != before:
            time.sleep(delay)
            process.send_signal(number)
            break
        time.sleep(0.002)
    process.communicate()
    return process.returncode


def killed_and_resumed(runs, kills, length):
    chance, often = random.Random(kills), ("--checkpoint-seconds", "0.01")
    codes = [kill(runs, chance.uniform(0, 0.4), signal.SIGKILL, *often, length=length) for _ in range(kills)]
    assert codes.count(-signal.SIGKILL) >= kills / 2, "most signals must arrive during training"
    finish(runs, length)
    return outcome(runs)


@pytest.mark.slow
def test_killed_at_random_times_and_resumed_is_bit_identical(tmp_path, uninterrupted):
    assert killed_and_resumed(tmp_path, 3, SHORT) == uninterrupted


@pytest.mark.slow
def test_killed_twenty_times_and_resumed_is_bit_identical(tmp_path):
    finish(tmp_path / "whole", LONG)
    assert killed_and_resumed(tmp_path / "killed", 20, LONG) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_a_checkpoint_and_exits(tmp_path, uninterrupted, number):
    assert kill(tmp_path, 0.1, number) == 128 + number
    path = folder(tmp_path)
    assert read(path).status == "interrupted"
    assert list((path / "checkpoints").iterdir())
    finish(tmp_path)
    assert outcome(tmp_path) == uninterrupted


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_and_ends_the_same(tmp_path, uninterrupted):
    kill(tmp_path, 0.3, signal.SIGKILL, "--checkpoint-seconds", "0.01")
    newest = max((folder(tmp_path) / "checkpoints").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-100])
    done = finish(tmp_path)
    assert "is damaged" in done.stderr
    assert outcome(tmp_path) == uninterrupted


def test_a_finished_run_is_not_run_again(tmp_path, uninterrupted):
    finish(tmp_path)
    before = (folder(tmp_path) / "run.json").read_bytes()
    done = finish(tmp_path)
    assert "is finished" in done.stdout
    assert (folder(tmp_path) / "run.json").read_bytes() == before


def stopped(runs, saves=2):
    """Train in this process until `saves` checkpoints are saved; return the recipe and the folder."""
    stop, left = Stop(), [saves]

    def saved(folder):
        left[0] -= 1
        stop.signal = 0 if left[0] else signal.SIGTERM

    chosen = recipe.load(SETTINGS[0], [*SETTINGS[1:], "train.epochs=2", "optim.warmup_epochs=1"])
    return chosen, trained(chosen, runs, threads=1, checkpoint_seconds=0.0, saved=saved, stop=stop).folder


def other(state, kind):
    """Return a state that has the right format, but is not one of the run."""
    wrong = {
        "another run": {"identity": "0123456789ab"},
        "another network": {"model": {"weight": torch.zeros(3)}},
        "another optimizer": {"optimizer": {"state": {}, "param_groups": []}},
        "other options": {"optimizer": optimizer(state, lambda saved: saved["param_groups"][0].update(momentum=0.5))},
        "other shapes": {
            "optimizer": optimizer(state, lambda saved: saved["state"][0].update(momentum_buffer=torch.zeros(7)))
        },
        "more processes": {"ranks": state["ranks"] * 2},
        "no generators": {"ranks": [state["ranks"][0] | {"generators": {}}]},
        "no average": {"average": {}},
        "a later epoch": {"epoch": 3, "history": json.dumps([LINE] * 3)},
        "a later step": {"step": 10**6},
    }
    return state | wrong[kind]


LINE = dict.fromkeys(("train_loss", "train_accuracy", "loss", "accuracy")) | {"epoch": 1, "step": 1, "split": "test"}
KINDS = (
    "another run", "another network", "another optimizer", "other options", "other shapes", "more processes",
    "no generators", "no average", "a later epoch", "a later step",
)  # fmt: skip


def optimizer(state, change):
    saved = copy.deepcopy(state["optimizer"])
    change(saved)
    return saved


@pytest.mark.parametrize("kept", [1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_cannot_be_restored_is_set_aside(tmp_path, short, kind, kept):
    """The previous one is used, or else the run starts again; both end with the same weights."""
    chosen, folder = stopped(tmp_path)
    last, first = checkpoints.saved(folder / "checkpoints")
    state = torch.load(last, weights_only=True)
    last.unlink()
    path = checkpoints.save(last.parent, 10**6, other(state, kind))
    if not kept:
        first.unlink()
    outcome = trained(chosen, tmp_path, threads=1)
    (line,) = outcome.warned
    assert line.startswith(f"{path} is damaged (")
    assert line.endswith("; it is renamed to .damaged, and an earlier checkpoint is used if there is one")
    assert path.with_suffix(".damaged").exists()
    assert outcome.result["weights_sha256"] == short


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Return the hash of the weights of an uninterrupted short run."""
    chosen = recipe.load(SETTINGS[0], [*SETTINGS[1:], "train.epochs=2", "optim.warmup_epochs=1"])
    return trained(chosen, tmp_path_factory.mktemp("short"), threads=1).result["weights_sha256"]

"""Runs that are killed, stopped or damaged end with the results of uninterrupted runs."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

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
    result = json.loads((path / "result.json").read_text())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name not in TIMINGS} for each in (result, *lines)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("uninterrupted")
    finish(runs)
    return outcome(runs)


def kill(runs, delay, number=signal.SIGKILL, *more, length=SHORT):
    """Start the run, send a signal `delay` seconds after it starts training, and return its exit code."""
    marker = runs / "digits"
    before = {path: path.stat().st_mtime_ns for path in marker.glob("*/environment.json")}
    process = subprocess.Popen(
        command(runs, *more, length=length), env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    while process.poll() is None:
        now = {path: path.stat().st_mtime_ns for path in marker.glob("*/environment.json")}
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
    assert not (path / "result.json").exists()
    assert list((path / "checkpoints").iterdir())
    finish(tmp_path)
    assert outcome(tmp_path) == uninterrupted


def test_a_damaged_checkpoint_falls_back_and_ends_the_same(tmp_path, uninterrupted):
    kill(tmp_path, 0.3, signal.SIGKILL, "--checkpoint-seconds", "0.01")
    newest = max((folder(tmp_path) / "checkpoints").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-100])
    done = finish(tmp_path)
    assert "is damaged" in done.stderr
    assert outcome(tmp_path) == uninterrupted


def test_a_finished_run_is_not_run_again(tmp_path, uninterrupted):
    finish(tmp_path)
    before = (folder(tmp_path) / "result.json").read_bytes()
    done = finish(tmp_path)
    assert "is finished" in done.stdout
    assert (folder(tmp_path) / "result.json").read_bytes() == before

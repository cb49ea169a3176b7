"""What a node of a Ray cluster sends to the driver, without a cluster."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended, Saved
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import RunFolder, read
from ghostnoise.lab.sweep.ray_node import PREFIX, _temporary_folder, saved_with, write
from ghostnoise.lab.train import Options, train
from support.ray_cases import SHORT, outcome
from support.training import planned

METERED = [*SHORT, "train.epochs=4", "meter.every=1", "meter.batches=1", "meter.draws=8"]


def sent_by(overrides, runs, **options):
    """Train, and return what a node would send with each event."""
    sent, messages, folder = set(), [], runs
    for event in train(planned(recipe.load("digits", overrides)), Options(runs=runs, thresholds=False, **options)):
        run = getattr(event, "run", None)
        folder = run.folder if run else folder
        messages.append((event, saved_with(event, folder, sent)))
    return folder, messages


def test_files_go_from_folder_to_folder(tmp_path):
    folder, messages = sent_by(METERED, tmp_path, keep="best")
    for event, files in messages:
        assert bool(files) == isinstance(event, Saved | Ended)
        write(tmp_path / "copy" / "digits" / folder.name, files)
    copy = tmp_path / "copy" / "digits" / folder.name
    assert outcome(copy) == outcome(folder)
    names = {path.name for path in folder.rglob("*") if path.is_file()} - {".lock"}
    assert {path.name for path in copy.rglob("*") if path.is_file()} == names
    assert read(copy).noise == read(folder).noise
    for best in (False, True):
        ours, theirs = (checkpoints.weights_of(place, pytest.fail, best=best)[0] for place in (copy, folder))
        assert checkpoints.weights_sha256(ours) == checkpoints.weights_sha256(theirs)


def test_a_file_that_never_changes_is_sent_once(tmp_path):
    """Readings of the noise and checkpoints; the traffic does not grow with the square of their number."""
    _, messages = sent_by(METERED, tmp_path, keep="best")
    names = [name for _, files in messages for name in files]
    fixed = [name for name in names if name.startswith(("noise/", "checkpoints/"))]
    assert sum(name.startswith("noise/") for name in fixed) == 4
    assert len(fixed) == len(set(fixed))


def test_a_run_can_be_resumed_from_what_came_back_first(tmp_path):
    folder, messages = sent_by(SHORT, tmp_path)
    copy = tmp_path / "copy" / folder.name
    (files, *_) = (files for event, files in messages if isinstance(event, Saved))
    write(copy, files)
    assert RunFolder(copy, pytest.fail).start().state["epoch"] == 1
    (name,) = (name for name in files if name.startswith("checkpoints/"))
    write(tmp_path / "other", files | {name: files[name][:-1]})
    assert not checkpoints.saved(tmp_path / "other" / "checkpoints"), "it does not match its checksum"


def test_the_reason_of_a_failure_is_among_the_files(tmp_path):
    RunFolder(tmp_path, pytest.fail).fail({"seed": 0}, "a reason", "a trace")
    assert list(saved_with(Ended("failed"), tmp_path, set())) == ["settings.json", "failure.json"]


def test_a_temporary_folder_is_removed_also_after_a_kill(tmp_path, monkeypatch):
    """By the next attempt on the same node; those of attempts that still run are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
import os, signal
from ghostnoise.lab.sweep.ray_node import _temporary_folder
with _temporary_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    left = Path(done.stdout.strip())
    assert left.exists()
    with _temporary_folder() as first:
        assert first.name.startswith(f"{PREFIX}{os.getpid()}-")
        assert not left.exists()
        with _temporary_folder() as second:
            assert first.exists()
            assert second != first
    assert list(tmp_path.iterdir()) == []

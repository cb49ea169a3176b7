"""What a node and the driver of a Ray cluster exchange, without a cluster."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ghostnoise.lab.runners.ray_task import Mailbox, Message, files_of, temporary_folder, write

from ghostnoise.lab.config import recipe
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.train import Options, train
from support.ray_cases import SHORT, outcome


def test_the_mailbox_keeps_the_latest_of_each_kind():
    box = Mailbox()
    first, late = Message(("digits", "a"), 1, "here"), Message(("digits", "a"), 1, "here", files={"old": b""})
    assert [box.put(first), box.put(Message(("digits", "a"), 2, "there", files={"new": b""})), box.put(late)] == [
        False
    ] * 3
    progress = [Message(("digits", "a"), 1, "here", progress=(step, 9, 0.5, 50.0)) for step in range(3)]
    for message in progress:
        box.put(message)
    taken = box.take(stopping=True)
    assert first in taken
    assert [message.files for message in taken if message.files] == [{"new": b""}], (
        "a late message of an earlier attempt is ignored"
    )
    assert [message.progress for message in taken if message.progress] == [(2, 9, 0.5, 50.0)]
    assert box.take(stopping=True) == []
    assert box.put(first) is True


def test_files_go_from_folder_to_folder(tmp_path):
    chosen = recipe.load("digits", [*SHORT, "meter.every=1", "meter.batches=1", "meter.draws=8"])
    folder = train(chosen, Options(runs=tmp_path, quiet=True, thresholds=False)).folder
    files = files_of(folder)
    assert list(files)[-1] == "result.json", "the result is written after all other files"
    write(tmp_path / "copy", files)
    assert outcome(tmp_path / "copy") == outcome(folder)
    there = [RunFolder(path, pytest.fail).latest().content for path in (folder, tmp_path / "copy")]
    assert there[0] == there[1]
    (name,) = (name for name in files if name.startswith("checkpoints/"))
    write(tmp_path / "other", files | {name: files[name][:-1]})
    assert not checkpoints.saved(tmp_path / "other" / "checkpoints"), "it does not match its checksum"
    (folder / name).write_bytes(b"")
    assert name not in files_of(folder)
    noise = [
        {path.name: path.read_bytes() for path in (place / "noise").iterdir()} for place in (folder, tmp_path / "copy")
    ]
    assert noise[0] == noise[1]
    assert len(noise[0]) == chosen.settings.train.epochs


def test_the_reason_of_a_failure_is_among_the_files(tmp_path):
    RunFolder(tmp_path, pytest.fail).fail({"seed": 0}, "a reason", "a trace")
    files = files_of(tmp_path)
    assert list(files) == ["settings.json", "failure.json"]
    assert json.loads(files["failure.json"])["traceback"] == "a trace"


def test_a_run_reports_what_it_saved_and_can_be_stopped(tmp_path):
    seen = []
    options = Options(runs=tmp_path, quiet=True, thresholds=False, saved=lambda folder: seen.append(files_of(folder)))
    train(recipe.load("digits", SHORT), options)
    assert [files["metrics.jsonl"].count(b"\n") for files in seen] == [1, 2]
    asked = Options(runs=tmp_path / "asked", quiet=True, thresholds=False)
    asked.stop.signal = 15
    stopped = train(recipe.load("digits", SHORT), asked)
    assert (stopped.result, stopped.signal) == (None, 15)
    assert checkpoints.saved(stopped.folder / "checkpoints")


def test_a_temporary_folder_is_removed():
    with temporary_folder() as folder:
        (folder / "some").mkdir()
        (folder / "some" / "file").touch()
    assert not folder.exists()


KILLED = """
import os, signal
from ghostnoise.lab.runners.ray_task import temporary_folder
with temporary_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_temporary_folder_is_removed_after_a_kill():
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("ghostnoise-")
    for _ in range(100):
        if not folder.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{folder} was left")

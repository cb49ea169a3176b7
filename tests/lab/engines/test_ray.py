"""The Ray engine without a cluster: how it refuses, and what goes between nodes and driver."""

import json
import socket
import sys

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.engines import ray_connection
from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.engines.ray import RayEngine
from ghostnoise.lab.engines.ray_task import Letter, Mailbox, files_of, write
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.train import Options, train
from lab.engines.ray_cases import SHORT, outcome


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus": 0}, "--cpus-per-run 0: must be more than 0"),
        ({"gpus": 1.5}, "--gpus-per-run 1.5: must be 0, a part of 1, or a whole number"),
        ({"storage": "s3://bucket/runs"}, "--storage s3://bucket/runs: must be a folder that every node can write"),
        ({"address": "nowhere"}, "--address nowhere: must be HOST:PORT, ray://HOST:PORT or auto"),
        ({"address": "nowhere:port"}, "--address nowhere:port: must be HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, given, message):
    with pytest.raises(UserError) as caught:
        RayEngine(Place(tmp_path), **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_ray_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'ghostnoise\[ray\]'"):
        RayEngine(Place(tmp_path))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens(tmp_path, scheme):
    with socket.socket() as taken:  # bound, and so nobody else's, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"--address {address}: cannot be reached .*`ray start --head`"):
            RayEngine(Place(tmp_path), address=address)


def test_an_address_where_something_else_listens(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_connection, "PATIENCE", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match="what listens there is no Ray cluster"):
            RayEngine(Place(tmp_path), address=address)


def test_the_mailbox_keeps_the_latest_of_each_kind():
    box = Mailbox()
    first, late = Letter(("digits", "a"), 1, "here"), Letter(("digits", "a"), 1, "here", files={"old": b""})
    assert [box.put(first), box.put(Letter(("digits", "a"), 2, "there", files={"new": b""})), box.put(late)] == [
        False
    ] * 3
    progress = [Letter(("digits", "a"), 1, "here", progress=(step, 9, 0.5, 50.0)) for step in range(3)]
    for letter in progress:
        box.put(letter)
    taken = box.take(stopping=True)
    assert first in taken
    assert [letter.files for letter in taken if letter.files] == [{"new": b""}], "an attempt that was given up is late"
    assert [letter.progress for letter in taken if letter.progress] == [(2, 9, 0.5, 50.0)]
    assert box.take(stopping=True) == []
    assert box.put(first) is True


def test_files_go_from_folder_to_folder(tmp_path):
    chosen = recipe.load("digits", [*SHORT, "meter.every=1", "meter.batches=1", "meter.draws=8"])
    folder = train(chosen, Options(runs=tmp_path, quiet=True, thresholds=False)).folder
    files = files_of(folder)
    assert list(files)[-1] == "result.json", "what ends a run is written when all else is there"
    write(tmp_path / "copy", files)
    assert outcome(tmp_path / "copy") == outcome(folder)
    there = [RunFolder(path, pytest.fail).latest() for path in (folder, tmp_path / "copy")]
    assert there[0] == there[1] is not None
    noise = [
        {path.name: path.read_bytes() for path in (place / "noise").iterdir()} for place in (folder, tmp_path / "copy")
    ]
    assert noise[0] == noise[1]
    assert len(noise[0]) == chosen.settings.train.epochs


def test_why_a_run_failed_goes_along(tmp_path):
    RunFolder(tmp_path, pytest.fail).fail({"seed": 0}, "a reason", "a trace")
    files = files_of(tmp_path)
    assert list(files) == ["settings.json", "failure.json"]
    assert json.loads(files["failure.json"])["traceback"] == "a trace"


def test_a_run_tells_what_it_saved_and_can_be_asked_to_stop(tmp_path):
    seen = []
    options = Options(runs=tmp_path, quiet=True, thresholds=False, saved=lambda folder: seen.append(files_of(folder)))
    train(recipe.load("digits", SHORT), options)
    assert [files["metrics.jsonl"].count(b"\n") for files in seen] == [1, 2]
    asked = Options(runs=tmp_path / "asked", quiet=True, thresholds=False)
    asked.stop.signal = 15
    stopped = train(recipe.load("digits", SHORT), asked)
    assert (stopped.result, stopped.signal) == (None, 15)
    assert checkpoints.saved(stopped.folder / "checkpoints")

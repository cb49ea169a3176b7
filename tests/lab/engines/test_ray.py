"""Jobs on a Ray cluster: what comes back, also when nodes vanish, and how it refuses."""

import gc
import json
import os
import socket
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from ghostnoise.lab import recipe
from ghostnoise.lab.engines import Ended, Job, Progressed, Started, ray_connection
from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.engines.ray import RayEngine
from ghostnoise.lab.engines.ray_task import Letter, Mailbox, files_of, write
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.train import Options, train

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]
LONG = [*SHORT, "train.epochs=60", "data.limit=null"]
TIMINGS = ("seconds", "images_per_second", "ended")

# Ray leaves files and sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore:subprocess .* is still running:ResourceWarning"
)


def job(*overrides, settings=SHORT):
    chosen = recipe.load("digits", [*settings, *overrides])
    resolved = recipe.resolve(chosen.settings, device="cpu", processes=1)
    return Job("digits", recipe.identity(resolved), " ".join(overrides) or "digits", resolved)


def outcome(folder):
    """The result and the metrics, but for how long they took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    return [{name: value for name, value in each.items() if name not in TIMINGS} for each in (result, *lines)]


def plain(jobs, runs):
    """The jobs as `train` runs them, with one thread."""
    before = torch.get_num_threads()
    for each in jobs:
        chosen = recipe.load("digits").with_settings(each.settings)
        train(chosen, Options(runs=runs, threads=1, quiet=True, thresholds=False))
    torch.set_num_threads(before)
    return [outcome(runs / each.recipe / each.identity) for each in jobs]


@dataclass
class Told:
    """Events, and what to do at one of a kind."""

    on: dict = field(default_factory=dict)
    events: list = field(default_factory=list)

    def __call__(self, event):
        self.events.append(event)
        action = self.on.get(type(event))
        if action is not None:
            action(event)

    def of(self, kind, each=None):
        return [event for event in self.events if isinstance(event, kind) and each in (None, event.job)]

    def endings(self, jobs):
        assert len(self.of(Ended)) == len(jobs)
        return [ended.status for each in jobs for ended in self.of(Ended, each)]


# Without a cluster


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
    chosen = recipe.load("digits", SHORT)
    folder = train(chosen, Options(runs=tmp_path, quiet=True, thresholds=False)).folder
    files = files_of(folder)
    assert list(files)[-1] == "result.json", "what ends a run is written when all else is there"
    write(tmp_path / "copy", files)
    assert outcome(tmp_path / "copy") == outcome(folder)
    there = [RunFolder(path, pytest.fail).latest() for path in (folder, tmp_path / "copy")]
    assert there[0] == there[1] is not None


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


# With a cluster


@contextmanager
def clustered(nodes):
    """A head that runs nothing, and nodes of one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(nodes)]
    finally:
        ray.shutdown()
        cluster.shutdown()
        gc.collect()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with clustered(2) as (made, _):
        yield made


@contextmanager
def engine(runs, cluster, **more):
    made = RayEngine(Place(runs), address=cluster.address, **more)
    try:
        yield made
    finally:
        made.close()


def never():
    return False


@pytest.mark.slow
def test_jobs_end_with_the_bits_of_plain_runs(tmp_path, cluster):
    jobs = [job(f"seed={seed}") for seed in range(3)] + [job("optim.lr=1e12", "train.epochs=3")]
    told = Told()
    with engine(tmp_path / "ray", cluster) as made:
        made.run(jobs, told, never)
    assert told.endings(jobs) == ["finished"] * 3 + ["diverged"]
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")
    for each, folder in zip(jobs, folders, strict=True):
        assert isinstance(told.of(object, each)[0], Started)
        assert checkpoints.saved(folder / "checkpoints")
        assert json.loads((folder / "settings.json").read_text())["identity"] == each.identity
        assert json.loads((folder / "environment.json").read_text())["threads"] == 1
        RunFolder(folder, pytest.fail).own()  # it is free
    for each in jobs[:3]:
        last = told.of(Progressed, each)[-1]
        assert last.done == last.total


@pytest.mark.slow
def test_a_node_vanishes_and_its_run_goes_on_elsewhere(tmp_path):
    jobs = [job(f"seed={seed}", settings=LONG) for seed in range(4)]
    with clustered(2) as (cluster, nodes):
        begun, gone = {}, []

        def remove(event):
            """The first node on which a run has saved something."""
            if not gone and event.done > 60:
                where = begun[event.job.identity]
                (node,) = (node for node in nodes if node.node_id.startswith(where))
                gone.append(event.job)
                cluster.remove_node(node, allow_graceful=False)

        def begin(event):
            begun[event.job.identity] = event.where.rpartition("/")[2][:8]

        told = Told({Started: begin, Progressed: remove})
        with engine(tmp_path / "ray", cluster, checkpoint_seconds=0.2) as made:
            made.run(jobs, told, never)
    assert told.endings(jobs) == ["finished"] * 4
    assert gone
    starts = {each.identity: [event.where for event in told.of(Started, each)] for each in jobs}
    again = starts.pop(gone[0].identity)
    assert len(again) == 2
    assert again[1].endswith(", attempt 2")
    assert again[1].split("/")[1][:8] != again[0].split("/")[1]
    events = told.of(object, gone[0])
    second = events.index(told.of(Started, gone[0])[1])
    went_on = next(event.done for event in events[second:] if isinstance(event, Progressed))
    assert went_on > 44, "two epochs of 22 steps had come back"
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")

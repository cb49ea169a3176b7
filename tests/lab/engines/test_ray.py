"""Jobs on a Ray cluster: what comes back, also when nodes vanish, and how it refuses."""

import gc
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from ghostnoise.lab import recipe
from ghostnoise.lab.engines import Ended, Job, Progressed, Started, ray_connection, ray_round
from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.engines.ray import RayEngine
from ghostnoise.lab.engines.ray_task import Letter, Mailbox, files_of, write
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import RunFolder, checkpoints
from ghostnoise.lab.train import Options, train

LONG = ["train.epochs=20", "train.batch_size=64", "train.device=cpu", "optim.warmup_epochs=0"]
SHORT = [*LONG, "train.epochs=2", "data.limit=256"]
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


@pytest.fixture(scope="module")
def cluster():
    """A head that runs nothing, and two nodes of one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        made.add_node(num_cpus=1)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        gc.collect()  # what Ray left open warns here, where it is expected


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
def test_a_node_vanishes_and_its_run_goes_on_elsewhere(tmp_path, cluster):
    jobs = [job(f"seed={seed}", settings=LONG) for seed in range(4)]
    begun, gone = {}, []

    def begin(event):
        begun[event.job.identity] = event.where.rpartition("/")[2][:8]

    def remove(event):
        """Take away the first node on which a run is in its third epoch."""
        if not gone and event.done > 60:
            (node,) = (node for node in cluster.worker_nodes if node.node_id.startswith(begun[event.job.identity]))
            gone.append(event.job)
            cluster.remove_node(node, allow_graceful=False)

    told = Told({Started: begin, Progressed: remove})
    try:
        with engine(tmp_path / "ray", cluster, checkpoint_seconds=0.2) as made:
            made.run(jobs, told, never)
    finally:
        cluster.add_node(num_cpus=1)
    assert told.endings(jobs) == ["finished"] * 4
    starts = {each.identity: [event.where for event in told.of(Started, each)] for each in jobs}
    first, second = starts.pop(gone[0].identity)
    assert second.endswith(", attempt 2")
    assert second.split("/")[1][:8] != first.split("/")[1]
    assert all(len(where) == 1 for where in starts.values())
    events = told.of(object, gone[0])
    again = events.index(told.of(Started, gone[0])[1])
    went_on = next(event.done for event in events[again:] if isinstance(event, Progressed))
    assert went_on > 44, "two epochs of 22 steps had come back"
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")


@pytest.mark.slow
def test_a_job_that_fails_is_recorded_and_others_go_on(tmp_path, cluster):
    good, bad = job(), job("train.batch_size=512")
    told = Told()
    with engine(tmp_path, cluster) as made:
        made.run([bad, good], told, never)
        assert told.endings([bad, good]) == ["failed", "finished"]
        folder = tmp_path / bad.recipe / bad.identity
        failure = json.loads((folder / "failure.json").read_text())
        assert "larger than the training set" in failure["message"] == told.of(Ended, bad)[0].message
        assert failure["traceback"].startswith("Traceback")
        assert failure["time"]
        again = Told()
        made.run([good], again, never)
    assert [type(event) for event in again.events] == [Ended], "a finished run is not run again"


@pytest.mark.slow
def test_a_job_that_is_lost_every_time_fails(tmp_path, cluster, monkeypatch):
    def crash(errand, mailbox):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ray_round, "attempt", crash)
    told, each = Told(), job()
    with engine(tmp_path, cluster) as made:
        made.run([each], told, never)
    (ended,) = told.of(Ended)
    assert ended.status == "failed"
    assert re.match("lost 5 times, the last time by WorkerCrashedError: ", ended.message)
    assert json.loads((tmp_path / each.recipe / each.identity / "failure.json").read_text())["message"] == ended.message


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["sent", "shared"])
def test_stopped_jobs_save_and_the_next_call_goes_on(tmp_path, cluster, shared):
    jobs = [job(f"seed={seed}", settings=LONG) for seed in range(3)]
    more = {"storage": f"file://{tmp_path}/ray"} if shared else {}
    told = Told()

    def asked():
        return any(event.done > 60 for event in told.of(Progressed))

    again = Told()
    with engine(tmp_path / ("unused" if shared else "ray"), cluster, **more) as made:
        made.run(jobs, told, asked)
        assert told.endings(jobs) == ["stopped"] * 3
        assert len({event.job.identity for event in told.of(Started)}) <= 2, "nodes have a CPU each"
        (progressed, *_) = (event.job for event in told.of(Progressed) if event.done > 60)
        folder = tmp_path / "ray" / progressed.recipe / progressed.identity
        saved = int(checkpoints.saved(folder / "checkpoints")[0].name.split("-")[1])
        assert 60 < saved < 20 * 22
        made.run(jobs, again, never)
    assert again.endings(jobs) == ["finished"] * 3
    assert again.of(Progressed, progressed)[0].done > saved
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")
    assert not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_a_run_that_another_process_has_is_waited_for(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(ray_round, "LOOKED_EVERY", 0.5)
    mine, others = job("seed=1"), job("seed=2")
    (expected,) = plain([others], tmp_path / "other")
    theirs = RunFolder(tmp_path / others.recipe / others.identity, pytest.fail)
    theirs.own()

    def finish(event):
        write(theirs.path, files_of(tmp_path / "other" / others.recipe / others.identity))
        theirs.release()

    told = Told({Ended: finish})
    with engine(tmp_path, cluster) as made:
        made.run([others, mine], told, never)
        assert told.endings([mine, others]) == ["finished", "finished"]
        assert not told.of(Started, others)
        assert outcome(theirs.path) == expected
        (theirs.path / "result.json").unlink()
        theirs.own()
        left, looks = Told(), iter(range(5))
        made.run([others], left, lambda: next(looks, None) is None)
        theirs.release()
    assert left.endings([others]) == ["elsewhere"]


@pytest.mark.slow
def test_more_than_a_node_has_is_refused(tmp_path, cluster):
    with pytest.raises(UserError, match=r"--cpus-per-run 2, --gpus-per-run 0\.25: no node has as many"):
        RayEngine(Place(tmp_path), address=cluster.address, cpus=2, gpus=0.25)


@pytest.mark.slow
def test_without_nodes_for_long_jobs_fail(tmp_path, cluster, monkeypatch):
    told = Told()
    with engine(tmp_path, cluster) as made:
        monkeypatch.setattr(ray_round, "NODES_WITHIN", 1.0)
        monkeypatch.setattr(made.connection, "slots", lambda cpus, gpus: 0)
        made.run([job(settings=LONG)], told, never)
    (ended,) = told.of(Ended)
    assert ended.status == "failed"
    assert "no node can hold a run" in ended.message


LOCAL = """
import os, pathlib, signal, sys
before = signal.getsignal(signal.SIGTERM)
from ghostnoise.lab import recipe
from ghostnoise.lab.engines import Ended, Job
from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.engines.ray import RayEngine

engine = RayEngine(Place(pathlib.Path(sys.argv[1])), cpus=0.5)
assert signal.getsignal(signal.SIGTERM) is before
listening = []
mine = {os.readlink(path) for pid in os.popen(f"ps -o pid= -s {os.getsid(0)}").read().split()
        for path in pathlib.Path(f"/proc/{pid}/fd").glob("*") if path.is_symlink()}
for line in [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]:
    fields = line.split()
    if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
        listening.append(fields[1].partition(":")[0])
assert listening
assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}, listening
settings = recipe.resolve(recipe.load("digits", sys.argv[2:]).settings, device="cpu", processes=1)
ended = []
engine.run([Job("digits", recipe.identity(settings), "a run", settings)],
           lambda event: ended.append(event.status) if isinstance(event, Ended) else None, lambda: False)
engine.close()
assert ended == ["finished"], ended
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cluster_of_our_own_is_heard_on_this_machine_alone(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path), *SHORT], capture_output=True, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "digits").iterdir()
    assert [outcome(folder)] == plain([job()], tmp_path / "plain")

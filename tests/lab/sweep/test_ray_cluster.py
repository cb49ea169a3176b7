"""Jobs on a Ray cluster: what the driver receives, also when nodes vanish."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Ended, Started, Step
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import RunFolder, read
from ghostnoise.lab.sweep import ray as runners
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.ray import RayRunner
from support import experiment
from support.ray_cases import LONG, Recorder, job, outcome, plain

# Ray leaves files and sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore:subprocess .* is still running:ResourceWarning"
)


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
def runner(runs, cluster, checkpoint_seconds=60.0, **more):
    made = RayRunner(Place(runs, checkpoint_seconds=checkpoint_seconds), address=cluster.address, **more)
    try:
        yield made
    finally:
        made.close()


def never():
    return False


@pytest.mark.slow
def test_jobs_end_with_the_bits_of_plain_runs(tmp_path, cluster):
    jobs = [job(f"seed={seed}") for seed in range(3)] + [job("optim.lr=1e12", "train.epochs=3")]
    recorded = Recorder()
    with runner(tmp_path / "ray", cluster) as made:
        made.run(jobs, recorded, never)
    assert recorded.endings(jobs) == ["finished"] * 3 + ["diverged"]
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")
    for each, folder in zip(jobs, folders, strict=True):
        assert isinstance(recorded.of(object, each)[0], Started)
        stored = read(folder)
        assert (stored.identity, [each["threads"] for each in stored.environments]) == (each.identity, [1])
        weights, _ = checkpoints.weights_of(folder, pytest.fail)
        assert checkpoints.weights_sha256(weights) == stored.result["weights_sha256"]
        assert {path.name for path in folder.iterdir()} == {".lock", "run.json", "checkpoints"}
        RunFolder(folder, pytest.fail).own()  # it is free
    for each in jobs[:3]:
        assert all(0 < event.done <= event.total == 6 for event in recorded.of(Step, each))
        assert recorded.of(Step, each)


@pytest.mark.slow
def test_the_run_of_a_vanished_node_is_resumed_on_another(tmp_path, cluster):
    jobs = [job(f"seed={seed}", settings=LONG) for seed in range(4)]
    begun, gone = {}, []

    def begin(run, event):
        begun[run.identity] = event.where.rpartition("/")[2][:8]

    def remove(run, event):
        """Take away the first node on which a run is in its third epoch."""
        if not gone and event.done > 60:
            (node,) = (node for node in cluster.worker_nodes if node.node_id.startswith(begun[run.identity]))
            gone.append(run)
            cluster.remove_node(node, allow_graceful=False)

    recorded = Recorder({Started: begin, Step: remove})
    try:
        with runner(tmp_path / "ray", cluster, checkpoint_seconds=0.2) as made:
            made.run(jobs, recorded, never)
    finally:
        cluster.add_node(num_cpus=1)
    assert recorded.endings(jobs) == ["finished"] * 4
    starts = {each.identity: [event.where for event in recorded.of(Started, each)] for each in jobs}
    first, second = starts.pop(gone[0].identity)
    assert second.endswith(", attempt 2")
    assert second.split("/")[1][:8] != first.split("/")[1]
    assert all(len(where) == 1 for where in starts.values())
    events = recorded.of(object, gone[0])
    again = events.index(recorded.of(Started, gone[0])[1])
    went_on = next(event.done for event in events[again:] if isinstance(event, Step))
    assert went_on > 44, "two epochs of 22 steps had come back"
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")


def last_step(folder):
    """Return the step of the last checkpoint that can be read; 0 if there is none."""
    found = next(checkpoints.readable(folder / "checkpoints", pytest.fail, rename=False), None)
    return int(found.path.name.split("-")[1]) if found else 0


@pytest.mark.slow
def test_a_node_vanishes_after_a_checkpoint_came_back(tmp_path, cluster):
    """The run is resumed from that checkpoint."""
    each = job("seed=11", settings=LONG)
    folder = tmp_path / "ray" / each.recipe / each.identity
    where, copied = [], []

    def remove(run, event):
        if not copied and (step := last_step(folder)):
            (node,) = (node for node in cluster.worker_nodes if node.node_id.startswith(where[0]))
            copied.append(step)
            cluster.remove_node(node, allow_graceful=False)

    recorded = Recorder({Started: lambda run, event: where.append(event.where.rpartition("/")[2][:8]), Step: remove})
    try:
        with runner(tmp_path / "ray", cluster, checkpoint_seconds=0.1) as made:
            made.run([each], recorded, never)
    finally:
        cluster.add_node(num_cpus=1)
    assert copied, "no checkpoint came back before the run ended"
    assert recorded.endings([each]) == ["finished"]
    assert len(where) == 2
    events = recorded.of(object)
    again = events.index(recorded.of(Started)[1])
    assert next(event.done for event in events[again:] if isinstance(event, Step)) > copied[0]
    assert recorded.of(Started)[1].done >= copied[0]
    assert [outcome(folder)] == plain([each], tmp_path / "plain")


DRIVER = """
import sys
from pathlib import Path
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.ray import RayRunner
from support import experiment
from support.ray_cases import LONG, job

if __name__ == "__main__":
    runner = RayRunner(Place(Path(sys.argv[1]), checkpoint_seconds=0.1), address=sys.argv[2])
    runner.run([job("seed=12", settings=LONG)], lambda *_: None, lambda: False)
"""


@pytest.mark.slow
def test_the_driver_is_killed_after_a_checkpoint_came_back(tmp_path, cluster):
    """The next call resumes from that checkpoint."""
    each = job("seed=12", settings=LONG)
    folder = tmp_path / "ray" / each.recipe / each.identity
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "ray"), cluster.address]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while driver.poll() is None and not last_step(folder):
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    out, _ = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, out
    copied = last_step(folder)
    assert copied
    assert read(folder).status == "interrupted"
    recorded = Recorder()
    with runner(tmp_path / "ray", cluster) as made:
        made.run([each], recorded, never)
    assert recorded.endings([each]) == ["finished"]
    assert recorded.of(Step)[0].done > copied
    assert [outcome(folder)] == plain([each], tmp_path / "plain")
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
def test_a_failure_is_recorded_and_other_jobs_continue(tmp_path, cluster):
    good, bad = job(), job("train.batch_size=512")
    recorded = Recorder()
    with runner(tmp_path, cluster) as made:
        made.run([bad, good], recorded, never)
        assert recorded.endings([bad, good]) == ["failed", "finished"]
        folder = tmp_path / bad.recipe / bad.identity
        failure = json.loads((folder / "failure.json").read_text())
        assert (
            "must be at most the number of training images" in failure["message"] == recorded.of(Ended, bad)[0].message
        )
        assert failure["traceback"].startswith("Traceback")
        assert "in execute" in failure["traceback"], "the node's own"
        assert failure["time"]
        again = Recorder()
        made.run([good], again, never)
    assert [type(event) for event in again.of(object)] == [Ended], "a finished run is not run again"


@pytest.mark.slow
def test_a_job_that_is_lost_every_time_fails(tmp_path, cluster, monkeypatch):
    def crash(*_):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
        yield

    monkeypatch.setattr(runners, "attempt", crash)
    recorded, each = Recorder(), job()
    with runner(tmp_path, cluster) as made:
        made.run([each], recorded, never)
    (ended,) = recorded.of(Ended)
    assert ended.status == "failed"
    assert re.match("lost 5 times; the last time: WorkerCrashedError: ", ended.message)
    assert json.loads((tmp_path / each.recipe / each.identity / "failure.json").read_text())["message"] == ended.message


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["sent", "shared"])
def test_stopped_jobs_save_and_the_next_call_resumes(tmp_path, cluster, shared):
    jobs = [job(f"seed={seed}", settings=LONG) for seed in range(3)]
    more = {"storage": f"file://{tmp_path}/ray"} if shared else {}
    recorded = Recorder()

    def asked():
        return any(event.done > 60 for event in recorded.of(Step))

    again = Recorder()
    with runner(tmp_path / ("unused" if shared else "ray"), cluster, **more) as made:
        made.run(jobs, recorded, asked)
        assert recorded.endings(jobs) == ["stopped"] * 3
        assert len({run.identity for run, event in recorded.events if isinstance(event, Started)}) <= 2, (
            "nodes have a CPU each"
        )
        (progressed, *_) = (run for run, event in recorded.events if isinstance(event, Step) and event.done > 60)
        folder = tmp_path / "ray" / progressed.recipe / progressed.identity
        saved = int(checkpoints.saved(folder / "checkpoints")[0].name.split("-")[1])
        assert 60 < saved < 20 * 22
        made.run(jobs, again, never)
    assert again.endings(jobs) == ["finished"] * 3
    assert again.of(Step, progressed)[0].done > saved
    folders = [tmp_path / "ray" / each.recipe / each.identity for each in jobs]
    assert list(map(outcome, folders)) == plain(jobs, tmp_path / "plain")
    assert not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_a_run_that_another_process_owns_is_waited_for(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(runners, "CHECK_EVERY", 0.5)
    mine, others = job("seed=1"), job("seed=2")
    (expected,) = plain([others], tmp_path / "other")
    theirs = RunFolder(tmp_path / others.recipe / others.identity, pytest.fail)
    theirs.own()

    def finish(run, event):
        shutil.copytree(tmp_path / "other" / others.recipe / others.identity, theirs.path, dirs_exist_ok=True)
        theirs.release()

    recorded = Recorder({Ended: finish})
    with runner(tmp_path, cluster) as made:
        made.run([others, mine], recorded, never)
        assert recorded.endings([mine, others]) == ["finished", "finished"]
        assert not recorded.of(Started, others)
        assert outcome(theirs.path) == expected
        (theirs.path / "run.json").unlink()
        theirs.own()
        left, looks = Recorder(), iter(range(5))
        made.run([others], left, lambda: next(looks, None) is None)
        theirs.release()
    assert left.endings([others]) == ["elsewhere"]


@pytest.mark.slow
def test_more_than_a_node_has_is_refused(tmp_path, cluster):
    with pytest.raises(UserError, match=r"--cpus-per-run 2, --gpus-per-run 0\.25: no node has that many"):
        RayRunner(Place(tmp_path), address=cluster.address, cpus=2, gpus=0.25)


@pytest.mark.slow
def test_without_nodes_for_long_jobs_fail(tmp_path, cluster, monkeypatch):
    recorded = Recorder()
    with runner(tmp_path, cluster) as made:
        monkeypatch.setattr(runners, "NODES_WITHIN", 1.0)
        monkeypatch.setattr(made, "slots", lambda: 0)
        made.run([job(settings=LONG)], recorded, never)
    (ended,) = recorded.of(Ended)
    assert ended.status == "failed"
    assert "no node could hold a run" in ended.message


HEADLESS = """
import sys
from ghostnoise import cli
from ghostnoise.lab.sweep import ray

if __name__ == "__main__":
    ray.HEAD_WITHIN, ray.CHECK_EVERY = 4.0, 1.0
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_head_of_the_cluster_vanishes(tmp_path):
    """The sweep ends with a line that tells what to do, before Ray ends the process, and what came back is saved."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        (tmp_path / "driver.py").write_text(HEADLESS)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        recipe = experiment.write(tmp_path, base=experiment.BASE.replace("epochs = 1", "epochs = 100000"))
        words = ["sweep", recipe, "--only", "BN", "--seeds", "0", "--runs", str(tmp_path / "ray"), "--runner", "ray"]
        words += ["--address", made.address, "--checkpoint-seconds", "0.1"]
        command = [sys.executable, str(tmp_path / "driver.py"), *words]
        driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while driver.poll() is None and not list(tmp_path.glob("ray/small/*/checkpoints/step-*.pt")):
            time.sleep(0.05)
        made.head_node.kill_gcs_server()
        out, errors = driver.communicate(timeout=120)
    finally:
        made.shutdown()
        gc.collect()
    assert driver.returncode == 2, errors
    assert out.splitlines() == ["1 run of small to train, 0 ended earlier"]
    line = errors.splitlines()[-1]
    assert line.startswith("ghostnoise sweep: the head of the Ray cluster, ")
    assert line.endswith("start the cluster again, and repeat the command to resume")
    (folder,) = (tmp_path / "ray" / "small").iterdir()
    assert read(folder).status == "interrupted"
    assert last_step(folder)

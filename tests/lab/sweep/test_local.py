"""The local runner: every job ends once, with the same bits as a single run, even if workers are killed."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from ghostnoise import doctor
from ghostnoise.lab.events import Ended, Step
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import RunFolder, read
from ghostnoise.lab.sweep import local
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.local import DEATHS, LocalRunner
from support import jobs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def never():
    return False


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """One worker for all tests, as its imports take seconds; each test has a recipe's folder of its own."""
    made = LocalRunner(Place(tmp_path_factory.mktemp("runs"), checkpoint_seconds=0.02), workers=1, threads=1)
    yield made
    made.close()


def kill(runner, run):
    """Kill the worker that has a run."""
    (slot,) = (slot for slot in runner.slots if slot.run is run)
    os.kill(slot.process.pid, signal.SIGKILL)


def killing(runner, log):
    """Kill the worker once, when it first reports progress."""

    def emit(run, event):
        first = isinstance(event, Step) and not log.of(Step)
        log.take(run, event)
        if first:
            kill(runner, run)

    return emit


def test_all_jobs_finish_with_the_bits_of_single_runs_and_a_failing_one_stops_no_other(runner, tmp_path):
    good = [jobs.job(*jobs.SHORT, seed=seed, recipe_name="all") for seed in range(3)]
    bad = jobs.job(*jobs.SHORT, "train.batch_size=4096", seed=9, recipe_name="all")
    log = jobs.Log()
    runner.run([good[0], bad, *good[1:]], log.take, never)
    assert log.ended() == [
        ("run seed 0", "finished"), ("run seed 9", "failed"), ("run seed 1", "finished"), ("run seed 2", "finished"),
    ]  # fmt: skip
    assert log.started() == ["run seed 0", "run seed 1", "run seed 2"]
    for each in good:
        assert jobs.weights(each, runner.place.runs) == jobs.alone(each, tmp_path)
    failure = json.loads((runner.place.folder(bad) / "failure.json").read_text())
    assert "must be at most the number of training images" in failure["message"]
    assert "Traceback" in failure["traceback"]


@pytest.mark.slow
def test_the_job_of_a_killed_worker_is_resumed_to_the_same_bits(runner, tmp_path):
    first, second = jobs.job(*jobs.LONG, recipe_name="killed"), jobs.job(*jobs.SHORT, seed=1, recipe_name="killed")
    log = jobs.Log()
    runner.run([first, second], killing(runner, log), never)
    assert log.started() == ["run seed 0", "run seed 0", "run seed 1"]
    assert log.ended() == [("run seed 0", "finished"), ("run seed 1", "finished")]
    for each in (first, second):
        assert jobs.weights(each, runner.place.runs) == jobs.alone(each, tmp_path)


def test_a_job_fails_when_three_of_its_workers_have_died(runner):
    each = jobs.job(*jobs.LONG, recipe_name="deadly")
    runner.deaths[each.identity] = DEATHS - 1
    log = jobs.Log()
    runner.run([each], killing(runner, log), never)
    del runner.deaths[each.identity]
    assert log.ended() == [("run seed 0", "failed")]
    failure = json.loads((runner.place.folder(each) / "failure.json").read_text())
    assert failure["message"].startswith("its worker died 3 times; the last time it was killed by SIGKILL")


@pytest.mark.slow
def test_a_stop_saves_running_jobs_and_the_next_call_resumes_to_the_same_bits(runner, tmp_path):
    given = [jobs.job(*jobs.LONG, recipe_name="stop"), jobs.job(*jobs.SHORT, seed=1, recipe_name="stop")]
    log = jobs.Log()
    runner.run(given, log.take, stop=lambda: bool(log.of(Step)))
    assert sorted(log.ended()) == [("run seed 0", "stopped"), ("run seed 1", "stopped")]
    folder = runner.place.folder(given[0])
    assert list((folder / "checkpoints").iterdir())
    assert read(folder).status == "interrupted"
    again = jobs.Log()
    runner.run(given, again.take, never)
    assert again.ended() == [("run seed 0", "finished"), ("run seed 1", "finished")]
    assert jobs.weights(given[0], runner.place.runs) == jobs.alone(given[0], tmp_path)


@pytest.mark.slow
def test_runs_of_other_processes_are_waited_for_and_taken_over_if_they_are_left(runner, tmp_path):
    finished, left, own = (jobs.job(*jobs.SHORT, seed=seed, recipe_name="others") for seed in range(3))
    folders = [RunFolder(runner.place.folder(each), pytest.fail) for each in (finished, left)]
    for folder in folders:
        folder.own()
    jobs.alone(finished, tmp_path)
    elsewhere = tmp_path / "others" / finished.identity
    log = jobs.Log()

    def others():
        """Release both runs once the runner has finished its own; one of them is finished."""
        if log.ended() == [("run seed 2", "finished")] and folders:
            shutil.copytree(elsewhere, folders[0].path, dirs_exist_ok=True)
            while folders:
                folders.pop().release()
        return False

    runner.run([finished, left, own], log.take, others)
    assert sorted(log.ended()) == [("run seed 0", "finished"), ("run seed 1", "finished"), ("run seed 2", "finished")]
    assert log.started() == ["run seed 2", "run seed 1"]


@pytest.mark.slow
def test_two_runners_share_the_work_and_train_nothing_twice(runner):
    given = [jobs.job(*jobs.SHORT, seed=seed, recipe_name="shared") for seed in range(6)]
    other = LocalRunner(runner.place, workers=1, threads=1)
    for each in (runner, other):  # imports are over when they meet
        each.run([jobs.job(*jobs.SHORT, seed=9, recipe_name="shared")], lambda *_: None, never)
    logs = [jobs.Log(), jobs.Log()]
    threads = [
        threading.Thread(target=each.run, args=(given, log.take, never))
        for each, log in zip((runner, other), logs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    names = [each.name for each in given]
    assert sorted(logs[0].started() + logs[1].started()) == names
    for log in logs:
        assert sorted(log.ended()) == [(name, "finished") for name in names]


def test_threads_and_gpus_are_shared_fairly(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    shares = []
    for options in (
        {}, {"workers": 3}, {"workers": 9}, {"workers": 2, "threads": 1},
        {"gpus": ["0", "3"]}, {"gpus": ["0", "3"], "workers": 4},
    ):  # fmt: skip
        runner = LocalRunner(Place(tmp_path), **options)
        shares.append([(slot.options.threads, slot.options.gpu) for slot in runner.slots])
        runner.close()
    assert shares == [
        [(1, None)] * 8, [(2, None)] * 3, [(1, None)] * 9, [(1, None)] * 2,
        [(4, "0"), (4, "3")], [(2, "0"), (2, "3"), (2, "0"), (2, "3")],
    ]  # fmt: skip


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_runners_meet_a_damaged_checkpoint(runner, tmp_path):
    """One of them sets it aside and resumes from the one before, and the other waits for it."""
    each = jobs.job(*jobs.LONG, recipe_name="damaged")
    log = jobs.Log()

    def two_saved():
        return len(checkpoints.saved(runner.place.folder(each) / "checkpoints")) == 2

    runner.run([each], log.take, two_saved)
    assert log.ended() == [("run seed 0", "stopped")]
    last, _ = checkpoints.saved(runner.place.folder(each) / "checkpoints")
    last.write_bytes(last.read_bytes()[:-1])
    other = LocalRunner(runner.place, workers=1, threads=1)
    other.run([jobs.job(*jobs.SHORT, seed=9, recipe_name="damaged")], lambda *_: None, never)  # imports are over
    logs = [jobs.Log(), jobs.Log()]
    threads = [
        threading.Thread(target=made.run, args=([each], made_log.take, never))
        for made, made_log in zip((runner, other), logs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert [made_log.ended() for made_log in logs] == [[("run seed 0", "finished")]] * 2
    assert len(logs[0].started() + logs[1].started()) == 1
    (message,) = (event.message for made_log in logs for event in made_log.of(Ended) if event.message)
    assert message.startswith(f"warning: {last} is damaged (")
    assert len(message.splitlines()) == 1
    assert [path.suffix for path in last.parent.iterdir()].count(".damaged") == 1
    assert jobs.weights(each, runner.place.runs) == jobs.alone(each, tmp_path)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid):
    """Return the memory of a process in MB."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_two_thousand_runs_leave_memory_and_descriptors_as_they_are(tmp_path):
    """In the worker and in the process of the sweep, between the first 100 runs and the last 100."""
    count, settings = 2000, ["model.name=mlp", "model.widths=[4]", "data.limit=64", "train.batch_size=32"]
    given = [jobs.job(*settings, "train.epochs=1", "optim.warmup_epochs=0", seed=seed) for seed in range(count)]
    runner = LocalRunner(Place(tmp_path), workers=1, threads=1)
    measured = []

    def emit(run, event):
        if isinstance(event, Ended):
            worker = runner.slots[0].process.pid
            measured.append((descriptors(worker), descriptors(os.getpid()), resident(worker), resident(os.getpid())))

    runner.run(given, emit, never)
    runner.close()
    assert len(measured) == count
    first, last = (list(zip(*some, strict=True)) for some in (measured[:100], measured[-100:]))
    assert [max(last[at]) <= max(first[at]) for at in (0, 1)] == [True, True], "descriptors"
    grown = [statistics.median(last[at]) - statistics.median(first[at]) for at in (2, 3)]
    assert max(grown) < 30, f"MB in 2,000 runs: {grown}"


def test_ctrl_c_does_not_reach_a_worker_that_is_starting():
    script = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with local._interrupts_blocked():
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(jobs.__file__).parents[1])!r})
from support import jobs
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.local import LocalRunner
runner = LocalRunner(Place(Path({str(tmp_path)!r})), workers=1, threads=1)
given = [jobs.job("train.epochs=3000", "train.batch_size=64")]
runner.run(given, lambda *_: print(runner.slots[0].process.pid, flush=True), lambda: False)
"""
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    assert alive(worker)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)
    assert list(tmp_path.glob("digits/*/checkpoints/*.pt")), "it saved a checkpoint before it exited"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_workers_killed_at_random_change_nothing(tmp_path):
    chance = random.Random(0)
    given = [jobs.job("train.epochs=4", "train.batch_size=64", seed=seed) for seed in range(12)]
    log, deaths = jobs.Log(), Counter()
    runner = LocalRunner(Place(tmp_path / "killed", checkpoint_seconds=0.02), workers=2, threads=1)

    def emit(run, event):
        log.take(run, event)
        key = run.identity
        if isinstance(event, Step) and deaths[key] < DEATHS - 1 and chance.random() < 0.5:
            deaths[key] += 1
            time.sleep(chance.uniform(0, 0.05))
            kill(runner, run)

    runner.run(given, emit, never)
    runner.close()
    assert sum(deaths.values()) >= 6
    assert sorted(log.ended()) == sorted((each.name, "finished") for each in given)
    for each in given:
        assert jobs.weights(each, tmp_path / "killed") == jobs.alone(each, tmp_path / "alone")

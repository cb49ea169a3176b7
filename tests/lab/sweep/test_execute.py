"""A run in the process of a worker: whatever happens, it ends with one event."""

import json
from dataclasses import replace

import pytest

from ghostnoise.lab.events import Ended, Epoch, Saved, Started, Step
from ghostnoise.lab.store.folder import RunFolder, read
from ghostnoise.lab.store.scan import look
from ghostnoise.lab.sweep import execute as executing
from ghostnoise.lab.sweep.execute import Deferred, Place, execute
from ghostnoise.lab.train import run as training
from ghostnoise.lab.train.machine import Stop
from support import jobs


def executed(run, runs, **options):
    """The events of a run; the last one is its end."""
    events = list(execute(run, Place(runs), threads=1, **options))
    assert [isinstance(event, Ended) for event in events] == [False] * (len(events) - 1) + [True]
    return events


def test_a_run_yields_its_events_and_ends_with_a_result(tmp_path):
    run = jobs.job(*jobs.SHORT)
    events = executed(run, tmp_path, step_seconds=0)
    assert [type(event) for event in events] == [Started, *3 * [Step], Epoch, Saved, Ended]
    step = events[1]
    assert (step.done, step.total) == (1, 3)
    assert 0 < step.loss < 10
    assert 0 <= step.accuracy <= 100
    assert (events[-1].status, events[-1].message) == ("finished", "")
    assert events[-1].run.result == look(tmp_path / "digits" / run.identity, pytest.fail).result
    assert events[-1].run.curve is None, "which is in the folder"
    assert [type(event) for event in executed(run, tmp_path)] == [Ended]


def test_a_run_can_be_asked_to_stop(tmp_path):
    run, stop, events = jobs.job(*jobs.SHORT, "train.epochs=9"), Stop(), []
    for event in execute(run, Place(tmp_path), threads=1, stop=stop):
        events.append(event)
        stop.signal = 15 * isinstance(event, Saved)
    assert events[-1].status == "stopped"
    assert sum(isinstance(event, Saved) for event in events) == 2, "after an epoch, and when it stopped"


def test_a_run_with_another_identity_on_this_machine_fails(tmp_path):
    given = jobs.job(*jobs.SHORT)
    *_, ended = executed(replace(given, identity="0" * len(given.identity)), tmp_path)
    assert ended.status == "failed"
    assert f"run seed 0: has the identity {given.identity} on " in ended.message
    assert "all machines must have the same version of ghostnoise" in ended.message


def test_a_defect_is_recorded_and_forgotten_when_the_run_begins_again(tmp_path, monkeypatch):
    run = jobs.job(*jobs.SHORT)

    def broken(*_):
        raise ZeroDivisionError("by 0")

    with monkeypatch.context() as patch:
        patch.setattr(training.models, "build", broken)
        (ended,) = executed(run, tmp_path)
    assert (ended.status, ended.message) == ("failed", "ZeroDivisionError: by 0")
    found = look(tmp_path / "digits" / run.identity, pytest.fail)
    assert found.status == "failed"
    assert found.seed == 0
    assert found.failure["message"] == "ZeroDivisionError: by 0"
    assert "in broken" in found.failure["traceback"]
    assert executed(run, tmp_path)[-1].status == "finished"
    assert not (found.folder / "failure.json").exists()


def test_a_diverged_run_is_over(tmp_path):
    assert executed(jobs.job(*jobs.SHORT, "optim.lr=1e30", "train.epochs=2"), tmp_path)[-1].status == "diverged"


def test_a_run_that_another_process_owns_is_left_alone_and_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(executing, "CHECK_EVERY", 0.0)
    run = jobs.job(*jobs.SHORT)
    folder = RunFolder(tmp_path / "digits" / run.identity, pytest.fail)
    folder.own()
    assert executed(run, tmp_path) == [Ended("elsewhere")]
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock"]
    deferred = Deferred(Place(tmp_path))
    deferred.add(run)
    assert deferred.check() == ([], [])
    folder.release()
    assert deferred.check() == ([], [run])
    deferred.add(run)
    executed(run, tmp_path)
    ((ended, event),), free = deferred.check()
    assert (ended, event.status, free, deferred.runs) == (run, "finished", [], {})


def test_warnings_of_train_are_in_the_message(tmp_path):
    run = jobs.job(*jobs.SHORT)
    folder = tmp_path / "digits" / run.identity
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001-0123456789abcdef.pt").write_bytes(b"no")
    ended = executed(run, tmp_path)[-1]
    assert ended.status == "finished"
    assert ended.message.startswith("warning: ")
    assert "is damaged" in ended.message


def test_a_folder_that_cannot_be_written_fails_the_run(tmp_path):
    (tmp_path / "digits").write_text("a file")
    (ended,) = executed(jobs.job(*jobs.SHORT), tmp_path)
    assert ended.status == "failed"
    assert json.dumps(ended.message)


def test_what_a_sweep_asks_for_reaches_the_training(tmp_path):
    run = jobs.job(*jobs.SHORT)
    place = Place(tmp_path, keep="checkpoints", log_steps=1)
    events = list(execute(run, place, threads=1, step_seconds=1e9))
    assert [event.gradient_norm > 0 for event in events if isinstance(event, Step)] == [True] * 3
    names = [path.name[:5] for path in (read(tmp_path / "digits" / run.identity).folder / "checkpoints").iterdir()]
    assert sorted(names) == ["final", "step-"]

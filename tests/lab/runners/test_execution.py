import json
import shutil
from dataclasses import replace

import pytest

from ghostnoise.lab.runners import Ended, Place, execution
from ghostnoise.lab.store import RunFolder, scan
from ghostnoise.lab.train.stop import Stop
from support import jobs


def executed(each, runs, report=lambda *numbers: None, **options):
    return execution.execute(each, Place(runs), report, threads=1, **options)


def test_a_job_reports_and_ends_with_a_result(tmp_path):
    each, told, begun = jobs.job(*jobs.SHORT), [], []
    ended = executed(each, tmp_path, lambda *numbers: told.append(numbers), on_start=lambda: begun.append(True))
    assert ended == Ended(each, "finished")
    assert begun == [True]
    done, total, loss, accuracy = told[0]
    assert (done, total) == (1, 3)
    assert 0 < loss < 10
    assert 0 <= accuracy <= 100
    assert scan.look(tmp_path / "digits" / each.identity, pytest.fail).status == "finished"


def test_what_is_reported_is_of_training_at_most_so_often_and_only_while_ready(tmp_path):
    """Of 3 steps in each of 4 epochs, never the held-out accuracy, which would jump between training's."""
    overrides = [*jobs.SHORT, "train.epochs=4"]

    def told(name, **options):
        numbers = []
        executed(jobs.job(*overrides), tmp_path / name, lambda *given: numbers.append(given), **options)
        return numbers

    every = told("always", every=0)
    lines = (tmp_path / "always/digits" / jobs.job(*overrides).identity / "metrics.jsonl").read_text().splitlines()
    assert [(done, total) for done, total, *_ in every] == [(step, 12) for step in range(1, 13)]
    assert [accuracy for *_, accuracy in every[2::3]] == pytest.approx(
        [json.loads(line)["train_accuracy"] for line in lines]
    )
    assert told("seldom", every=1e9) == []
    ready = iter([False, False, True] * 4)
    assert [done for done, *_ in told("ready", every=0, ready=lambda: next(ready))] == [3, 6, 9, 12]


def test_a_job_tells_what_it_saved_and_can_be_asked_to_stop(tmp_path):
    each, stop, folders = jobs.job(*jobs.SHORT, "train.epochs=9"), Stop(), []

    def saved(folder):
        folders.append(folder)
        stop.signal = 15

    assert executed(each, tmp_path, saved=saved, stop=stop) == Ended(each, "stopped")
    assert folders == [tmp_path / "digits" / each.identity] * 2, "after an epoch, and when it stopped"


def test_a_job_with_another_identity_on_this_machine_fails(tmp_path):
    given = jobs.job(*jobs.SHORT)
    each = replace(given, identity="0" * len(given.identity))
    ended = executed(each, tmp_path)
    assert ended.status == "failed"
    assert f"run 0: has the identity {given.identity} on " in ended.message
    assert "all machines must have the same version of ghostnoise" in ended.message


def test_a_defect_is_recorded_and_forgotten_when_the_run_begins_again(tmp_path, monkeypatch):
    each = jobs.job(*jobs.SHORT)

    def broken(*_):
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr(execution, "train", broken)
    assert executed(each, tmp_path) == Ended(each, "failed", "ZeroDivisionError: by 0")
    found = scan.look(tmp_path / "digits" / each.identity, pytest.fail)
    assert found.status == "failed"
    assert found.settings["seed"] == 0
    assert found.failure["message"] == "ZeroDivisionError: by 0"
    assert "in broken" in found.failure["traceback"]
    monkeypatch.undo()
    assert executed(each, tmp_path).status == "finished"
    assert not (found.path / "failure.json").exists()


def test_a_diverged_run_is_over(tmp_path):
    each = jobs.job(*jobs.SHORT, "optim.lr=1e30", "train.epochs=2")
    assert executed(each, tmp_path).status == "diverged"


def test_a_run_that_another_process_owns_is_left_alone(tmp_path):
    each = jobs.job(*jobs.SHORT)
    folder = RunFolder(tmp_path / "digits" / each.identity, pytest.fail)
    folder.own()
    assert executed(each, tmp_path) == Ended(each, "elsewhere")
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock"]


def test_warnings_of_train_are_in_the_message(tmp_path):
    each = jobs.job(*jobs.SHORT)
    folder = tmp_path / "digits" / each.identity
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001-0123456789abcdef.pt").write_bytes(b"no")
    ended = executed(each, tmp_path)
    assert ended.status == "finished"
    assert ended.message.startswith("warning: ")
    assert "is damaged" in ended.message


def test_a_folder_that_cannot_be_written_fails_the_job(tmp_path):
    (tmp_path / "digits").write_text("a file")
    ended = executed(jobs.job(*jobs.SHORT), tmp_path)
    assert ended.status == "failed"
    assert json.dumps(ended.message)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_run_whose_folder_is_deleted_is_trained_again(tmp_path, times):
    """Up to a limit; it is then recorded as failed."""
    each, deleted = jobs.job(*jobs.SHORT, "train.epochs=2"), []

    def saved(folder):
        if len(deleted) < times:
            deleted.append(folder)
            shutil.rmtree(folder)

    ended = executed(each, tmp_path, saved=saved)
    if times < 3:
        assert ended.status == "finished"
        line = "its folder was deleted while it was trained, and it was trained again"
        assert ended.message.splitlines() == [line] * times
        assert jobs.weights(each, tmp_path) == jobs.alone(each, tmp_path / "alone")
        assert scan.look(deleted[0], pytest.fail).status == "finished"
    else:
        assert ended.status == "failed"
        assert "was deleted while its run was trained; repeat the command" in ended.message
    RunFolder(deleted[0], pytest.fail).own()  # it is free


def test_a_folder_that_takes_the_place_of_a_deleted_one_is_left_alone(tmp_path):
    """Such as that of another process, which found no folder and started the run."""
    each = jobs.job(*jobs.SHORT, "train.epochs=2")
    others = []

    def saved(folder):
        if not others:
            shutil.rmtree(folder)
            others.append(RunFolder(folder, pytest.fail))
            others[0].own()

    ended = executed(each, tmp_path, saved=saved)
    assert ended.status == "elsewhere"
    assert sorted(path.name for path in others[0].path.iterdir()) == [".lock"]
    others[0].release()

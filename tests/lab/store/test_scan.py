import json

import pytest

from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.scan import look, scan

SETTINGS = {"recipe": "digits", "identity": "abc", "seed": 0}


def folder(tmp_path, name="abc"):
    return RunFolder(tmp_path / "digits" / name, pytest.fail)


def test_a_run_is_unfinished_failed_and_finished_in_turn(tmp_path):
    run = folder(tmp_path)
    run.own()
    run.begin(SETTINGS, {})
    assert look(run.path, pytest.fail).status == "unfinished"
    run.fail(SETTINGS, "no memory", "trace")
    found = look(run.path, pytest.fail)
    assert (found.status, found.failure["message"]) == ("failed", "no memory")
    assert found.failed_for == "no memory"
    run.begin(SETTINGS, {})
    assert look(run.path, pytest.fail).status == "unfinished"
    run.fail(SETTINGS, "no memory")
    run.finish({"status": "finished"})
    found = look(run.path, pytest.fail)
    assert (found.status, found.failure, found.failed_for) == ("finished", None, "")


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        ({"traceback": "trace", "message": "\n  first\nsecond"}, "first"),
        ({"message": 3, "error": "error"}, "error"),
        ({"code": 1, "traceback": "trace"}, "trace"),
        ({}, "no reason was recorded"),
    ],
)
def test_the_reason_of_a_failure_is_its_first_line(tmp_path, failure, line):
    run = folder(tmp_path)
    run.path.mkdir(parents=True)
    (run.path / "failure.json").write_text(json.dumps(failure))
    assert look(run.path, pytest.fail).failed_for == line


def test_a_failure_before_the_run_began_has_its_settings(tmp_path):
    run = folder(tmp_path)
    run.fail(SETTINGS, "no data")
    found = look(run.path, pytest.fail)
    assert (found.status, found.settings) == ("failed", SETTINGS)


def test_all_folders_are_found_and_damaged_ones_are_reported(tmp_path):
    for name in ("a", "b", "c"):
        folder(tmp_path, name).fail(SETTINGS, name)
    (tmp_path / "digits" / "b" / "settings.json").write_text("[]")
    (tmp_path / "digits" / "c" / "result.json").write_text("{}")
    (tmp_path / "digits" / "stray.txt").write_text("")
    said = []
    found = scan(tmp_path / "digits", said.append)
    assert {name: each.status for name, each in found.items()} == {"a": "failed", "b": "damaged", "c": "damaged"}
    assert said == [found["b"].reason, found["c"].reason]
    assert "settings.json is damaged (not a JSON object)" in said[0]
    assert scan(tmp_path / "nothing", pytest.fail) == {}


def test_metrics_are_read_up_to_a_line_that_is_being_written(tmp_path):
    run = folder(tmp_path)
    run.own()
    run.record({"epoch": 1})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"epo')
    assert look(run.path, pytest.fail).metrics() == [{"epoch": 1}]


def test_owners_are_seen_and_nothing_is_changed(tmp_path):
    run = folder(tmp_path)
    assert not run.owned()
    assert not run.path.exists()
    run.own()
    assert folder(tmp_path).owned()
    run.release()
    assert not folder(tmp_path).owned()


def test_a_run_that_has_ended_meanwhile_is_not_taken(tmp_path):
    from ghostnoise.lab.store.folder import Busy

    run = folder(tmp_path)
    run.path.mkdir(parents=True)
    (run.path / "result.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(Busy, match="has just finished this run"):
        run.own_and_read()
    assert not run.owned()


def test_runs_of_another_numerics_number_are_outdated_if_asked(tmp_path):
    for name, environment in (("a", {}), ("b", {"numerics": 1}), ("c", {"numerics": 2})):
        run = folder(tmp_path, name)
        run.own()
        run.begin(SETTINGS, environment)
        run.finish({"status": "finished", "accuracy": 1.0})
    runs = tmp_path / "digits"
    assert {found.status for found in scan(runs, pytest.fail).values()} == {"finished"}
    assert [found.numerics for found in scan(runs, pytest.fail).values()] == [1, 1, 2]
    first, second = scan(runs, pytest.fail, 1), scan(runs, pytest.fail, 2)
    assert [found.status for found in first.values()] == ["finished", "finished", "outdated"]
    assert [found.status for found in second.values()] == ["outdated", "outdated", "finished"]
    assert (first["c"].result, first["c"].reason) == (None, "made with numerics 2, not 1")

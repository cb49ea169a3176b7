import json
import os
import time

import pytest

from ghostnoise.lab.config import methods
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.folder import outdated
from ghostnoise.lab.store.scan import look, scan
from support.records import finished, on_cpu
from support.run_folders import experiment, points

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
    assert said == [found["b"].damage, found["c"].damage]
    assert said[0] == (
        f"{found['b'].path} is damaged (settings.json: not a JSON object); `ghostnoise runs remove {found['b'].path}` "
        "removes it"
    )
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


def test_runs_of_another_numerics_number_are_outdated_if_asked(tmp_path, monkeypatch):
    for name, environment in (("a", {}), ("b", {"numerics": 1}), ("c", {"numerics": 2})):
        run = folder(tmp_path, name)
        run.own()
        run.begin(SETTINGS, environment)
        run.finish({"status": "finished", "accuracy": 1.0})
    runs = tmp_path / "digits"
    assert {found.status for found in scan(runs, pytest.fail).values()} == {"finished"}
    assert [found.numerics for found in scan(runs, pytest.fail).values()] == [1, 1, 2]
    first = scan(runs, pytest.fail, current=True)
    monkeypatch.setattr(methods, "NUMERICS", 2)
    second = scan(runs, pytest.fail, current=True)
    assert [found.status for found in first.values()] == ["finished", "finished", "outdated"]
    assert [found.status for found in second.values()] == ["outdated", "outdated", "finished"]
    assert (first["c"].result, first["c"].reason) == (None, "made with numerics 2, not 1")


def test_runs_are_outdated_by_the_number_of_their_own_method(tmp_path, raised):
    for method in ("bn", "gbn"):
        run = folder(tmp_path, method)
        run.own()
        run.begin(SETTINGS | {"norm": {"method": method, "ghost_size": 4}}, {"numerics": 1})
        run.finish({"status": "finished", "accuracy": 1.0})
    raised("gbn", 3)
    found = scan(tmp_path / "digits", pytest.fail, current=True)
    assert [(each.status, each.reason) for each in found.values()] == [
        ("finished", ""), ("outdated", "made with numerics 1, not 3")
    ]  # fmt: skip
    assert [outdated(each.path) for each in found.values()] == [None, 1]


NAMES = ("settings.json", "result.json", "environment.json", "metrics.jsonl")
FIELDS = {
    "settings.json": ("seed", "train", "optim"), "result.json": ("accuracy", "status", "seconds", "ended", "more"),
    "environment.json": ("numerics", "threads", "torch", "more"),
    "metrics.jsonl": ("epoch", "loss", "accuracy", "train_loss"),
}  # fmt: skip
WRONG = {
    "many digits": "9" * 400, "more digits": "9" * 5000, "text": '"\\u001b[31m"', "list": "[1]", "object": '{"a": 1}',
    "deep": "[" * 10**5 + "]" * 10**5, "infinite": "1e999", "NaN": "NaN", "null": "null",
}  # fmt: skip
FINE = {  # values that these fields may have
    ("result.json", "more", "null"), ("environment.json", "more", "null"), ("metrics.jsonl", "loss", "null"),
    ("metrics.jsonl", "accuracy", "null"), ("metrics.jsonl", "train_loss", "null"),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run."""
    (point, *_) = points(experiment(tmp_path))
    return finished(tmp_path / "runs", "tiny", on_cpu(point.settings))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in NAMES for field in FIELDS[name]])
def test_every_field_is_checked(run, name, field):
    lines = (run / name).read_text().splitlines() if name.endswith("l") else [(run / name).read_text()]
    for wrong, value in WRONG.items():
        made = json.dumps(json.loads(lines[0]) | {field: "HERE"}).replace('"HERE"', value)
        (run / name).write_text("".join(f"{line}\n" for line in [made, *lines[1:]]))
        found = look(run, lambda line: None)
        fine = (name, field, wrong) in FINE or (field in ("train", "optim") and wrong == "object")
        assert found.status == ("finished" if fine else "damaged"), (wrong, found.reason)
        assert fine or found.reason.startswith(f"{name}: ")
        assert found.reason.isprintable()
        assert len(found.reason) < 300


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "symlink", "loop", "folder", "large", "not UTF-8", "empty object"])
def test_only_regular_files_of_a_moderate_size_are_read(run, name, kind, tmp_path):
    path = run / name
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "symlink":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        case "loop":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
        case "large":
            path.touch()
            os.truncate(path, 2**40)
        case "not UTF-8":
            path.write_bytes(b'{"a": "\xff"}\n')
        case _:
            path.write_text("{}\n")
    said = []
    found = scan(run.parent, said.append)[run.name]
    harmless = kind == "empty object" and name in ("settings.json", "environment.json")
    assert found.status == ("finished" if harmless else "damaged")
    assert said == ([] if harmless else [found.damage])


def test_a_link_to_itself_is_no_run(run):
    (run.parent / "loop").symlink_to("loop")
    assert list(scan(run.parent, pytest.fail)) == [run.name]


@pytest.mark.slow
def test_reading_a_run_takes_less_than_a_millisecond(run):
    look(run, pytest.fail)
    began = time.process_time()
    for _ in range(200):
        look(run, pytest.fail)
    assert time.process_time() - began < 0.2

import json
import os

import pytest

from ghostnoise.lab.config import methods, recipe
from ghostnoise.lab.store.folder import RunFolder, history
from ghostnoise.lab.store.scan import look, scan
from support.records import finished, on_cpu
from support.run_folders import experiment, points

SETTINGS = {"recipe": "digits", "identity": "abc", "seed": 0}


def folder(tmp_path, name="abc"):
    return RunFolder(tmp_path / "digits" / name, pytest.fail)


def test_a_run_is_running_interrupted_and_failed_in_turn(tmp_path):
    run = folder(tmp_path)
    run.own()
    run.begin(SETTINGS, [{}], [])
    assert look(run.path, pytest.fail).status == "running"
    run.release()
    assert look(run.path, pytest.fail).status == "interrupted"
    run.fail(SETTINGS, "no memory", "trace")
    found = look(run.path, pytest.fail)
    assert (found.status, found.failure["message"]) == ("failed", "no memory")
    assert found.failed_for == "no memory"
    run.own()
    run.begin(SETTINGS, [{}, {}], [])
    run.release()
    found = look(run.path, pytest.fail)
    assert (found.status, found.failure, found.failed_for) == ("interrupted", None, "")


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
    assert (found.status, found.tree) == ("failed", {"seed": 0})


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
        f"{found['b'].folder} is damaged (settings.json: not a JSON object); "
        f"`ghostnoise runs remove {found['b'].folder}` removes it"
    )
    assert scan(tmp_path / "nothing", pytest.fail) == {}


def test_metrics_are_read_up_to_a_line_that_is_being_written(tmp_path):
    run = folder(tmp_path)
    run.own()
    run.begin(SETTINGS, [{}], [{"epoch": 1}])
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"epo')
    assert history(look(run.path, pytest.fail)) == [{"epoch": 1}]


def test_runs_that_another_version_would_compute_differently_have_not_ended(tmp_path, monkeypatch, raised):
    """By the number of this version, or by that of their own method."""
    made = points(experiment(tmp_path))
    runs = [on_cpu(run.settings) for run in (made[0], made[1], made[3])]
    for settings, numerics in zip(runs, (1, 2, 1), strict=True):
        finished(tmp_path / "runs", "tiny", settings, environment={"numerics": numerics})

    def ended():
        found = scan(tmp_path / "runs" / "tiny", pytest.fail)
        assert {run.status for run in found.values()} == {"finished"}
        return [found[recipe.identity(settings)].ended for settings in runs]

    assert ended() == [True, False, True]
    raised("gni", 3)
    assert ended() == [True, False, False]
    monkeypatch.setattr(methods, "NUMERICS", 2)
    assert ended() == [False, True, False]


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
    """The folder of a finished run of version 0.1, which has a file for each part."""
    (point, *_) = points(experiment(tmp_path))
    return finished(tmp_path / "runs", "tiny", on_cpu(point.settings), old=True)


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


RECORD = [
    "identity", "settings.seed", "settings.norm.method", "environments.0.numerics", "environments.0.more",
    "curve.loss.0", "curve.evaluated", "result.accuracy", "result.more",
]  # fmt: skip


@pytest.mark.parametrize("path", RECORD)
def test_every_part_of_a_record_is_checked(tmp_path, path):
    run = finished(tmp_path / "runs", "tiny", on_cpu(points(experiment(tmp_path))[0].settings))
    *above, last = path.split(".")
    whole = (run / "run.json").read_text()
    for wrong, value in WRONG.items():
        place = tree = json.loads(whole)
        for name in above:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = "HERE"
        (run / "run.json").write_text(json.dumps(tree).replace('"HERE"', value))
        found = look(run, lambda line: None)
        fine = wrong == "null" and path in ("environments.0.more", "result.more", "curve.loss.0")
        assert found.status == ("finished" if fine else "damaged"), (wrong, found.reason)
        assert fine or found.reason.startswith("run.json: ")
        assert found.reason.isprintable()
        assert len(found.reason) < 300

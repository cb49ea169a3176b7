"""Files of records: exports merge, give identical bytes, and never lose a record; bad files are refused as a whole."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import records
from ghostnoise.lab.store.records import FORMAT, MAX_LINE
from support.records import change, experiment_with_runs, finished, on_cpu
from support.run_folders import experiment, points


@pytest.fixture
def there(tmp_path):
    """All nine runs of an experiment, and the file of their records."""
    experiment_with_runs(tmp_path)
    records.export(tmp_path / "runs" / "tiny", tmp_path / "records.jsonl", pytest.fail)
    return tmp_path


def bad(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        records.load(path)
    assert path.read_bytes() == content
    return str(caught.value)


def test_the_same_runs_give_the_same_bytes(there):
    path = there / "records.jsonl"
    content = path.read_bytes()
    assert records.export(there / "runs" / "tiny", path, pytest.fail) == records.Exported(path, 9, 0)
    assert path.read_bytes() == content
    records.export(there / "runs" / "tiny", there / "again.jsonl", pytest.fail)
    assert (there / "again.jsonl").read_bytes() == content
    assert not [each for each in there.iterdir() if each.name.endswith(".part")]
    header, *lines = content.splitlines()
    assert json.loads(header) == {"format": FORMAT, "version": 2, "recipe": "tiny"}
    assert len(lines) == 9


def test_an_export_keeps_records_whose_runs_are_gone(there):
    path = there / "records.jsonl"
    content = path.read_bytes()
    folders = sorted((there / "runs" / "tiny").iterdir())
    for folder in folders[:5]:
        shutil.rmtree(folder)
    assert records.export(there / "runs" / "tiny", path, pytest.fail).added == 0
    assert path.read_bytes() == content
    # The parts of an experiment that two machines ran give the same file as one machine.
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + [line for line in lines[1:] if json.loads(line)["identity"] in
                                           [folder.name for folder in folders[:5]]]))  # fmt: skip
    assert records.export(there / "runs" / "tiny", path, pytest.fail).added == 4
    assert path.read_bytes() == content


def test_damaged_and_unfinished_runs_are_skipped_with_a_line(tmp_path):
    """Here those of version 0.1, which have more files."""
    there = tmp_path
    experiment_with_runs(there, old=True)
    folders = sorted((there / "runs" / "tiny").iterdir())
    (folders[0] / "result.json").write_text("{")
    (folders[1] / "result.json").unlink()  # unfinished: no line
    before = json.loads((folders[2] / "settings.json").read_text())
    (folders[2] / "settings.json").write_text(json.dumps(before | {"seed": 5}))
    lines = (folders[3] / "metrics.jsonl").read_text()
    (folders[3] / "metrics.jsonl").write_text(lines[:-10])
    result = json.loads((folders[4] / "result.json").read_text())
    (folders[4] / "result.json").write_text(json.dumps(result | {"accuracy": 10**400}))
    (folders[5] / "metrics.jsonl").write_text("[1]\n" + lines)
    (folders[6] / "environment.json").write_text('{"numerics": "one"}')
    warned = []
    made = records.export(there / "runs" / "tiny", there / "new.jsonl", warned.append)
    assert made.total == 2
    assert len(warned) == 6
    for folder, reason in (
        (folders[0], "is damaged"), (folders[2], "its settings have the identity"),
        (folders[3], "a curve of 2 epochs: train.epochs is 3"), (folders[4], "result.json: accuracy: must be"),
        (folders[5], "is damaged (metrics.jsonl: metrics.1: "), (folders[6], "environment.json: numerics: must be"),
    ):  # fmt: skip
        (line,) = [line for line in warned if str(folder) in line]
        assert reason in line


def test_a_damaged_record_is_skipped_with_a_line(there):
    folders = sorted((there / "runs" / "tiny").iterdir())
    (folders[0] / "run.json").write_text("{")
    (folders[1] / "run.json").write_bytes((folders[2] / "run.json").read_bytes())
    (folders[3] / "run.json").unlink()
    warned = []
    assert records.export(there / "runs" / "tiny", there / "new.jsonl", warned.append).total == 6
    assert [line.partition(" ")[0] for line in warned] == [str(folders[0]), str(folders[1])]
    assert f"it is the record of run {folders[2].name}" in warned[1]


def test_an_export_of_nothing_is_an_error_and_writes_nothing(there):
    for folder in (there / "runs" / "tiny").iterdir():
        (folder / "run.json").write_text("{")
    with pytest.raises(UserError, match="9 runs cannot be exported, so nothing was written to"):
        records.export(there / "runs" / "tiny", there / "new.jsonl", lambda line: None)
    assert not (there / "new.jsonl").exists()


def test_no_file_is_written_that_could_not_be_read(there, monkeypatch):
    monkeypatch.setattr(records, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match="a file of records has at most 1,000; export to several files"):
        records.export(there / "runs" / "tiny", there / "new.jsonl", pytest.fail)
    assert not (there / "new.jsonl").exists()


def test_a_run_that_was_evaluated_less_often_keeps_its_record(there):
    """`train.evaluate_every` is no part of the identity."""
    path = there / "records.jsonl"
    content = path.read_bytes()
    for run in experiment(there).runs(on_cpu):
        accuracy = records.load(path).runs[run.identity].accuracy
        finished(there / "rarely", "tiny", run.settings, accuracy, every=3)
    assert records.export(there / "rarely" / "tiny", path, pytest.fail).added == 0
    assert path.read_bytes() == content


def test_another_result_of_the_same_run_is_a_conflict(there):
    path, folder = there / "records.jsonl", next((there / "runs" / "tiny").iterdir())
    change(folder, weights_sha256="0" * 64)
    content = path.read_bytes()
    with pytest.raises(UserError, match=f"has another record of run {folder.name}"):
        records.export(there / "runs" / "tiny", path, pytest.fail)
    assert path.read_bytes() == content


def test_a_run_that_was_repeated_keeps_its_record(there):
    path, folder = there / "records.jsonl", next((there / "runs" / "tiny").iterdir())
    change(folder, seconds=99.0, ended="2026-02-01T00:00:00+00:00")
    content = path.read_bytes()
    assert records.export(there / "runs" / "tiny", path, pytest.fail).added == 0
    assert path.read_bytes() == content
    assert records.import_records([(path, records.load(path))], there / "runs") == (0, 9)
    assert json.loads((folder / "run.json").read_text())["result"]["seconds"] == 99.0


def test_newer_numerics_replace_older_ones_and_never_the_reverse(tmp_path):
    made = on_cpu(points(experiment(tmp_path))[0].settings)
    finished(tmp_path / "old", "tiny", made, 90.0, environment={"numerics": 1})
    finished(tmp_path / "new", "tiny", made, 91.0, environment={"numerics": 2})
    path, warned = tmp_path / "records.jsonl", []
    for runs, numerics in (("old", 1), ("new", 2), ("old", 2)):
        assert records.export(tmp_path / runs / "tiny", path, warned.append).total == 1
        (each,) = records.load(path).runs.values()
        assert each.numerics.number == numerics
    assert len(warned) == 1
    assert "its record with numerics 1 is replaced by one with numerics 2" in warned[0]


def test_an_export_does_not_touch_a_file_that_it_cannot_read(there):
    path = there / "records.jsonl"
    for content in (b"", b"notes\n", path.read_bytes()[:-30], path.read_bytes().replace(b"tiny", b"other", 1)):
        path.write_bytes(content)
        with pytest.raises(UserError):
            records.export(there / "runs" / "tiny", path, pytest.fail)
        assert path.read_bytes() == content


def test_every_bad_line_is_named(there):
    path = there / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"a": NaN}\n'
    lines[4] = lines[4].replace(b'"accuracy":', b'"acuracy":')
    lines.append(lines[1])
    lines.append(lines[3][:-40])
    text = bad(path, b"".join(lines))
    reported = text.splitlines()
    assert [line.split(":")[0] for line in reported[:-1]] == [f"{path}, line {n}" for n in (3, 5, 11, 12)]
    assert "NaN is not a number" in reported[0]
    assert "curve.accuracy: missing" in reported[1]
    assert "has a record already" in reported[2]
    assert "not complete JSON" in reported[3]
    assert reported[-1] == "nothing was changed; correct or remove these lines"
    many = bad(path, lines[0] + b"{}\n" * 50)
    assert "and 30 more bad lines" in many
    assert len(many.splitlines()) == 22


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "not the header"),
        (b"\x89PNG\r\n\x1a\n", "not the header"),
        (b'{"format":"other"}\n', "not the header"),
        (b'{"format":"ghostnoise records","version":3,"recipe":"tiny"}\n', "reads versions 1 and 2"),
        (b'{"format":"ghostnoise records","version":true,"recipe":"tiny"}\n', "reads versions 1 and 2"),
        (b'{"format":"ghostnoise records","version":"1","recipe":"tiny"}\n', "reads versions 1 and 2"),
        (b'{"format":"ghostnoise records","recipe":"tiny"}\n', "version None"),
        (b'{"format":"ghostnoise records","version":1}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":""}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":".."}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":"../x"}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":"a\\u0000b"}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":["a"]}\n', "must be the name of a recipe"),
        (b'{"format":"ghostnoise records","version":1,"recipe":"a","more":1}\n', "'more': unknown"),
    ],
)
def test_a_bad_header_is_refused(tmp_path, header, reason):
    text = bad(tmp_path / "records.jsonl", header)
    assert reason in text
    assert text.count("\n") == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupted_file_is_read_or_refused_as_a_whole(there, data):
    """Bytes that change, vanish or appear make no other exception, and nothing is imported from a refused file."""
    content = bytearray((there / "records.jsonl").read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=20))
    path = there / "corrupted.jsonl"
    path.write_bytes(content)
    try:
        read = records.load(path)
    except UserError as error:
        refusal = str(error).splitlines()
    else:
        refusal = []
        assert len(read.runs) <= 9
        assert read.recipe
    assert all(line.startswith(str(path)) for line in refusal[:-1])


def test_a_huge_line_is_not_read(there):
    path = there / "records.jsonl"
    content = path.read_bytes().splitlines(keepends=True)[0] + b'{"a":"' + b"x" * MAX_LINE + b'"}\n'
    assert "line 2: more than" in bad(path, content)


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_what_is_not_a_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop", ".", "none"):
        with pytest.raises(UserError, match="give a file that `ghostnoise runs export` wrote"):
            records.load(tmp_path / name)

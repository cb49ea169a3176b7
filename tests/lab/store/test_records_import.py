"""Records become run folders, completely or not at all, and never replace a run."""

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import records, scan
from ghostnoise.lab.store.folder import RunFolder, history, read
from support.records import change, experiment_with_runs


@pytest.fixture
def there(tmp_path):
    experiment_with_runs(tmp_path)
    records.export(tmp_path / "runs" / "tiny", tmp_path / "records.jsonl", pytest.fail)
    return tmp_path


def imported(there, runs="imported", files=("records.jsonl",)):
    return records.import_records([(there / name, records.load(there / name)) for name in files], there / runs)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_imported_runs_are_those_that_were_exported(there):
    assert imported(there) == (9, 0)
    ours, theirs = (scan.scan(there / runs / "tiny", pytest.fail) for runs in ("imported", "runs"))
    assert ours.keys() == theirs.keys()
    for identity, found in ours.items():
        assert found.status == theirs[identity].status == "finished"
        assert found.tree == theirs[identity].tree
        assert found.result == theirs[identity].result
        assert found.environments == theirs[identity].environments
        assert found.imported
        assert not theirs[identity].imported
        assert RunFolder(found.folder, pytest.fail).ended().result == found.result
    records.export(there / "imported" / "tiny", there / "again.jsonl", pytest.fail)
    assert (there / "again.jsonl").read_bytes() == (there / "records.jsonl").read_bytes()
    assert not [path for path in (there / "imported" / "tiny").iterdir() if path.name.startswith(records.TEMPORARY)]


def test_a_second_import_changes_nothing(there):
    imported(there)
    before = contents(there / "imported")
    assert imported(there, files=("records.jsonl", "records.jsonl")) == (0, 18)
    assert contents(there / "imported") == before
    assert imported(there, "runs") == (0, 9)  # also where the runs were trained


@pytest.mark.parametrize("kind", ["result", "interrupted", "damaged", "file"])
def test_a_run_that_exists_is_never_overwritten(there, kind):
    imported(there)
    folder, other = sorted(path for path in (there / "imported" / "tiny").iterdir() if path.is_dir())[:2]
    if kind == "result":
        change(folder, weights_sha256="0" * 64)
    elif kind == "interrupted":
        (folder / "run.json").unlink()
    elif kind == "damaged":
        (folder / "run.json").write_text("{")
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("mine")
    for path in other.iterdir():  # would be imported again if there were no conflict
        path.unlink()
    other.rmdir()
    before = contents(there / "imported")
    with pytest.raises(UserError) as caught:
        imported(there)
    line, last = str(caught.value).splitlines()
    assert f"{folder} exists and" in line
    assert "ghostnoise runs remove" in line
    assert last == "nothing was imported because of 1 conflict"
    assert contents(there / "imported") == before


def test_two_files_that_differ_are_a_conflict(there):
    lines = (
        (there / "records.jsonl")
        .read_text()
        .replace('"weights_sha256":"', '"weights_sha256":"0')
        .replace('abcd"', 'abc"')
    )
    (there / "other.jsonl").write_text(lines)
    with pytest.raises(UserError, match="differs from that in"):
        imported(there, files=("records.jsonl", "other.jsonl"))
    assert not (there / "imported").exists()


def test_an_interrupted_import_is_completed_by_the_next(there, monkeypatch):
    made = []

    def fail(path, run, source, make=records._make_folder):
        if len(made) == 4:
            records.atomic.make_folder(path.with_name(f"{records.TEMPORARY}{path.name}"))
            raise KeyboardInterrupt
        made.append(path)
        make(path, run, source)

    with monkeypatch.context() as patch:
        patch.setattr(records, "_make_folder", fail)
        with pytest.raises(KeyboardInterrupt):
            imported(there)
    assert len(scan.scan(there / "imported" / "tiny", pytest.fail)) == 4
    assert imported(there) == (5, 4)
    assert not list((there / "imported" / "tiny").glob(f"{records.TEMPORARY}*"))


def test_records_are_read_as_imported_folders_are(there):
    imported(there)
    folder = there / "imported" / "tiny"
    loaded = records.load(there / "records.jsonl").runs
    assert loaded.keys() == scan.scan(folder, pytest.fail).keys()
    for identity, run in loaded.items():
        stored = read(folder / identity)
        for name in ("status", "tree", "result", "environments", "curve", "failed_for", "numerics"):
            assert getattr(run, name) == getattr(stored, name)
        assert history(run) == history(stored) == history(scan.look(folder / identity, pytest.fail))

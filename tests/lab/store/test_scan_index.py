"""The index of run folders saves reading, and never changes what a scan finds."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from ghostnoise.lab.config import methods
from ghostnoise.lab.store import scan
from ghostnoise.lab.store.folder import RunFolder
from support.many_runs import indexed, write_experiment, write_runs
from support.records import experiment_with_runs


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of indexes; folders with few runs have one too, and may have changed just now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(scan, "INDEXED", 1)
    monkeypatch.setattr(scan, "RACY", 0.0)
    return tmp_path / "cache" / "ghostnoise" / "index"


@pytest.fixture
def runs(tmp_path, cache):
    experiment_with_runs(tmp_path)
    time.sleep(0.02)  # the clock of a file system is coarse
    return tmp_path / "runs" / "tiny"


@pytest.fixture
def looks(monkeypatch):
    """The names of the folders that are read."""
    names, real = [], scan.read

    def read(path):
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(scan, "read", read)
    return names


def scanned(runs):
    return fields(scan.scan(runs, lambda line: None))


def fields(found):
    """What was found, for comparisons."""
    return {name: {each: getattr(run, each) for each in COMPARED} for name, run in found.items()}


def fresh(runs, monkeypatch):
    """Scan without an index."""
    with monkeypatch.context() as patch:
        patch.setattr(scan, "INDEXED", 10**9)
        return scanned(runs)


def test_unchanged_folders_are_read_once(runs, cache, looks):
    first = scanned(runs)
    assert len(looks) == len(first) == 9
    looks.clear()
    assert scanned(runs) == first
    assert looks == []
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o077 == 0 or cache.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in runs.parent.iterdir()) == ["tiny"]
    assert not [path for path in runs.iterdir() if not path.is_dir()], "nothing is written among the runs"


def rewrite(path):
    """Change one digit in place, and restore the time of the change."""
    before, content = path.stat(), path.read_bytes()
    time.sleep(0.02)
    with open(path, "r+b") as file:
        file.write(content.replace(b"90.0", b"91.0").replace(b'"seed": 0', b'"seed": 5'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


COMPARED = ("recipe", "identity", "folder", "tree", "status", "environments", "result", "failure", "reason")
CHANGES = {
    "in place, with the old time": lambda run: rewrite(run / "run.json"),
    "damaged": lambda run: (run / "run.json").write_text("{}\n"),
    "result removed": lambda run: (run / "run.json").unlink(),
    "failure added": lambda run: (
        (run / "run.json").unlink(),
        (run / "failure.json").write_text('{"message": "a"}'),
    ),
    "replaced by a link": lambda run: (
        (run / "run.json").unlink(),
        (run / "run.json").symlink_to("/dev/null"),
    ),
    "folder removed": shutil.rmtree,
    "copied": lambda run: (shutil.copytree(run, run.with_name("copy")), shutil.rmtree(run)),
    "folders exchanged": lambda run: exchange(run, next(each for each in run.parent.iterdir() if each != run)),
}


def exchange(one, other):
    one.rename(one.with_name("between"))
    other.rename(one)
    one.with_name("between").rename(other)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(runs, cache, looks, change, monkeypatch):
    scanned(runs)
    looks.clear()
    CHANGES[change](min(path for path in runs.iterdir()))
    found = scanned(runs)
    assert len(looks) <= 2
    assert found == fresh(runs, monkeypatch)


def test_a_file_that_changed_just_now_is_not_trusted(runs, cache, looks, monkeypatch):
    """It may change again without a change of its time."""
    monkeypatch.setattr(scan, "RACY", 3600.0)
    scanned(runs)
    looks.clear()
    scanned(runs)
    assert len(looks) == 9


def header(file):
    """Return the header of an index and its body."""
    return file.read_bytes().partition(b"\n")


SPOILS = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "a flipped bit": lambda file: file.write_bytes(file.read_bytes().replace(b"finished", b"Finished", 1)),
    "not JSON": lambda file: file.write_bytes(b"\xff\n\xff"),
    "deep": lambda file: file.write_bytes(b"[" * 10**5 + b"\n"),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another format": lambda file: file.write_bytes(
        json.dumps(json.loads(header(file)[0]) | {"format": 0}).encode() + b"\n" + header(file)[2]
    ),
    "other code": lambda file: file.write_bytes(
        json.dumps(json.loads(header(file)[0]) | {"code": "0" * 32}).encode() + b"\n" + header(file)[2]
    ),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoiled_index_is_rebuilt_in_silence(runs, cache, looks, spoil, capfd):
    first = scanned(runs)
    (file,) = cache.iterdir()
    SPOILS[spoil](file)
    looks.clear()
    assert scanned(runs) == first
    assert len(looks) == 9
    if spoil != "a folder":  # which is not removed
        looks.clear()
        assert scanned(runs) == first
        assert looks == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("mode", [0o500, 0o777])
def test_a_cache_that_cannot_be_written_or_that_others_can_is_not_used(runs, cache, looks, mode):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    first = scanned(runs)
    if mode == 0o777 or os.getuid():  # root can write anywhere
        assert list(cache.iterdir()) == []
    assert scanned(runs) == first
    cache.chmod(0o700)


def test_without_a_home_folder_there_is_no_index(runs, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert len(scanned(runs)) == 9


def test_warnings_and_outdated_runs_are_those_of_a_scan_without_an_index(runs, cache, monkeypatch):
    (run, *_) = sorted(runs.iterdir())
    (run / "run.json").write_text("[]")
    scanned(runs)
    said, again = [], []
    monkeypatch.setattr(methods, "NUMERICS", 2)
    found = scan.scan(runs, said.append)
    assert fields(scan.scan(runs, again.append)) == fields(found)
    assert said == again == [found[run.name].damage]
    assert sorted({each.status for each in found.values()}) == ["damaged", "finished"]
    assert not any(each.ended for each in found.values())


def test_a_run_that_is_trained_is_running_also_in_an_index(runs, cache):
    (run, *_) = sorted(runs.iterdir())
    (run / "run.json").unlink()
    (run / "settings.json").write_text("{}")
    time.sleep(0.02)
    owner = RunFolder(run, pytest.fail)
    assert scanned(runs)[run.name]["status"] == "interrupted"
    owner.own()
    assert scanned(runs)[run.name]["status"] == "running"
    owner.release()
    assert scanned(runs)[run.name]["status"] == "interrupted"


def test_few_new_runs_do_not_rewrite_the_index(runs, cache, looks):
    for at in range(60):
        shutil.copytree(next(runs.iterdir()), runs / f"copy-{at}")
    time.sleep(0.02)
    scanned(runs)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    shutil.copytree(runs / "copy-0", runs / "one-more")
    scanned(runs)
    assert file.stat().st_mtime_ns == before


def test_old_indexes_are_removed(runs, cache, monkeypatch):
    monkeypatch.setattr(scan, "MAX_INDEXES", 3)
    cache.mkdir(parents=True, mode=0o700)
    for at in range(5):
        (cache / f"{at}.json").touch()
        os.utime(cache / f"{at}.json", (at, at))
    (cache / f".left.{2**22 + 1}.part").touch()  # more than any process has
    scanned(runs)
    assert sorted(path.name for path in cache.iterdir() if len(path.name) < 20) == ["3.json", "4.json"]


@pytest.mark.slow
def test_scans_of_several_processes_at_the_same_time(runs, cache):
    import multiprocessing

    expected = scanned(runs)
    for path in cache.iterdir():
        path.unlink()
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert all(fields(found) == expected for found in pool.map(indexed, [runs] * 30, chunksize=1))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
def test_five_thousand_runs(tmp_path, monkeypatch):
    """Of unchanged runs no file is opened, PyTorch is not loaded to list them, and a page has at most 5 MB."""
    import subprocess
    import sys

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_experiment(tmp_path)
    assert write_runs(path, tmp_path / "runs") == 5000
    monkeypatch.setattr(scan, "RACY", 0.0)
    time.sleep(0.02)
    expected = scanned(tmp_path / "runs" / "many")
    assert len(expected) == 5000
    code = """
import builtins, io, os, sys
from ghostnoise import cli
opened = []
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "/runs/" in arguments[0]:
        opened.append(arguments[0])
sys.addaudithook(audit)
assert cli.main(sys.argv[1:]) == 0
print(len(opened), "torch" in sys.modules, file=sys.stderr)
"""
    command = [sys.executable, "-c", code, "runs", "many", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "0 False\n"
    assert len(done.stdout.splitlines()) == 5000 + 5
    assert done.stdout.endswith("5,000 runs\n")
    from ghostnoise import cli

    assert cli.main(["report", str(path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").stat().st_size <= 5_000_000
    assert len((tmp_path / "out" / "table.csv").read_text().splitlines()) == 500 + 1

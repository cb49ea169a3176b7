import errno
import os
import resource
import subprocess
import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic


def test_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    atomic.write(path, b"a long first version")
    atomic.write(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a.json"]


def test_append_adds(tmp_path):
    path = tmp_path / "lines"
    atomic.append(path, b"1\n")
    atomic.append(path, b"2\n")
    assert path.read_bytes() == b"1\n2\n"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "--runs"),
    ],
)
def test_a_failed_write_keeps_the_old_content_and_names_a_remedy(tmp_path, monkeypatch, number, remedy):
    path = tmp_path / "a"
    atomic.write(path, b"first")

    def refuse(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=remedy) as caught:
        atomic.write(path, b"second")
    assert str(path) in str(caught.value)
    with pytest.raises(UserError, match=remedy):
        atomic.append(path, b"more")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_does_not_fit_keeps_the_old_content(tmp_path):
    """A limit of the operating system on file sizes simulates a full disk."""
    code = """
import resource, signal, sys
from pathlib import Path
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic
path = Path(sys.argv[1])
atomic.write(path, b"x" * 1000)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for attempt in (lambda: atomic.write(path, b"y" * 10_000), lambda: atomic.append(path, b"y" * 10_000)):
    try:
        attempt()
    except UserError as error:
        assert "exceeds the file size limit" in str(error), error
    else:
        raise SystemExit("not refused")
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True)
    assert (tmp_path / "a").read_bytes() == b"x" * 1000
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_in_the_way_of_a_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="a part of that path is a file"):
        atomic.make_folder(tmp_path / "runs" / "digits")


def test_the_remedy_names_the_option_that_sets_the_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="that path is a file; choose another folder with --out"):
        atomic.make_folder(tmp_path / "out", "--out")
    with pytest.raises(UserError, match="a part of that path is a file; choose another folder with --out"):
        atomic.write(tmp_path / "out" / "table.csv", b"", "--out")


def test_parts_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".a.json.x1.part").write_bytes(b"half")
    (tmp_path / "a.json").write_bytes(b"whole")
    atomic.remove_parts(tmp_path)
    assert os.listdir(tmp_path) == ["a.json"]


def test_only_what_processes_that_have_ended_left_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [
        f".file.{ended.pid}.part",
        f".file.{os.getpid()}.part",
        ".file.1.part",
        ".file.part",
        ".file.x.part",
        "file",
    ]
    for name in names:
        (tmp_path / name).touch()
    atomic.remove_abandoned_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])

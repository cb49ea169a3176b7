"""requirements.lock: the pins of constraints.txt with hashes, complete for what is installed here."""

import hashlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from support.scripts import load

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^(\S+)==(\S+)((?: ; [^\\\n]+)?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)


@pytest.fixture(scope="module")
def lock():
    return load("lock")


@pytest.fixture(scope="module")
def entries():
    """The entries of the file, which has nothing else, as (name, version, marker) with hashes."""
    text = (ROOT / "requirements.lock").read_text().partition("\n")[2]
    found = list(ENTRY.finditer(text))
    assert "".join(each[0] for each in found) == text
    return {(each[1], each[2], each[3].removeprefix(" ; ")): re.findall("sha256:(.{64})", each[4]) for each in found}


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parts = [line.partition(" ; ") for line in lines]
    return [(*pinned.split("=="), marker) for pinned, _, marker in parts]


def plain(name):
    return re.sub("[-_.]+", "-", name).lower()


def test_everything_but_torch_is_locked_as_it_is_pinned(entries):
    assert list(entries) == [each for each in constraints() if each[0] != "torch"]
    hashes = [each for found in entries.values() for each in found]
    assert len(set(hashes)) == len(hashes)


def test_everything_that_make_installs_is_pinned():
    """Otherwise pip would install it without a hash."""
    pinned = {plain(name): version for name, version, _ in constraints()}
    licenses = load("licenses")
    needed = set().union(*map(licenses.closure, ("", "lab", "dev", "imagenet", "tensorboard", "ray")))
    needed = {name for name in needed if not name.startswith("nvidia-")}  # of some builds of torch
    assert len(needed) > 80
    installed = {name: metadata.version(name).partition("+")[0] for name in needed}
    assert installed == {name: pinned.get(name) for name in needed}


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-py2.py3-none-any.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("a-1.0-cp314-cp314-macosx_11_0_arm64.whl", True),
        ("a-1.0-cp38-abi3-win_amd64.whl", True),
        ("a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp311-cp311-win32.whl", False),
        ("a-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
        ("a-1.1-py3-none-any.whl", False),
    ],
)
def test_only_files_that_can_be_installed_are_locked(lock, name, fits):
    assert lock.chosen({name: "hash"}, "1.0") == (["hash"] if fits else [])


def test_a_source_archive_is_locked_only_without_wheels(lock):
    archive, wheel = {"a-1.0.tar.gz": "archive"}, {"a-1.0-py3-none-any.whl": "wheel"}
    assert lock.chosen(archive, "1.0") == ["archive"]
    assert lock.chosen(archive | wheel, "1.0") == ["wheel"]


@pytest.mark.parametrize("form", ["html", "json"])
def test_hashes_are_read_from_the_index(lock, form, tmp_path, monkeypatch):
    from support.file_server import serving

    monkeypatch.setenv("no_proxy", "*")
    name, digest = "a_b-1.0-py3-none-any.whl", hashlib.sha256(b"a").hexdigest()
    page = f'<a href="../../files/{name}#sha256={digest}">{name}</a>'
    tree = f'{{"files": [{{"filename": "{name}", "hashes": {{"sha256": "{digest}"}}}}]}}'
    with serving({"a-b/": (page if form == "html" else tree).encode()}) as index:
        index.kind = "text/html" if form == "html" else "application/vnd.pypi.simple.v1+json"
        assert lock.locked(index.address, "a.B==1.0 ; os_name == 'posix'") == (
            f"a.B==1.0 ; os_name == 'posix' \\\n    --hash=sha256:{digest}"
        )
        with pytest.raises(SystemExit, match=r"a\.B==2\.0: .* has no file of this version; correct constraints\.txt"):
            lock.locked(index.address, "a.B==2.0")


@pytest.mark.slow
def test_pip_accepts_the_hashes_and_refuses_others(entries, tmp_path):
    """Downloads a small package from the configured index; without one, there is nothing to compare with."""
    (name, version, _), hashes = next(each for each in entries.items() if each[0][0] == "iniconfig")
    for wanted, works in ((hashes, True), (["0" * 64], False)):
        given = tmp_path / "requirements.txt"
        given.write_text(f"{name}=={version} " + " ".join(f"--hash=sha256:{each}" for each in wanted) + "\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-d", str(tmp_path)]
        done = subprocess.run([*command, "-r", str(given)], capture_output=True, text=True)
        if works and "No matching distribution" in done.stderr and "connection" in done.stderr.lower():
            pytest.skip("no package index")
        assert (done.returncode == 0) == works, done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr

import errno
import io
import os
import re
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from filelock import FileLock
from rich.console import Console

from ghostnoise.lab.data import download, files
from ghostnoise.lab.errors import UserError
from support.datasets import described, small, write


def quiet():
    return Console(file=io.StringIO())


def packed(layout, arrays, folder, extra=None):
    """Return the archive of a layout as bytes."""
    write(layout, arrays, folder / layout.folders[0])
    (folder / layout.folders[0] / "readme.html").write_text("about")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(folder / layout.folders[0], layout.folders[0])
        if extra:
            tar.addfile(extra)
    return stream.getvalue()


@pytest.fixture
def cifar(tmp_path_factory, server):
    """A small CIFAR-10 whose archives are on the server."""
    entry, arrays = small("cifar10")
    data = packed(entry.layout, arrays, tmp_path_factory.mktemp("packed"))
    file = described(entry.layout.archive.name, data)
    server.contents[file.name] = data
    return replace(entry, layout=replace(entry.layout, downloads=(file,), addresses=(server.address,))), arrays


def test_an_archive_is_unpacked_and_removed(cifar, tmp_path):
    entry, arrays = cifar
    folder = tmp_path / "new" / "data"
    download.download(entry, folder, quiet())
    assert np.array_equal(files.load(entry, folder, "train").pixels, arrays["train"].pixels)
    assert np.array_equal(files.load(entry, folder, "test").labels, arrays["test"].labels)
    assert sorted(os.listdir(folder / "cifar-10-batches-py"))[-2:] == ["readme.html", "test_batch"]
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "batches-py" not in str(path))
    assert left == []


def test_damaged_files_are_replaced_and_others_kept(cifar, tmp_path):
    entry, arrays = cifar
    place = tmp_path / "cifar-10-batches-py"
    write(entry.layout, arrays, place)
    (place / "data_batch_2").write_bytes(b"damaged")
    (place / "mine.txt").write_text("mine")
    download.download(entry, tmp_path, quiet())
    assert files.find_intact(entry, tmp_path).folder == place
    assert (place / "mine.txt").read_text() == "mine"


def test_an_archive_in_the_data_folder_is_used(cifar, tmp_path, server):
    entry, _ = cifar
    archive = tmp_path / entry.layout.archive.name
    archive.write_bytes(server.contents[archive.name])
    download.download(entry, tmp_path, quiet())
    assert server.requests == []
    assert files.find_intact(entry, tmp_path).folder == tmp_path / "cifar-10-batches-py"
    assert archive.exists()


def test_a_wrong_archive_in_the_data_folder_is_ignored(cifar, tmp_path, server):
    entry, _ = cifar
    (tmp_path / entry.layout.archive.name).write_bytes(b"wrong")
    download.download(entry, tmp_path, quiet())
    assert len(server.requests) == 1
    assert files.find_intact(entry, tmp_path)


def test_an_interrupted_data_set_is_resumed(cifar, tmp_path, server):
    entry, _ = cifar
    server.cut_after = 60_000
    with pytest.raises(UserError, match=r"60000 of \d+ bytes are kept"):
        download.download(entry, tmp_path, quiet())
    assert not (tmp_path / "cifar-10-batches-py").exists()
    server.cut_after = None
    download.download(entry, tmp_path, quiet())
    assert server.requests[-1][1] == "bytes=60000-"
    assert files.find_intact(entry, tmp_path)


def test_separate_files_are_downloaded_once(tmp_path, tmp_path_factory, server):
    """If the third file fails, running the command again does not request the first two."""
    entry, arrays = small("mnist")
    source = tmp_path_factory.mktemp("zipped") / "mnist"
    write(entry.layout, arrays, source, zipped=True)
    downloads = tuple(described(file.name, (source / file.name).read_bytes()) for file in entry.layout.downloads)
    server.contents |= {
        file.name: (source / file.name).read_bytes() for file in downloads if "t10k-images" not in file.name
    }
    entry = replace(entry, layout=replace(entry.layout, downloads=downloads, addresses=(server.address,)))
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz: responded 404"):
        download.download(entry, tmp_path, quiet())
    assert not (tmp_path / "mnist").exists()
    server.contents[downloads[2].name] = (source / downloads[2].name).read_bytes()
    server.requests.clear()
    download.download(entry, tmp_path, quiet())
    assert [name for name, _ in server.requests] == [file.name for file in downloads[2:]]
    assert np.array_equal(files.load(entry, tmp_path, "test").pixels, arrays["test"].pixels)
    path = tmp_path / "mnist" / downloads[1].name
    path.write_bytes(b"damaged")
    server.requests.clear()
    download.download(entry, tmp_path, quiet())
    assert [name for name, _ in server.requests] == [path.name]
    assert files.find_intact(entry, tmp_path)


def test_a_failed_download_leaves_no_empty_folders(cifar, tmp_path, server):
    """Partial downloads of this data set or of another are kept."""
    entry, _ = cifar
    server.contents.clear()
    for others in ([], ["mnist"], ["mnist", "cifar10"]):
        kept = [tmp_path / ".downloads" / name / "file.part" for name in others]
        for path in kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        with pytest.raises(UserError, match="responded 404 Not Found; nothing was downloaded"):
            download.download(entry, tmp_path, quiet())
        assert sorted(path for path in tmp_path.rglob("*") if path.suffix == ".part") == sorted(kept)
        assert (tmp_path / ".downloads").exists() == bool(others)
        assert (tmp_path / ".downloads" / "cifar10").exists() == ("cifar10" in others)


def hostile(name, kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    "member",
    [
        hostile("../../../escaped"),
        hostile("cifar-10-batches-py/link", tarfile.SYMTYPE, "/etc/passwd"),
        hostile("device", tarfile.CHRTYPE),
    ],
)
def test_a_hostile_archive_writes_nothing_outside(tmp_path, tmp_path_factory, server, member):
    entry, arrays = small("cifar10")
    data = packed(entry.layout, arrays, tmp_path_factory.mktemp("packed"), member)
    file = described("cifar-10-python.tar.gz", data)
    server.contents[file.name] = data
    entry = replace(entry, layout=replace(entry.layout, downloads=(file,), addresses=(server.address,)))
    folder = tmp_path / "data"
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: cannot be unpacked \("):
        download.download(entry, folder, quiet())
    assert not (folder / "cifar-10-batches-py").exists()
    assert not (folder / ".downloads" / "cifar10" / "unpacked").exists()
    assert os.listdir(tmp_path) == ["data"]


def test_an_archive_of_other_files_raises(cifar, tmp_path, server):
    entry, _ = cifar
    layout = entry.layout
    other = replace(
        layout,
        train=(replace(layout.train[0], md5="0" * 32), *layout.train[1:]),
        test=(replace(layout.test[0], name="absent.bin"),),
    )
    with pytest.raises(
        UserError, match=r"does not contain the official files \(.*data_batch_1: damaged.*; absent.bin not found\)"
    ):
        download.download(replace(entry, layout=other), tmp_path, quiet())
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_the_disk_is_full_while_downloading(cifar, tmp_path):
    staging = tmp_path / ".downloads" / "cifar10"
    staging.mkdir(parents=True)
    (staging / "cifar-10-python.tar.gz.part").symlink_to("/dev/full")
    full = r"cannot write .*: the disk is full; make room and run the same command again"
    with pytest.raises(UserError, match=full):
        download.download(cifar[0], tmp_path, quiet())
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_the_disk_is_full_while_unpacking(cifar, tmp_path, monkeypatch):
    entry, _ = cifar
    extract = tarfile.TarFile.extractall

    def fills_up(tar, inside, **options):
        extract(tar, inside, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile.TarFile, "extractall", fills_up)
    with pytest.raises(UserError, match=r"the disk is full; make room"):
        download.download(entry, tmp_path, quiet())
    assert not (tmp_path / "cifar-10-batches-py").exists()
    assert not (tmp_path / ".downloads" / "cifar10" / "unpacked").exists()
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")
    download.download(entry, tmp_path, quiet())  # from the archive that was kept
    assert files.find_intact(entry, tmp_path)


def test_a_folder_that_cannot_be_created(cifar, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError,
        match=f"cannot write {re.escape(str(tmp_path))}/file/data: .*is a file; choose another folder with --data-dir",
    ):
        download.download(cifar[0], tmp_path / "file" / "data", quiet())


def test_only_one_process_downloads_a_data_set(cifar, tmp_path):
    (tmp_path / ".downloads").mkdir()
    lock = FileLock(tmp_path / ".downloads" / "cifar10.lock")
    with lock, pytest.raises(UserError, match="another process is downloading"):
        download.download(cifar[0], tmp_path, quiet())
    download.download(cifar[0], tmp_path, quiet())


def test_progress_is_shown(cifar, tmp_path):
    shown = Console(file=io.StringIO(), force_terminal=True, width=80)
    download.download(cifar[0], tmp_path, shown)
    assert "cifar-10-python.tar" in shown.file.getvalue()

"""Writes that are there wholly or not at all, also when the power fails."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ghostnoise.lab.errors import UserError

REMEDIES = {
    errno.ENOSPC: "the disk is full; make room and run the same command again",
    errno.EDQUOT: "the quota is used up; make room and run the same command again",
    errno.EFBIG: "the file is larger than is allowed here; raise the limit or choose another folder with --runs",
    errno.EROFS: "the file system is read-only; choose another folder with --runs",
    errno.EACCES: "no permission to write there; choose another folder with --runs",
    errno.EPERM: "no permission to write there; choose another folder with --runs",
    errno.ENOTDIR: "a part of that path is a file; choose another folder with --runs",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into a line that says what to do; what was there before stays."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, f"{error.strerror or error}; choose another folder with --runs")
        raise UserError(f"cannot write {path}: {remedy}; what was saved before is intact") from error


def write(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, on the disk when this returns."""
    with writing(path):
        name = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                name.unlink()
            raise
        sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Add to the end of `path`, on the disk when this returns; nothing is added if it does not fit."""
    with writing(path), open(path, "ab") as file:
        before = file.tell()
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(path, before)
            raise


def make_folder(path: Path) -> None:
    """Make `path` and what is above it, if they are not there."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove what a killed process had begun to write in `folder`; only for who holds the lock."""
    for part in folder.glob(".*.part"):
        with suppress(OSError):
            part.unlink()


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk too, where the system has a way to."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Atomic writes: after a crash or a power failure, a file has either its old or its new content."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ghostnoise.lab.errors import UserError

REMEDIES = {
    errno.ENOSPC: "the disk is full; make room and run the same command again",
    errno.EDQUOT: "the disk quota is exceeded; make room and run the same command again",
    errno.EFBIG: "the file exceeds the file size limit; raise the limit, or choose another folder with {option}",
    errno.EROFS: "the file system is read-only; choose another folder with {option}",
    errno.EACCES: "permission denied; choose another folder with {option}",
    errno.EPERM: "permission denied; choose another folder with {option}",
    errno.ENOTDIR: "a part of that path is a file; choose another folder with {option}",
    errno.EEXIST: "that path is a file; choose another folder with {option}",
}


@contextmanager
def writing(path: Path, option: str = "--runs") -> Iterator[None]:
    """Turn an `OSError` into a `UserError` with a remedy; `option` is the one that sets the folder."""
    try:
        yield
    except OSError as error:
        reason = REMEDIES.get(error.errno or 0, f"{error.strerror or error}; choose another folder with {{option}}")
        raise UserError(f"cannot write {path}: {reason.format(option=option)}; earlier content is unchanged") from error


def write(path: Path, content: bytes, option: str = "--runs") -> None:
    """Replace the content of `path`; it is on the disk when this returns."""
    with writing(path, option):
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Append to `path`; the content is on the disk when this returns. If it does not fit, nothing is appended."""
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


def make_folder(path: Path, option: str = "--runs") -> None:
    """Create `path` and its parents if they do not exist."""
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process left half-written; the caller must hold the lock of `folder`."""
    for part in folder.glob(".*.part"):
        with suppress(OSError):
            part.unlink()


def remove_abandoned_parts(folder: Path) -> None:
    """Remove files that processes of this machine left half-written when they were killed, and only those."""
    for part in folder.glob(".*.part"):
        number = part.name.split(".")[-2]
        if os.name == "posix" and number.isdecimal() and not is_running(int(number)):
            with suppress(OSError):
                part.unlink()


def is_running(process: int) -> bool:
    """Return whether this machine runs a process with this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the system supports it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

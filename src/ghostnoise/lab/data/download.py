"""Download a set from its official addresses, verify it, and move it into place as a whole."""

import errno
import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ghostnoise.lab.data.catalog import Entry, Layout
from ghostnoise.lab.data.files import examine
from ghostnoise.lab.data.transfer import fetch, same
from ghostnoise.lab.errors import UserError

STAGING = ".downloads"  # below the data folder, so that a move into place is a rename


def download(entry: Entry, folder: Path, console: Console) -> None:
    """Get all files of a set into `folder`; an archive that lies there already is used instead of the network."""
    staging = folder / STAGING / entry.name
    with _writing(folder), _alone(staging):
        layout, archive = _archive_at_hand(entry, folder)
        place = folder / layout.folders[0]
        if archive is None:
            with _progress(console) as bar:
                for file in layout.downloads:
                    if layout.archive or not same(place / file.name, file):
                        fetch(file, layout.addresses, staging / file.name, bar)
        if layout.archive:
            try:
                _unpack(archive or staging / layout.archive.name, layout, place, staging / "unpacked")
            finally:
                shutil.rmtree(staging / "unpacked", ignore_errors=True)
        else:
            place.mkdir(parents=True, exist_ok=True)
            for path in staging.glob("*.gz"):
                path.replace(place / path.name)
        shutil.rmtree(staging)


def _archive_at_hand(entry: Entry, folder: Path) -> tuple[Layout, Path | None]:
    """The layout to get, and its archive if somebody put that into the data folder."""
    for layout in entry.layouts:
        if layout.archive and same(path := folder / layout.archive.name, layout.archive):
            return layout, path
    return entry.layouts[0], None


def _unpack(archive: Path, layout: Layout, place: Path, inside: Path) -> None:
    """Unpack into `inside`, on the same disk as the place, verify, and move in."""
    shutil.rmtree(inside, ignore_errors=True)  # of a process that was killed
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(inside, filter="data")
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: cannot be unpacked ({error}); remove it and run the command again") from None
    finding = examine(layout, inside / layout.folders[0])
    if not finding.whole:
        wrong = [*finding.damaged, *(f"no {name}" for name in finding.missing)]
        raise UserError(f"{archive}: unpacks to other files ({'; '.join(wrong)}); remove it and run the command again")
    if not place.exists():
        finding.folder.rename(place)
        return
    for path in finding.folder.iterdir():  # some files are there, damaged or not
        path.replace(place / path.name)


@contextmanager
def _alone(staging: Path) -> Iterator[None]:
    """Hold a lock that dies with the process: two would write into the same file. What keeps nothing leaves nothing."""
    lock = staging.with_name(f"{staging.name}.lock")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            staging.mkdir(parents=True, exist_ok=True)  # the one before may have removed it just now
            try:
                yield
            finally:
                _tidy(staging, lock)
    except Timeout:
        raise UserError(f"{staging}: another process is downloading into it; wait for it to end") from None


def _tidy(staging: Path, lock: Path) -> None:
    """Remove what is empty."""
    with suppress(OSError):  # something was kept, of this set or another; or an open file cannot be removed here
        if staging.exists():
            staging.rmdir()
        lock.unlink()
        staging.parent.rmdir()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room there" if full else "check its permissions"
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); {remedy} and run the command "
            "again, which goes on with what was downloaded, or give another --data-dir"
        ) from None


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

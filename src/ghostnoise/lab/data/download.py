"""Download data sets from their official addresses: over https, resumable, verified, and moved only when complete."""

import gzip
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ghostnoise.lab.data.catalog import Entry, File, Layout
from ghostnoise.lab.data.files import examine, md5_of
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic

STAGING = ".downloads"  # in the data folder, so that moving a file into place is a rename
CHUNK = 1 << 18  # bytes
TIMEOUT = 30.0  # seconds without receiving data
LEAST_RATE = 2_000  # bytes per second, on average over each RATE_WINDOW
RATE_WINDOW = 30.0  # seconds
SCHEMES = frozenset({"https"})  # also of addresses that a server redirects to


class _TransferError(Exception):
    """A download from one address failed; the message gives the reason."""


def download(entry: Entry, folder: Path, console: Console) -> None:
    """Download all files of a data set into `folder`. If its archive is already there, the network is not used."""
    staging = folder / STAGING / entry.name
    with atomic.writing(folder, "--data-dir"), _locked(staging):
        layout = entry.layout
        assert layout is not None, f"{entry.name} has no files"
        archive, target = _local_archive(layout, folder), folder / layout.folders[0]
        if archive is None:
            with _progress(console) as bar:
                for file in layout.downloads:
                    if layout.archive or not matches(target / file.name, file):
                        fetch(file, layout.addresses, staging / file.name, bar)
        if layout.archive:
            try:
                _unpack(archive or staging / layout.archive.name, layout, target, staging / "unpacked")
            finally:
                shutil.rmtree(staging / "unpacked", ignore_errors=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            for path in staging.glob("*.gz"):
                path.replace(target / path.name)
        shutil.rmtree(staging)


def _local_archive(layout: Layout, folder: Path) -> Path | None:
    """Return the archive if the user has copied it into the data folder."""
    path = folder / layout.archive.name if layout.archive else None
    return path if path and layout.archive and matches(path, layout.archive) else None


def _unpack(archive: Path, layout: Layout, target: Path, temporary: Path) -> None:
    """Unpack into `temporary`, which is on the same disk as `target`, verify the files, and move them to `target`."""
    shutil.rmtree(temporary, ignore_errors=True)  # may exist if a process was killed
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: cannot be unpacked ({error}); remove it and run the command again") from None
    finding = examine(layout, temporary / layout.folders[0])
    if not finding.intact:
        differences = [*finding.damaged, *(f"{name} not found" for name in finding.missing)]
        raise UserError(
            f"{archive}: does not contain the official files ({'; '.join(differences)}); remove it and run the command "
            "again"
        )
    if not target.exists():
        finding.folder.rename(target)
        return
    for path in finding.folder.iterdir():
        path.replace(target / path.name)


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Create and lock the staging folder, so that only one process writes to it; afterwards remove it if empty."""
    lock = staging.with_name(f"{staging.name}.lock")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            staging.mkdir(parents=True, exist_ok=True)  # the previous owner may just have removed it
            try:
                yield
            finally:
                _remove_empty(staging, lock)
    except Timeout:
        raise UserError(f"{staging}: another process is downloading to it; wait until it has finished") from None


def _remove_empty(staging: Path, lock: Path) -> None:
    with suppress(OSError):  # not empty, or the system does not remove files that are open
        if staging.exists():
            staging.rmdir()
        lock.unlink()
        staging.parent.rmdir()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def fetch(file: File, addresses: tuple[str, ...], target: Path, progress: Progress) -> None:
    """Download one file to `target` from the first address that provides it, resuming an interrupted download."""
    if matches(target, file):
        return
    part = target.with_name(f"{target.name}.part")
    task = progress.add_task(file.name, total=file.size)
    failures = []
    for address in addresses:
        try:
            _complete(address + file.name, file, part, lambda done: progress.update(task, completed=done))
        except _TransferError as failure:
            failures.append(f"{address}{file.name}: {failure}")
        else:
            part.replace(target)
            return
    kept = _length(part)
    state = (
        f"{kept} of {file.size} bytes are kept in {part}; run the command again to resume"
        if kept
        else "nothing was downloaded; run the command again to retry"
    )
    raise UserError(f"{'; '.join(failures)}; {state}")


def _complete(url: str, file: File, part: Path, on_progress: Callable[[int], object]) -> None:
    """Download the rest of `part` and verify it; if a resumed download fails verification, start over once."""
    for _ in range(2):
        resumed = _length(part)
        if resumed < file.size:
            _transfer(url, file, part, on_progress)
        if (found := md5_of(part)) == file.md5:
            return
        part.unlink()
        if not resumed:
            break
    raise _TransferError(f"provides a different file, with md5 {found} instead of {file.md5}")


def _transfer(url: str, file: File, part: Path, on_progress: Callable[[int], object]) -> None:
    """Append the missing bytes to `part`.

    If the server sends the whole file instead, it is written to another file first: `part` never becomes shorter.
    """
    have = _length(part)
    with _request(url, have) as response:
        right_range = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not have or (response.status == 206 and right_range):
            have = _receive(response, file, part, have, on_progress)
        else:
            again = part.with_name(f"{part.name}.again")
            again.unlink(missing_ok=True)
            try:
                have = _receive(response, file, again, 0, on_progress)
            finally:
                if _length(again) > _length(part) or have > file.size:
                    again.replace(part)
                again.unlink(missing_ok=True)
    if have < file.size:
        raise _TransferError(f"ended after {have} of {file.size} bytes")


def _receive(response: HTTPResponse, file: File, part: Path, have: int, on_progress: Callable[[int], object]) -> int:
    """Append a response to a file that has `have` bytes, and return how many it has then."""
    rate = _Rate()
    with part.open("ab") as out:
        while have <= file.size and (chunk := _next(response)):
            out.write(chunk)
            out.flush()  # raises here if the disk is full
            on_progress(have := have + len(chunk))
            rate.add(len(chunk))
    return have


class _Rate:
    """The rate of a transfer, which fails if it is too low: a server that sends a byte now and then never times out."""

    def __init__(self) -> None:
        self.since, self.received = time.monotonic(), 0

    def add(self, count: int) -> None:
        """Add received bytes; raises if there were too few of them since the window began."""
        self.received += count
        passed = time.monotonic() - self.since
        if passed < RATE_WINDOW:
            return
        if self.received < LEAST_RATE * passed:
            rate = self.received / passed
            raise _TransferError(f"sends {rate:,.0f} bytes per second, which is less than {LEAST_RATE:,}")
        self.since, self.received = time.monotonic(), 0


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but only to the schemes that are allowed."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request of a redirect, after checking its address."""
        _check_scheme(newurl, "redirects to ")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(url: str, how: str = "") -> None:
    if urlsplit(url).scheme not in SCHEMES:
        raise _TransferError(f"{how}{url}, which is not https, and only https is used")


def _request(url: str, have: int) -> HTTPResponse:
    _check_scheme(url)
    headers = {"User-Agent": "ghostnoise", **({"Range": f"bytes={have}-"} if have else {})}
    request = urllib.request.Request(url, headers=headers)
    try:
        response: HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # range not satisfiable: the served file is shorter
            return _request(url, 0)
        raise _TransferError(f"responded {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _TransferError(f"cannot be reached ({error.reason})") from None
    except (OSError, HTTPException) as error:
        raise _TransferError(f"cannot be reached ({str(error) or type(error).__name__})") from None


def _next(response: HTTPResponse) -> bytes:
    """Return the bytes that have arrived, at most `CHUNK`; empty at the end."""
    try:
        return response.read1(CHUNK)
    except IncompleteRead as error:
        if error.partial:
            return error.partial
        raise _TransferError("connection lost (IncompleteRead)") from None
    except (OSError, HTTPException) as error:
        raise _TransferError(f"connection lost ({str(error) or type(error).__name__})") from None


def matches(path: Path, file: File) -> bool:
    """Return whether `path` has the size and the checksum of the published file."""
    return _length(path) == file.size and md5_of(path) == file.md5


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0

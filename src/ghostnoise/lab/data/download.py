"""Download a set from its official addresses: resumable, verified, and moved into place as a whole."""

import errno
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ghostnoise.lab.data.catalog import Entry, File, Layout
from ghostnoise.lab.data.files import examine, md5_of
from ghostnoise.lab.errors import UserError

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
STAGING = ".downloads"  # below the data folder, so that a move into place is a rename


class _Failure(Exception):
    """An address did not deliver; the text says why."""


def download(entry: Entry, folder: Path, console: Console) -> None:
    """Get all files of a set into `folder`; an archive that lies there already is used instead of the network."""
    staging = folder / STAGING / entry.name
    with _writing(folder), _alone(staging):
        layout, archive = _archive_at_hand(entry, folder)
        place = folder / layout.folders[0]
        if archive is None:
            with _progress(console) as bar:
                for file in layout.downloads:
                    if layout.archive or not _same(place / file.name, file):
                        fetch(file, layout.addresses, staging / file.name, bar)
        if layout.archive:
            _unpack(archive or staging / layout.archive.name, layout, place, staging / "unpacked")
        else:
            place.mkdir(parents=True, exist_ok=True)
            for path in staging.glob("*.gz"):
                path.replace(place / path.name)
        shutil.rmtree(staging)


def fetch(file: File, addresses: tuple[str, ...], target: Path, progress: Progress) -> None:
    """Download one file to `target`, from the first address that delivers it; goes on where an earlier try ended."""
    if _same(target, file):
        return
    part = target.with_name(f"{target.name}.part")
    task = progress.add_task(file.name, total=file.size)
    failures = []
    for address in addresses:
        try:
            _complete(address + file.name, file, part, lambda done: progress.update(task, completed=done))
        except _Failure as failure:
            failures.append(f"{address}{file.name}: {failure}")
        else:
            part.replace(target)
            return
    kept = _length(part)
    state = f"{kept} of {file.size} bytes are kept in {part}, and" if kept else "nothing was kept, and"
    again = "running the command again continues there" if kept else "running the command again starts anew"
    raise UserError(f"{'; '.join(failures)}; {state} {again}")


def _complete(url: str, file: File, part: Path, report: Callable[[int], object]) -> None:
    """Fill `part` until it is the file; if what it was continued from turns out wrong, once more from the start."""
    if _length(part) > file.size:
        part.unlink()
    for _ in range(2):
        continued = _length(part)
        if continued < file.size:
            _transfer(url, file, part, report)
        if (found := md5_of(part)) == file.md5:
            return
        part.unlink()
        if not continued:
            break
    raise _Failure(f"delivers another file, with md5 {found} instead of {file.md5}")


def _transfer(url: str, file: File, part: Path, report: Callable[[int], object]) -> None:
    """Append to `part` what it lacks; from the start, if the server sends no parts of files."""
    have = _length(part)
    with _ask(url, have) as response:
        begins = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        continues = response.status == 206 and begins
        with part.open("ab" if continues else "wb") as out:
            have = have if continues else 0
            while have <= file.size and (chunk := _next(response)):
                out.write(chunk)
                out.flush()  # so that a full disk is known of here
                report(have := have + len(chunk))
    if have < file.size:
        raise _Failure(f"ended after {have} of {file.size} bytes")


def _ask(url: str, have: int) -> HTTPResponse:
    headers = {"User-Agent": "ghostnoise", **({"Range": f"bytes={have}-"} if have else {})}
    request = urllib.request.Request(url, headers=headers)
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing there to continue with
            return _ask(url, 0)
        raise _Failure(f"answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _Failure(f"cannot be reached ({error.reason})") from None
    except (OSError, HTTPException) as error:
        raise _Failure(f"cannot be reached ({error or type(error).__name__})") from None


def _next(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        raise _Failure(f"broke off ({error or type(error).__name__})") from None


def _archive_at_hand(entry: Entry, folder: Path) -> tuple[Layout, Path | None]:
    """The layout to get, and its archive if somebody put that into the data folder."""
    for layout in entry.layouts:
        if layout.archive and _same(path := folder / layout.archive.name, layout.archive):
            return layout, path
    return entry.layouts[0], None


def _unpack(archive: Path, layout: Layout, place: Path, inside: Path) -> None:
    """Unpack into `inside`, on the same disk as the place, verify, and move in."""
    shutil.rmtree(inside, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(inside, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: cannot be unpacked ({error}); remove it and run the command again") from None
    except OSError:
        shutil.rmtree(inside, ignore_errors=True)  # the disk may be full
        raise
    finding = examine(layout, inside / layout.folders[0])
    if not finding.whole:
        wrong = [*finding.damaged, *(f"no {name}" for name in finding.missing)]
        raise UserError(f"{archive}: unpacks to other files ({'; '.join(wrong)}); remove it and run the command again")
    if not place.exists():
        finding.folder.rename(place)
        return
    for path in finding.folder.iterdir():  # some files are there, damaged or not
        path.replace(place / path.name)


def _same(path: Path, file: File) -> bool:
    return _length(path) == file.size and md5_of(path) == file.md5


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _alone(staging: Path) -> Iterator[None]:
    """Hold a lock that dies with the process: two would write into the same file."""
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(staging.with_name(f"{staging.name}.lock"), timeout=0):
            staging.mkdir(exist_ok=True)  # the one before may have removed it just now
            yield
    except Timeout:
        raise UserError(f"{staging}: another process is downloading into it; wait for it to end") from None


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

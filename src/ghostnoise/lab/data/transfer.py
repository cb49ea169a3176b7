"""Download one file: resumable, verified before it gets its name."""

import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from rich.progress import Progress

from ghostnoise.lab.data.catalog import File
from ghostnoise.lab.data.files import md5_of
from ghostnoise.lab.errors import UserError

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


class _Failure(Exception):
    """An address did not deliver; the text says why."""


def fetch(file: File, addresses: tuple[str, ...], target: Path, progress: Progress) -> None:
    """Download one file to `target`, from the first address that delivers it; goes on where an earlier try ended."""
    if same(target, file):
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
        raise _Failure(f"cannot be reached ({str(error) or type(error).__name__})") from None


def _next(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        raise _Failure(f"broke off ({str(error) or type(error).__name__})") from None


def same(path: Path, file: File) -> bool:
    """Whether `path` is the file as it was published."""
    return _length(path) == file.size and md5_of(path) == file.md5


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0

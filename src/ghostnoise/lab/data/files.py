"""Find the files of a data set in the data folder, and verify every byte before it is used."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ghostnoise.lab.data.catalog import Entry, File, Layout, Split
from ghostnoise.lab.data.readers import Arrays, read
from ghostnoise.lab.errors import UserError

BOTH: tuple[Split, ...] = ("train", "test")


class DamagedFile(Exception):
    """A file differs from the published one; the message describes the difference."""


@dataclass(frozen=True)
class Finding:
    """A folder with files of a data set: the verified contents, and which files are missing or damaged."""

    layout: Layout
    folder: Path
    contents: list[tuple[Path, bytes]]
    missing: list[str]
    damaged: list[str]

    @property
    def intact(self) -> bool:
        """Whether every file is present and identical to the published one."""
        return not self.missing and not self.damaged


def data_folder(given: Path | None) -> Path:
    """Return the data folder: the given one, or else $GHOSTNOISE_DATA, or else ~/.cache/ghostnoise-data."""
    return Path(given or os.environ.get("GHOSTNOISE_DATA") or "~/.cache/ghostnoise-data").expanduser()


def load(entry: Entry, folder: Path, split: Split) -> Arrays:
    """Read a split of a data set from the first layout that is intact."""
    found = find_intact(entry, folder, (split,))
    return read(entry, split, found.layout.format, found.contents)


def find_intact(entry: Entry, folder: Path, splits: tuple[Split, ...] = BOTH) -> Finding:
    """Return the first folder in which these splits are intact; raise a UserError if there is none."""
    findings = []
    for finding in search(entry, folder, splits):
        if finding.intact:
            return finding
        findings.append(finding)
    remedy = f"run `ghostnoise data get {entry.name} --data-dir {folder}`, or copy the official files there"
    for finding in findings:
        if finding.damaged:
            raise UserError(f"{'; '.join(finding.damaged)}; {remedy}")
    for finding in findings:
        raise UserError(f"{finding.folder}: {', '.join(finding.missing)} not found; {remedy}")
    raise UserError(
        f"{entry.name}: no {' or '.join(splits)} images in {folder}; expected {_expected(entry, splits)}; {remedy}"
    )


def search(entry: Entry, folder: Path, splits: tuple[Split, ...] = BOTH) -> Iterator[Finding]:
    """Iterate over the folders that contain files of these splits, intact or not."""
    for layout in entry.layouts:
        for name in layout.folders:
            finding = examine(layout, folder / name, splits)
            if finding.contents or finding.damaged:
                yield finding


def examine(layout: Layout, folder: Path, splits: tuple[Split, ...] = BOTH) -> Finding:
    """Read and verify the files of these splits in one folder."""
    finding = Finding(layout, folder, [], [], [])
    for file in layout.files(splits):
        try:
            if (content := _content(layout, folder, file)) is None:
                finding.missing.append(file.name)
            else:
                finding.contents.append(content)
        except DamagedFile as damage:
            finding.damaged.append(str(damage))
    return finding


def has_files(entry: Entry, folder: Path, splits: tuple[Split, ...]) -> bool:
    """Return whether one folder contains all files of these splits; their contents are not checked."""
    return any(
        all(any(path.is_file() for path in _paths(layout, folder / name, file)) for file in layout.files(splits))
        for layout in entry.layouts
        for name in layout.folders
    )


def md5_of(path: Path) -> str:
    """Return the MD5 checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def _md5(data: bytes = b"") -> "hashlib._Hash":
    return hashlib.md5(data, usedforsecurity=False)


def _paths(layout: Layout, folder: Path, file: File) -> list[Path]:
    plain = folder / file.name
    return [plain, folder / f"{file.name}.gz"] if layout.format == "idx" else [plain]


def _content(layout: Layout, folder: Path, file: File) -> tuple[Path, bytes] | None:
    """Return the verified contents of a file, or None if it is missing; raise DamagedFile if no copy is intact."""
    damage = None
    for path in _paths(layout, folder, file):
        if path.is_file():
            try:
                return path, _verified(path, file)
            except DamagedFile as found:
                damage = damage or found
    if damage:
        raise damage
    return None


def _verified(path: Path, file: File) -> bytes:
    """Return the contents of `path`, uncompressed and verified. The file is read only once."""
    compressed = path.suffix == ".gz"
    try:
        with gzip.open(path) if compressed else path.open("rb") as stream:
            data = stream.read(file.size + 1)  # limits how much a compressed file can expand to
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(f"{path}: cannot be read ({error})") from None
    contents = "unpacks to" if compressed else "has"
    if len(data) != file.size:
        length = f"more than {file.size}" if len(data) > file.size else str(len(data))
        raise DamagedFile(f"{path}: damaged, {contents} {length} bytes instead of {file.size}")
    if (found := _md5(data).hexdigest()) != file.md5:
        raise DamagedFile(f"{path}: damaged, {contents} md5 {found} instead of {file.md5}")
    return data


def _expected(entry: Entry, splits: tuple[Split, ...]) -> str:
    locations = []
    for layout in entry.layouts:
        names = ", ".join(file.name for file in layout.files(splits))
        compressed = " (or .gz)" if layout.format == "idx" else ""
        locations.append(f"{names}{compressed} in {' or '.join(f'{name}/' for name in layout.folders)}")
    return ", or ".join(locations)

"""Find a set's files in the data folder, and verify every byte before it is used."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ghostnoise.lab.data.catalog import Entry, File, Layout, Part
from ghostnoise.lab.data.readers import Arrays, read
from ghostnoise.lab.errors import UserError

BOTH: tuple[Part, ...] = ("train", "test")


class Damage(Exception):
    """A file is not the published one; the text says in what."""


@dataclass(frozen=True)
class Finding:
    """A folder with files of a set: the verified contents, and what is missing or damaged."""

    layout: Layout
    folder: Path
    contents: list[tuple[Path, bytes]]
    missing: list[str]
    damaged: list[str]

    @property
    def whole(self) -> bool:
        """Whether every file is there, and as it was published."""
        return not self.missing and not self.damaged


def data_folder(given: Path | None) -> Path:
    """Where data sets lie: as given, else as $GHOSTNOISE_DATA says, else in ~/.cache/ghostnoise-data."""
    return Path(given or os.environ.get("GHOSTNOISE_DATA") or "~/.cache/ghostnoise-data").expanduser()


def load(entry: Entry, folder: Path, part: Part) -> Arrays:
    """Read one part of a set from the first layout that is whole."""
    found = whole(entry, folder, (part,))
    return read(entry, part, found.layout.kind, found.contents)


def whole(entry: Entry, folder: Path, parts: tuple[Part, ...] = BOTH) -> Finding:
    """The first folder in which these parts are whole."""
    findings = []
    for finding in findings_of(entry, folder, parts):
        if finding.whole:
            return finding
        findings.append(finding)
    remedy = f"run `ghostnoise data get {entry.name} --data-dir {folder}`, or put the official files there"
    for finding in findings:
        if finding.damaged:
            raise UserError(f"{'; '.join(finding.damaged)}; {remedy}")
    for finding in findings:
        raise UserError(f"{finding.folder}: has no {', '.join(finding.missing)}; {remedy}")
    raise UserError(
        f"{entry.name}: no {' or '.join(parts)} images in {folder}; looked for {_looked_for(entry, parts)}; {remedy}"
    )


def findings_of(entry: Entry, folder: Path, parts: tuple[Part, ...] = BOTH) -> Iterator[Finding]:
    """Every folder that has some of the files of these parts, one by one, with what is wrong there."""
    for layout in entry.layouts:
        for name in layout.folders:
            finding = examine(layout, folder / name, parts)
            if finding.contents or finding.damaged:
                yield finding


def examine(layout: Layout, folder: Path, parts: tuple[Part, ...] = BOTH) -> Finding:
    """Read and verify the files of these parts in one folder."""
    finding = Finding(layout, folder, [], [], [])
    for file in layout.files(parts):
        try:
            if (content := _content(layout, folder, file)) is None:
                finding.missing.append(file.name)
            else:
                finding.contents.append(content)
        except Damage as damage:
            finding.damaged.append(str(damage))
    return finding


def there(entry: Entry, folder: Path, parts: tuple[Part, ...]) -> bool:
    """Whether some folder has all files of these parts, whole or not."""
    return any(
        all(any(path.is_file() for path in _paths(layout, folder / name, file)) for file in layout.files(parts))
        for layout in entry.layouts
        for name in layout.folders
    )


def md5_of(path: Path) -> str:
    """The md5 of a file's contents, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def _md5(data: bytes = b"") -> "hashlib._Hash":
    return hashlib.md5(data, usedforsecurity=False)


def _paths(layout: Layout, folder: Path, file: File) -> list[Path]:
    plain = folder / file.name
    return [plain, folder / f"{file.name}.gz"] if layout.kind == "idx" else [plain]


def _content(layout: Layout, folder: Path, file: File) -> tuple[Path, bytes] | None:
    """The verified contents of a file, or None where there is none; Damage if all that is there is damaged."""
    damage = None
    for path in _paths(layout, folder, file):
        if path.is_file():
            try:
                return path, _verified(path, file)
            except Damage as found:
                damage = damage or found
    if damage:
        raise damage
    return None


def _verified(path: Path, file: File) -> bytes:
    """The contents of `path`, unpacked if it is gzipped; what is verified is what will be read."""
    zipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if zipped else path.open("rb") as stream:
            data = stream.read(file.size + 1)  # a file that unpacks to more is not unpacked further
    except (OSError, EOFError, zlib.error) as error:
        raise Damage(f"{path}: cannot be read ({error})") from None
    contents = "unpacks to" if zipped else "has"
    if len(data) != file.size:
        length = f"more than {file.size}" if len(data) > file.size else str(len(data))
        raise Damage(f"{path}: damaged, {contents} {length} bytes instead of {file.size}")
    if (found := _md5(data).hexdigest()) != file.md5:
        raise Damage(f"{path}: damaged, {contents} md5 {found} instead of {file.md5}")
    return data


def _looked_for(entry: Entry, parts: tuple[Part, ...]) -> str:
    places = []
    for layout in entry.layouts:
        names = ", ".join(file.name for file in layout.files(parts))
        zipped = " (or .gz)" if layout.kind == "idx" else ""
        places.append(f"{names}{zipped} in {' or '.join(f'{name}/' for name in layout.folders)}")
    return ", or ".join(places)

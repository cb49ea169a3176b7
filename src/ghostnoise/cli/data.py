"""`ghostnoise data`: list, download or verify data sets."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ghostnoise.cli import console
from ghostnoise.cli.options import add_data_folder
from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ghostnoise.lab.data.catalog import Entry
    from ghostnoise.lab.data.files import Finding

PACKAGES = console.LAB
ACTIONS = ("list", "get", "verify")
SOURCES = {"digits": "included in scikit-learn", "mnist1d": "generated"}


@dataclass(frozen=True)
class Listed:
    """A data set in the list. `size` is in bytes: on disk if it was found, else of the download. None is unknown."""

    name: str
    images: int | None
    classes: int | None
    shape: tuple[int, ...] | None
    size: int | None
    where: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("name", nargs="?", help="the data set to get or verify (default: verify all that are there)")
    add_data_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Run the action and return the exit code."""
    from ghostnoise.lab.data.catalog import CATALOG
    from ghostnoise.lab.data.files import data_folder

    folder, terminal = data_folder(options.data_dir), console.output()
    if options.action == "list":
        console.print_table(terminal, table(listing(folder), folder))
    elif options.action == "verify":
        for name in [options.name] if options.name else found(folder):
            console.print_line(terminal, verify(name, folder))
    elif options.name is None:
        raise UserError(f"get without a name: must be one of {', '.join(CATALOG)}; give one of them")
    else:
        console.print_line(terminal, get(options.name, folder, terminal))
    return 0


def listing(folder: Path) -> list[Listed]:
    """Return every data set, and whether it is complete in `folder` by the sizes of its files, which are not read."""
    from ghostnoise.lab.data.catalog import CATALOG

    own = Listed("imagefolder", None, None, None, None, "your own folders")
    return [*(_listed(entry, folder) for entry in CATALOG.values()), own]


def found(folder: Path) -> list[str]:
    """Return the data sets that have files in `folder`."""
    from ghostnoise.lab.data.catalog import CATALOG
    from ghostnoise.lab.data.files import search

    names = [entry.name for entry in CATALOG.values() if any(search(entry, folder, read=False))]
    if not names:
        raise UserError(f"{folder}: has no files of a data set; get one with `ghostnoise data get NAME`")
    return names


def get(name: str, folder: Path, terminal: "Console") -> str:
    """Download a data set into `folder` unless it is complete there, verify it, and return a line about it."""
    from ghostnoise.lab.data import catalog
    from ghostnoise.lab.data.download import download
    from ghostnoise.lab.data.files import search
    from ghostnoise.lab.data.image_folder import LAYOUT

    if name == "imagefolder":
        raise UserError(f"imagefolder: uses your own images and cannot be downloaded; arrange them as {LAYOUT}")
    entry = catalog.find(name)
    if entry.layout and not any(finding.intact for finding in search(entry, folder)):
        download(entry, folder, terminal)
    return verify(name, folder)


def verify(name: str, folder: Path) -> str:
    """Compare every file of a data set with its published checksum; return a line about it, or raise."""
    from ghostnoise.lab.data import catalog
    from ghostnoise.lab.data.files import find_intact

    if name == "imagefolder":
        raise UserError("imagefolder: uses your own images, which have no published checksums; verify another data set")
    entry = catalog.find(name)
    if not entry.layout:
        return f"{name}: {SOURCES[name]}; no files are needed"
    found = find_intact(entry, folder)
    return f"{name}: complete in {found.folder}, {len(found.contents)} files with the published md5 checksums"


def table(rows: list[Listed], folder: Path) -> "Table":
    """Return the list as a table."""
    from rich.table import Table

    made = Table(caption=f"in {folder}", caption_justify="left")
    for heading in ("set", "images", "classes", "shape", "MB", "where"):
        made.add_column(heading, justify="left" if heading in ("set", "where") else "right", no_wrap=heading != "where")
    for row in rows:
        counts = ("" if count is None else f"{count:,}" for count in (row.images, row.classes))
        shape = "×".join(map(str, row.shape or ()))
        size = "" if row.size is None else f"{row.size / 1e6:.0f}"
        made.add_row(row.name, *counts, shape, size, row.where)
    return made


def _listed(entry: "Entry", folder: Path) -> Listed:
    size, where = _state(entry, folder)
    return Listed(entry.name, entry.train_size + entry.test_size, entry.classes, entry.shape, size, where)


def _state(entry: "Entry", folder: Path) -> tuple[int | None, str]:
    """Return the size in bytes and the place of a data set."""
    from ghostnoise.lab.data.files import search

    if not entry.layout:
        return None, SOURCES[entry.name]
    incomplete: Finding | None = None
    for finding in search(entry, folder, read=False):
        where = f"{finding.folder.relative_to(folder)}/"
        if finding.intact:
            return sum(path.stat().st_size for path, _ in finding.contents), where
        incomplete = incomplete or finding
    size = sum(file.size for file in entry.layout.downloads)
    if incomplete is None:
        return size, "not found"
    state = "damaged" if incomplete.damaged else "incomplete"
    return size, f"{incomplete.folder.relative_to(folder)}/ {state}"

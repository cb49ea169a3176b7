"""Run `ghostnoise data`: list the sets, get one, verify one."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ghostnoise.lab.data import catalog
from ghostnoise.lab.data.catalog import CATALOG, Entry
from ghostnoise.lab.data.download import download
from ghostnoise.lab.data.files import Finding, data_folder, findings_of, whole
from ghostnoise.lab.data.folder import LAYOUT
from ghostnoise.lab.errors import UserError

ACTIONS = ("list", "get", "verify")


@dataclass(frozen=True)
class Row:
    """A set in the list; `size` is in bytes, on disk if it is here, else to download. None is not known."""

    name: str
    images: int | None
    classes: int | None
    shape: tuple[int, int, int] | None
    size: int | None
    where: str


def run(action: str, name: str | None, folder: Path | None, console: Console) -> int:
    """Do `action`, one of list, get and verify, in `folder` or the default one; returns the exit code."""
    place = data_folder(folder)
    if action == "list":
        console.print(_table(listing(place), place))
    elif action not in ACTIONS:
        raise UserError(f"data {action}: must be one of {', '.join(ACTIONS)}")
    elif name is None:
        raise UserError(f"data {action} without a name: there are {', '.join(CATALOG)}; give one")
    elif action == "get":
        get(name, place, console)
    else:
        _say(console, verify(name, place))
    return 0


def listing(folder: Path) -> list[Row]:
    """Every set, and whether it is whole in `folder`."""
    own = Row("imagefolder", None, None, None, None, "your own folders")
    return [*(_row(entry, folder) for entry in CATALOG.values()), own]


def get(name: str, folder: Path, console: Console) -> None:
    """Download a set into `folder`, unless it is whole there; says what was done."""
    if name == "imagefolder":
        raise UserError(f"imagefolder: your own images, so there is nothing to get; lay them out as {LAYOUT}")
    entry = catalog.find(name)
    if entry.layouts and not any(finding.whole for finding in findings_of(entry, folder)):
        download(entry, folder, console)
    _say(console, verify(name, folder))


def verify(name: str, folder: Path) -> str:
    """Read every file of a set and compare it with what was published; returns where it is whole, or raises."""
    if name == "imagefolder":
        raise UserError("imagefolder: your own images, of which no checksum was published; there is nothing to verify")
    entry = catalog.find(name)
    if not entry.layouts:
        return f"{name}: embedded in scikit-learn; no files are needed"
    found = whole(entry, folder)
    return f"{name}: whole in {found.folder}, {len(found.contents)} files with the published md5"


def _row(entry: Entry, folder: Path) -> Row:
    size, where = _state(entry, folder)
    return Row(entry.name, entry.train_size + entry.test_size, entry.classes, entry.shape, size, where)


def _state(entry: Entry, folder: Path) -> tuple[int | None, str]:
    if not entry.layouts:
        return None, "embedded"
    spoilt: Finding | None = None
    for finding in findings_of(entry, folder):
        where = f"{finding.folder.relative_to(folder)}/"
        if finding.whole:
            return sum(path.stat().st_size for path, _ in finding.contents), where
        spoilt = spoilt or finding
    size = sum(file.size for file in entry.layouts[0].downloads)
    if spoilt is None:
        return size, "not here"
    state = "damaged" if spoilt.damaged else "incomplete"
    return size, f"{spoilt.folder.relative_to(folder)}/ {state}"


def _table(rows: list[Row], folder: Path) -> Table:
    table = Table(caption=f"in {folder}", caption_justify="left")
    for heading in ("set", "images", "classes", "shape", "MB", "where"):
        table.add_column(
            heading, justify="left" if heading in ("set", "where") else "right", no_wrap=heading != "where"
        )
    for row in rows:
        counts = ("" if count is None else f"{count:,}" for count in (row.images, row.classes))
        shape = "×".join(map(str, row.shape or ()))
        size = "" if row.size is None else f"{row.size / 1e6:.0f}"
        table.add_row(row.name, *counts, shape, size, row.where)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

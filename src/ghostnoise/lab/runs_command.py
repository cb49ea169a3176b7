"""`ghostnoise runs`: list the run folders, show one, remove some."""

import argparse
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.store.scan import Found

STATUSES = ("finished", "diverged", "failed", "unfinished", "damaged")


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the parser but for the folder, which `train` has too."""
    parser: argparse.ArgumentParser = commands.add_parser("runs", help="list the run folders, show or remove some")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="WORD",
        help="[RECIPE] [key=value ...] lists; show RUN; remove RUN ..., or remove [RECIPE] with key=value or --status",
    )
    parser.add_argument("--status", choices=STATUSES, help="only those")
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from rich.console import Console

    console, words = Console(), list(options.overrides)
    action = words.pop(0) if words and words[0] in ("show", "remove") else "list"
    filters = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    chosen = _chosen(options.runs, filters, options.status)
    if action == "show":
        if len(names) != 1 or filters:
            raise UserError("show: takes one run, by its folder or identity")
        _show(_named(options.runs, names[0]), console)
        return 0
    if action == "remove":
        return _remove(_to_remove(options, names, filters, chosen), options.yes, console)
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: give one recipe; `runs show RUN` shows a run")
    _list(chosen(names[0] if names else None), console)
    return 0


def _all(runs: Path, recipe: str | None) -> list["Found"]:
    from ghostnoise.lab.store import scan

    there = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    if recipe is not None and recipe not in there:
        raise UserError(f"{recipe}: no runs of it in {runs}; there are {', '.join(there) or 'none'}")
    folders = there if recipe is None else [recipe]
    return [found for name in folders for found in scan.scan(runs / name, lambda text: None).values()]


def _chosen(runs: Path, filters: list[str], status: str | None) -> Callable[[str | None], list["Found"]]:
    """Finds the runs of a recipe, or of all, that have the status and the settings."""
    from ghostnoise.lab.config.overrides import flat, overridden, values_of

    _, mistakes = overridden({}, filters)
    if mistakes:
        raise UserError("\n".join(mistakes))
    wanted = values_of(filters)

    def fits(found: "Found") -> bool:
        settings = flat(found.settings)
        return status in (None, found.status) and all(_same(settings.get(key), wanted[key]) for key in wanted)

    return lambda recipe: [found for found in _all(runs, recipe) if fits(found)]


def _same(there: object, wanted: object) -> bool:
    from ghostnoise.lab.config.overrides import Unset

    return there is None if wanted is Unset.UNSET else there == wanted


def _named(runs: Path, name: str) -> "Found":
    """The run of an identity, of the start of one, or of a folder."""
    from ghostnoise.lab.store import scan

    folder = Path(name)
    if folder.is_dir() and folder.resolve().parent.parent == runs.resolve():
        return scan.look(folder, lambda text: None)
    fitting = [found for found in _all(runs, None) if name and found.identity.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UserError(f"{name}: no such run in {runs}; `ghostnoise runs` lists all")
    raise UserError(f"{name}: fits {len(fitting)} runs; give more of the identity, or the folder")


def _list(founds: list["Found"], console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("recipe", "identity", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("accuracy", "epochs", "seconds", "age"):
        table.add_column(name, justify="right")
    for found in founds:
        result = found.result or {}
        accuracy = result.get("accuracy")
        table.add_row(
            found.path.parent.name, found.identity, found.status, "" if accuracy is None else f"{accuracy:.2f}",
            str(result.get("epochs", "")), f"{result['seconds']:.1f}" if "seconds" in result else "", _age(found),
        )  # fmt: skip
    if founds:
        console.print(table)
    console.print(f"{len(founds)} runs", highlight=False)


def _age(found: "Found") -> str:
    """How long ago anything was last written there."""
    times = [datetime.fromtimestamp(found.path.stat().st_mtime, UTC)]
    for name in ("metrics.jsonl", "result.json", "failure.json"):
        with suppress(OSError):
            times.append(datetime.fromtimestamp((found.path / name).stat().st_mtime, UTC))
    seconds = (datetime.now(UTC) - max(times)).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _show(found: "Found", console: "Console") -> None:
    """Settings that are not the defaults, the result or the failure, and the last line of the metrics."""
    from ghostnoise.lab.config.overrides import flat

    lines = [f"{found.path}: {found.status}"]
    if found.reason:
        lines.append(found.reason)
    lines += [f"  {key} = {value}" for key, value in _not_default(flat(found.settings)).items()]
    for title, record in (("result", found.result), ("failure", found.failure)):
        if record:
            lines += [title, *(f"  {key} = {value}" for key, value in record.items() if key != "traceback")]
            lines += [f"  {line}" for line in str(record.get("traceback", "")).splitlines()]
    metrics = found.metrics()
    if metrics:
        lines += ["last epoch", *(f"  {key} = {value}" for key, value in metrics[-1].items())]
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _not_default(settings: dict[str, Any]) -> dict[str, Any]:
    from ghostnoise.lab.config.overrides import SECTIONS

    def default(key: str) -> Any:
        section, _, name = key.rpartition(".")
        fields = SECTIONS[section].model_fields if section in SECTIONS else {}
        return fields[name].default if name in fields else None

    return {key: value for key, value in settings.items() if value != default(key) and key not in ("identity",)}


def _to_remove(
    options: argparse.Namespace, names: list[str], filters: list[str],
    chosen: Callable[[str | None], list["Found"]],
) -> list["Found"]:  # fmt: skip
    """Runs by name, or those that fit; a damaged one is not among these, only by its own name."""
    if not filters and options.status is None:
        if not names:
            raise UserError("remove: takes runs by folder or identity, or key=value or --status")
        named = {name: _named(options.runs, name) for name in names}
        for name, found in named.items():
            if found.status == "damaged" and Path(name).name != found.identity:
                raise UserError(f"{name}: the run is damaged; give its whole identity, {found.identity}, to remove it")
        return list(named.values())
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: with key=value or --status, give one recipe or none")
    return [found for found in chosen(names[0] if names else None) if found.status != "damaged"]


def _remove(founds: Iterable["Found"], sure: bool, console: "Console") -> int:
    from ghostnoise.lab.store import RunFolder

    founds = {found.path: found for found in founds}.values()
    if not founds:
        console.print("nothing to remove", highlight=False)
        return 0
    if not sure:
        _list(list(founds), console)
        if not _agreed(console):
            console.print("nothing was removed", highlight=False)
            return 0
    for found in founds:
        folder = RunFolder(found.path, lambda text: None)
        folder.own()  # raises if another process has it
        shutil.rmtree(found.path)
        folder.release()
        console.print(f"removed {found.path}", highlight=False, soft_wrap=True)
    return 0


def _agreed(console: "Console") -> bool:
    try:
        return console.input("remove them for good? [y/N] ", markup=False).strip().lower() in ("y", "yes")
    except EOFError:  # nobody is there to ask
        return False

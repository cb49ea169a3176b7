"""`ghostnoise runs`: list, show, remove, export or import runs."""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.cli import console
from ghostnoise.cli.options import add_runs_folder
from ghostnoise.lab.errors import UserError
from ghostnoise.text import counted, did_you_mean, duration

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.store.scan import Found

PACKAGES = console.LAB
ACTIONS = ("show", "remove", "export", "import")
STATUS_WIDTH = 11  # where "unfinished," fits
STATUSES = ("finished", "diverged", "failed", "unfinished", "damaged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(any_word=True)
    option = parser.add_argument
    option("overrides", nargs="*", metavar="WORD",
           help="[RECIPE] [key=value ...] lists runs; show RUN; remove RUN ..., or remove [RECIPE] with key=value or "
           "--status; export RECIPE ... writes records of finished runs; import FILE ... reads them")  # fmt: skip
    option("--status", choices=STATUSES, help="select only runs with this status")
    option("--yes", action="store_true", help="remove without asking")
    option("--out", type=Path, metavar="FILE",
           help="file of records that export writes or extends (default: results/RECIPE/records.jsonl)")  # fmt: skip
    add_runs_folder(parser)


def run(options: argparse.Namespace) -> int:
    """List, show, remove, export or import runs, and return the exit code."""
    terminal, words = console.output(), list(options.overrides)
    action = words.pop(0) if words and words[0] in ACTIONS else "list"
    if options.out is not None and action != "export":
        raise UserError(f"--out {options.out}: an option of `ghostnoise runs export RECIPE`; leave it out")
    if action in ("export", "import"):
        return (_export if action == "export" else _import)(options, words, terminal)
    filters = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    chosen = _chosen(options.runs, filters, options.status)
    if action == "show":
        if len(names) != 1 or filters:
            raise UserError(f"{' '.join(['show', *words])}: needs exactly one run; give its folder or identity")
        _show(_named(options.runs, names[0]), terminal)
        return 0
    if action == "remove":
        return _remove(_to_remove(options, names, filters, chosen), options.yes, terminal)
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: must be one recipe at most; `ghostnoise runs show RUN` shows a run")
    _list(chosen(names[0] if names else None), terminal)
    if not options.runs.is_dir():
        console.warn(
            f"{options.runs}: not found; give the folder that contains the runs with --runs, or train a recipe"
        )
    return 0


def _all(runs: Path, recipe: str | None) -> list["Found"]:
    from ghostnoise.lab.store import scan

    if recipe is not None:
        _check_recipe(runs, recipe)
    folders = _recipes(runs) if recipe is None else [recipe]
    return [found for name in folders for found in scan.scan(runs / name, lambda text: None, on_read=_loading).values()]


def _loading() -> None:
    """Announce that PyTorch is loaded, which only reading a folder that is not in the index needs."""
    console.loading("runs")


def _recipes(runs: Path) -> list[str]:
    """Return the recipes that have runs."""
    return sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []


def _check_recipe(runs: Path, recipe: str) -> None:
    """Raise a UserError if a recipe has no runs."""
    present = _recipes(runs)
    if recipe not in present:
        remedy = (
            did_you_mean(recipe, [*present, *ACTIONS]) or f"give one of {', '.join(present)}"
            if present
            else "run it first"
        )
        raise UserError(f"{recipe}: {runs} has no runs of this recipe; {remedy}")


def _chosen(runs: Path, filters: list[str], status: str | None) -> Callable[[str | None], list["Found"]]:
    """Return a function that finds the runs of a recipe, or of all recipes, with this status and these settings."""
    from ghostnoise.lab.config.overrides import flat, overridden, values_of

    _, mistakes = overridden({}, filters)
    if mistakes:
        raise UserError("\n".join(mistakes))
    wanted = values_of(filters)

    def fits(found: "Found") -> bool:
        if status not in (None, found.status):
            return False
        settings = flat(found.settings) if wanted else {}
        return all(_same(settings.get(key), wanted[key]) for key in wanted)

    return lambda recipe: [found for found in _all(runs, recipe) if fits(found)]


def _same(found: object, wanted: object) -> bool:
    from ghostnoise.lab.config.overrides import Unset

    return found is None if wanted is Unset.UNSET else found == wanted


def _named(runs: Path, name: str) -> "Found":
    """Return the run with this folder, identity or start of an identity."""
    from ghostnoise.lab.store import scan

    folder = Path(name)
    if folder.is_dir() and folder.resolve().parent.parent == runs.resolve():
        return scan.look(folder, lambda text: None)
    fitting = [found for found in _all(runs, None) if name and found.identity.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UserError(f"{name}: not found in {runs}; `ghostnoise runs` lists all runs")
    raise UserError(f"{name}: matches {len(fitting)} runs; give more of the identity, or the folder")


def _list(founds: list["Found"], terminal: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in ("recipe", "identity", "method"):
        table.add_column(name, no_wrap=True)
    table.add_column("seed", justify="right", no_wrap=True)
    table.add_column("status", min_width=STATUS_WIDTH)
    for name in ("accuracy", "epochs", "seconds", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in founds:
        result = found.result or {}
        accuracy = result.get("accuracy")
        table.add_row(
            found.path.parent.name, found.identity, _method(found), str(found.settings.get("seed", "")),
            ", ".join([found.status, *_marks(found)]), "" if accuracy is None else f"{accuracy:.2f}",
            str(result.get("epochs", "")), f"{result['seconds']:.1f}" if "seconds" in result else "", _age(found),
        )  # fmt: skip
    if founds:
        console.print_table(terminal, table, titles=2, one_line=True)
    for found in founds:
        if found.status == "damaged":
            console.print_line(terminal, found.damage)
    console.print_line(terminal, counted(len(founds), "run"))


def _method(found: "Found") -> str:
    """Return the method with its ghost size, such as GNI-16; empty if the settings do not have it."""
    norm = found.settings.get("norm")
    method = norm.get("method") if isinstance(norm, dict) else None
    if not isinstance(method, str):
        return ""
    size = norm.get("ghost_size") if isinstance(norm, dict) else None
    return method.upper() + (f"-{size}" if size is not None else "")


def _marks(found: "Found") -> list[str]:
    """Return what distinguishes a run from an ordinary one: results of smoke runs and random data mean nothing."""
    train, data = (found.settings.get(name) for name in ("train", "data"))
    marks = ["imported"] if found.imported else []
    if isinstance(train, dict) and train.get("smoke"):
        marks.append("smoke")
    if isinstance(data, dict) and data.get("stand_in"):
        marks.append("random data")
    return marks


def _age(found: "Found") -> str:
    """Return how long ago anything was last written into the folder."""
    folder, latest = str(found.path), 0.0
    for name in (".", "metrics.jsonl", "result.json", "failure.json"):
        with suppress(OSError):
            latest = max(latest, os.stat(os.path.join(folder, name)).st_mtime)
    return duration(time.time() - latest)


def _show(found: "Found", terminal: "Console") -> None:
    """Print the settings that differ from the defaults, the result or failure, and the last line of the metrics."""
    from ghostnoise.lab.config.overrides import flat

    lines = [f"{found.path}: {found.status}"]
    if found.reason:
        lines.append(found.damage if found.status == "damaged" else found.reason)
    lines += [f"  {key} = {value}" for key, value in _not_default(flat(found.settings)).items()]
    for title, record in (("result", found.result), ("failure", found.failure)):
        if record:
            lines += [title, *(f"  {key} = {value}" for key, value in record.items() if key != "traceback")]
            lines += [f"  {line}" for line in str(record.get("traceback", "")).splitlines()]
    metrics = found.metrics()
    if metrics:
        lines += ["last epoch", *(f"  {key} = {value}" for key, value in metrics[-1].items())]
    console.print_line(terminal, "\n".join(lines))


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
    """Return the named runs, or those that match; a damaged run must be named by its full identity."""
    if not filters and options.status is None:
        if not names:
            raise UserError("remove: needs runs; give folders or identities, or select runs with key=value or --status")
        named = {name: _named(options.runs, name) for name in names}
        for name, found in named.items():
            if found.status == "damaged" and Path(name).name != found.identity:
                raise UserError(f"{name}: the run is damaged; give its full identity, {found.identity}, to remove it")
        return list(named.values())
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: must be one recipe at most with key=value or --status; give one or none")
    return [found for found in chosen(names[0] if names else None) if found.status != "damaged"]


def _remove(founds: Iterable["Found"], sure: bool, terminal: "Console") -> int:
    from ghostnoise.lab.store import RunFolder

    founds = {found.path: found for found in founds}.values()
    if not founds:
        console.print_line(terminal, "no runs to remove")
        return 0
    if not sure:
        _list(list(founds), terminal)
        if not _agreed(terminal):
            console.print_line(terminal, "no runs were removed")
            return 0
    for found in founds:
        folder = RunFolder(found.path, lambda text: None)
        folder.own()  # raises if another process owns it
        shutil.rmtree(found.path)
        folder.release()
        console.print_line(terminal, f"removed {found.path}")
    return 0


def _export(options: argparse.Namespace, words: list[str], terminal: "Console") -> int:
    """Write the finished runs of recipes to files of records, and keep the records that the files have."""
    from ghostnoise.lab import records

    names = [Path(word).name.removesuffix(".toml") for word in words]
    if not names:
        raise UserError("export: needs recipes; give their names, such as `ghostnoise runs export demo`")
    if options.out is not None and len(names) > 1:
        raise UserError(
            f"--out {options.out}: a file has the records of one recipe; give one recipe, or leave --out out"
        )
    for name in names:
        _check_recipe(options.runs, name)
        out = options.out or Path("results") / name / "records.jsonl"
        made = records.export(options.runs / name, out, console.warn)
        console.print_line(terminal, f"{counted(made.added, 'new record')}, {made.total} in all; {made.path}")
    return 0


def _import(options: argparse.Namespace, words: list[str], terminal: "Console") -> int:
    """Make run folders from files of records."""
    from ghostnoise.lab import records

    if not words:
        raise UserError("import: needs files of records; give one or more, such as results/demo/records.jsonl")
    files = [(path, records.read(path)) for path in map(Path, words)]
    new, there = records.import_files([(path, each.recipe, each.runs) for path, each in files], options.runs)
    console.print_line(terminal, f"imported {counted(new, 'run')}, {there} already there; {options.runs}")
    return 0


def _agreed(terminal: "Console") -> bool:
    try:
        return terminal.input("remove these runs permanently? [y/N] ", markup=False).strip().lower() in ("y", "yes")
    except EOFError:  # standard input is not interactive
        return False

"""`ghostnoise runs`: list, show, compare, remove, export or import runs, and export their weights."""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.cli import console
from ghostnoise.cli.options import add_runs_folder
from ghostnoise.lab.errors import UserError
from ghostnoise.text import counted, did_you_mean, duration

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.run import Run

PACKAGES = console.LAB
ACTIONS = ("show", "diff", "remove", "export", "import", "export-weights")
STATUS_WIDTH = 12  # where "interrupted," fits
STATUSES = ("finished", "diverged", "failed", "running", "interrupted", "damaged")
LISTED = ("recipe", "identity", "method", "seed", "status", "accuracy", "epochs", "seconds", "age")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(any_word=True)
    option = parser.add_argument
    option("overrides", nargs="*", metavar="WORD",
           help="[RECIPE] [key=value ...] lists runs; show RUN; diff RUN RUN compares settings; remove RUN ..., or "
           "remove [RECIPE] with key=value or --status; export RECIPE ... writes records of finished runs; import FILE "
           "... reads them; export-weights RUN FILE writes a state_dict")  # fmt: skip
    option("--status", choices=STATUSES, help="select only runs with this status")
    option("--columns", type=lambda text: text.split(","), metavar="A,B",
           help="list these columns, such as norm.method,accuracy,environment.torch")  # fmt: skip
    option("--sort", metavar="COLUMN", help="sort the list by this column")
    option("--reverse", action="store_true", help="sort in descending order")
    option("--csv", type=Path, metavar="FILE", help="write the list as CSV, by default with all columns")
    option("--yes", action="store_true", help="remove without asking")
    option("--best", action="store_true", help="export-weights: the best ones, of a run with --keep best")
    option("--out", type=Path, metavar="FILE",
           help="file of records that export writes or extends (default: results/RECIPE/records.jsonl)")  # fmt: skip
    add_runs_folder(parser)


def run(options: argparse.Namespace) -> int:
    """Do what the first word says, and return the exit code."""
    terminal, words = console.output(), list(options.overrides)
    action = words.pop(0) if words and words[0] in ACTIONS else "list"
    if options.out is not None and action != "export":
        raise UserError(f"--out {options.out}: an option of `ghostnoise runs export RECIPE`; leave it out")
    if options.best and action != "export-weights":
        raise UserError("--best: an option of `ghostnoise runs export-weights RUN FILE`; leave it out")
    if action in ("export", "import", "export-weights"):
        {"export": _export, "import": _import, "export-weights": _export_weights}[action](options, words, terminal)
        return 0
    filters = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    chosen = _chosen(options.runs, filters, options.status)
    if action in ("show", "diff"):
        needed = {"show": 1, "diff": 2}[action]
        if len(names) != needed or filters:
            raise UserError(
                f"{' '.join([action, *words])}: needs exactly {counted(needed, 'run')}; give "
                f"{'its folder or identity' if needed == 1 else 'their folders or identities'}"
            )
        found = [_named(options.runs, name) for name in names]
        if action == "show":
            _show(found[0], terminal)
        else:
            _diff(found[0], found[1], terminal)
        return 0
    if action == "remove":
        return _remove(_to_remove(options, names, filters, chosen), options.yes, terminal)
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: must be one recipe at most; `ghostnoise runs show RUN` shows a run")
    runs = chosen(names[0] if names else None)
    if options.columns or options.sort or options.csv:
        _tabulate(runs, options, terminal)
    else:
        _list(runs, terminal)
    if not options.runs.is_dir():
        console.warn(
            f"{options.runs}: not found; give the folder that contains the runs with --runs, or train a recipe"
        )
    return 0


def _all(runs: Path, recipe: str | None) -> list["Run"]:
    from ghostnoise.lab.store import scan

    if recipe is not None:
        _check_recipe(runs, recipe)
    folders = _recipes(runs) if recipe is None else [recipe]
    return [run for name in folders for run in scan.scan(runs / name, lambda text: None, on_read=_loading).values()]


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


def _chosen(runs: Path, filters: list[str], status: str | None) -> Callable[[str | None], list["Run"]]:
    """Return a function that finds the runs of a recipe, or of all recipes, with this status and these settings."""
    from ghostnoise.lab.config.overrides import Unset, flat, overridden, values_of

    _, mistakes = overridden({}, filters)
    if mistakes:
        raise UserError("\n".join(mistakes))
    wanted = {key: None if value is Unset.UNSET else value for key, value in values_of(filters).items()}

    def fits(run: "Run") -> bool:
        if status not in (None, run.status):
            return False
        settings = flat(run.tree) if wanted else {}
        return all(settings.get(key) == wanted[key] for key in wanted)

    return lambda recipe: [run for run in _all(runs, recipe) if fits(run)]


def _named(runs: Path, name: str) -> "Run":
    """Return the run with this folder, identity or start of an identity."""
    from ghostnoise.lab.store import scan

    folder = Path(name)
    if folder.is_dir() and folder.resolve().parent.parent == runs.resolve():
        return scan.look(folder, lambda text: None)
    fitting = [run for run in _all(runs, None) if name and run.identity.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UserError(f"{name}: not found in {runs}; `ghostnoise runs` lists all runs")
    raise UserError(f"{name}: matches {len(fitting)} runs; give more of the identity, or the folder")


def _list(runs: Sequence["Run"], terminal: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in LISTED:
        numeric = name in ("seed", "accuracy", "epochs", "seconds", "age")
        width = STATUS_WIDTH if name == "status" else None
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name != "status", min_width=width)
    for run in runs:
        result = run.result or {}
        accuracy = result.get("accuracy")
        table.add_row(
            run.recipe, run.identity, _method(run), str(run.tree.get("seed", "")),
            ", ".join([run.status, *_marks(run)]), "" if accuracy is None else f"{accuracy:.2f}",
            str(result.get("epochs", "")), f"{result['seconds']:.1f}" if "seconds" in result else "", _age(run),
        )  # fmt: skip
    if runs:
        console.print_table(terminal, table, titles=2, one_line=True)
    for run in runs:
        if run.status == "damaged":
            console.print_line(terminal, run.damage)
    console.print_line(terminal, counted(len(runs), "run"))


def _tabulate(runs: Sequence["Run"], options: argparse.Namespace, terminal: "Console") -> None:
    """Print or write the columns that were asked for."""
    from rich import box
    from rich.table import Table

    from ghostnoise.lab.store import atomic
    from ghostnoise.lab.store.load import FIRST, Runs, write_csv

    found = Runs(runs)
    if options.sort:
        keys = [row[options.sort] for row in found.table([options.sort])]
        known = [at for at, key in enumerate(keys) if key is not None]  # runs without a value are last
        numeric = all(isinstance(keys[at], int | float) for at in known)
        known.sort(key=lambda at: keys[at] if numeric else str(keys[at]), reverse=options.reverse)
        found = Runs(runs[at] for at in [*known, *(at for at, key in enumerate(keys) if key is None)])
    columns = options.columns or (None if options.csv else [*FIRST, "norm.method", "accuracy"])
    rows = found.table(columns)
    if options.csv:
        atomic.make_folder(options.csv.parent, "--csv")
        atomic.write(options.csv, write_csv(rows), "--csv")
        console.print_line(terminal, f"{counted(len(rows), 'run')}; {options.csv}")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    if rows:
        console.print_table(terminal, table, titles=1, one_line=True)
    console.print_line(terminal, counted(len(rows), "run"))


def _method(run: "Run") -> str:
    """Return the method with its ghost size, such as GNI-16; empty if the settings do not have it."""
    norm = run.tree.get("norm")
    method = norm.get("method") if isinstance(norm, dict) else None
    if not isinstance(method, str):
        return ""
    size = norm.get("ghost_size") if isinstance(norm, dict) else None
    return method.upper() + (f"-{size}" if size is not None else "")


def _marks(run: "Run") -> list[str]:
    """Return what distinguishes a run from an ordinary one: results of smoke runs and random data mean nothing."""
    train, data = (run.tree.get(name) for name in ("train", "data"))
    marks = ["imported"] if run.imported else []
    if isinstance(train, dict) and train.get("smoke"):
        marks.append("smoke")
    if isinstance(data, dict) and data.get("stand_in"):
        marks.append("random data")
    return marks


def _age(run: "Run") -> str:
    """Return how long ago anything was last written into the folder."""
    folder, latest = str(run.folder), 0.0
    for name in (".", "metrics.jsonl"):  # other files are replaced, which changes the folder
        with suppress(OSError):
            latest = max(latest, os.stat(os.path.join(folder, name)).st_mtime)
    return duration(time.time() - latest)


def _show(run: "Run", terminal: "Console") -> None:
    """Print the settings that differ from the defaults, the result or failure, and the last line of the metrics."""
    from ghostnoise.lab.config.overrides import flat
    from ghostnoise.lab.store.folder import history

    lines = [f"{run.folder}: {run.status}"]
    if run.status == "damaged":
        lines.append(run.damage)
    lines += [f"  {key} = {value}" for key, value in _not_default(flat(run.tree)).items()]
    for title, record in (("result", run.result), ("failure", run.failure)):
        if record:
            lines += [title, *(f"  {key} = {value}" for key, value in record.items() if key != "traceback")]
            lines += [f"  {line}" for line in str(record.get("traceback", "")).splitlines()]
    if metrics := history(run):
        lines += ["last epoch", *(f"  {key} = {value}" for key, value in metrics[-1].items())]
    for number, environment in enumerate(run.environments, start=1):
        lines += ["environment" + (f" of segment {number}" if len(run.environments) > 1 else "")]
        lines += [f"  {key} = {value}" for key, value in environment.items()]
    console.print_line(terminal, "\n".join(lines))


def _diff(one: "Run", other: "Run", terminal: "Console") -> None:
    """Print the settings, results and environments in which two runs differ."""
    from rich import box
    from rich.table import Table

    from ghostnoise.lab.store.load import row

    first, second = row(one), row(other)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", one.identity, other.identity):
        table.add_column(name)
    differing = [name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name)]
    for name in differing:
        if name != "identity":
            table.add_row(name, *("" if each.get(name) is None else str(each[name]) for each in (first, second)))
    if table.row_count:
        console.print_table(terminal, table)
    settings = sum(name in {**_settings(one), **_settings(other)} for name in differing)
    console.print_line(terminal, f"different settings: {settings}" if settings else "equal settings")


def _settings(run: "Run") -> dict[str, Any]:
    from ghostnoise.lab.config.overrides import flat

    return flat(run.tree)


def _not_default(settings: dict[str, Any]) -> dict[str, Any]:
    from ghostnoise.lab.config.overrides import SECTIONS

    def default(key: str) -> Any:
        section, _, name = key.rpartition(".")
        fields = SECTIONS[section].model_fields if section in SECTIONS else {}
        return fields[name].default if name in fields else None

    return {key: value for key, value in settings.items() if value != default(key)}


def _to_remove(
    options: argparse.Namespace, names: list[str], filters: list[str],
    chosen: Callable[[str | None], list["Run"]],
) -> list["Run"]:  # fmt: skip
    """Return the named runs, or those that match; a damaged run must be named by its full identity."""
    if not filters and options.status is None:
        if not names:
            raise UserError("remove: needs runs; give folders or identities, or select runs with key=value or --status")
        named = {name: _named(options.runs, name) for name in names}
        for name, run in named.items():
            if run.status == "damaged" and Path(name).name != run.identity:
                raise UserError(f"{name}: the run is damaged; give its full identity, {run.identity}, to remove it")
        return list(named.values())
    if len(names) > 1:
        raise UserError(f"{' '.join(names)}: must be one recipe at most with key=value or --status; give one or none")
    return [run for run in chosen(names[0] if names else None) if run.status != "damaged"]


def _remove(runs: Iterable["Run"], sure: bool, terminal: "Console") -> int:
    from ghostnoise.lab.store.folder import RunFolder

    chosen = {run.folder: run for run in runs if run.folder is not None}
    if not chosen:
        console.print_line(terminal, "no runs to remove")
        return 0
    if not sure:
        _list(list(chosen.values()), terminal)
        if not _agreed(terminal):
            console.print_line(terminal, "no runs were removed")
            return 0
    for path in chosen:
        folder = RunFolder(path, lambda text: None)
        folder.own()  # raises if another process owns it
        shutil.rmtree(path)
        folder.release()
        console.print_line(terminal, f"removed {path}")
    return 0


def _export(options: argparse.Namespace, words: list[str], terminal: "Console") -> None:
    """Write the finished runs of recipes to files of records, and keep the records that the files have."""
    from ghostnoise.lab.store import records

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


def _import(options: argparse.Namespace, words: list[str], terminal: "Console") -> None:
    """Make run folders from files of records."""
    from ghostnoise.lab.store import records

    if not words:
        raise UserError("import: needs files of records; give one or more, such as results/demo/records.jsonl")
    new, there = records.import_records([(path, records.load(path)) for path in map(Path, words)], options.runs)
    console.print_line(terminal, f"imported {counted(new, 'run')}, {there} already there; {options.runs}")


def _export_weights(options: argparse.Namespace, words: list[str], terminal: "Console") -> None:
    """Write the weights of a run that are evaluated, as a plain state_dict."""
    if len(words) != 2:
        raise UserError("export-weights: needs a run and a file, such as `runs export-weights 1f2e3d out.pt`")
    from ghostnoise.lab.store import checkpoints

    found, out = _named(options.runs, words[0]), Path(words[1])
    assert found.folder is not None
    state, epoch = checkpoints.weights_of(found.folder, console.warn, best=options.best)
    expected = (found.result or {}).get("weights_sha256")
    if expected and not options.best and checkpoints.weights_sha256(state) != expected:
        raise UserError(f"{found.folder}: its weights are not those of its result; train the run again")
    checkpoints.write_weights(out, state)
    console.print_line(terminal, f"{counted(len(state), 'tensor')} after epoch {epoch}; {out}")


def _agreed(terminal: "Console") -> bool:
    try:
        return terminal.input("remove these runs permanently? [y/N] ", markup=False).strip().lower() in ("y", "yes")
    except EOFError:  # standard input is not interactive
        return False

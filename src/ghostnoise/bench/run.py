"""Measure the rows of a bench one after another, print tables, and write the records as JSON, CSV and a figure."""

import csv
import importlib
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ghostnoise.bench import allocator
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic


def measure(settings: Settings, modes: list[str], arguments: list[str]) -> tuple[list[Record], list[str]]:
    """Measure in each allocator mode; return the records, and a line for everything that is left out.

    `arguments` are those of the command line, for the processes that other allocator modes need.
    """
    bench = importlib.import_module(f"ghostnoise.bench.{settings.bench}")
    rows, left_out = bench.plan(settings)
    if not rows:
        names = ", ".join(row.name for row in bench.plan(replace(settings, only=()))[0])
        raise UserError(f"--only {' '.join(settings.only)}: matches no row; the rows are {names}")
    records: list[Record] = []
    for mode in modes:
        if mode == allocator.active():
            records += _measure_here(bench, rows, settings, left_out)
        else:
            records += _measure_in_new_process(mode, arguments)
    return records, left_out


def save(folder: Path, bench: str, records: list[Record], left_out: list[str]) -> list[Path]:
    """Write the records and their figure, if the bench has one; return the paths."""
    from ghostnoise.bench import figures

    paths = write(folder, bench, records, left_out)
    return [*paths, figures.draw(records, folder / f"{bench}.png")] if bench in figures.HEADINGS else paths


def write(folder: Path, bench: str, records: list[Record], left_out: list[str]) -> list[Path]:
    """Write `<bench>.json` and `<bench>.csv`; return the paths."""
    as_json, as_csv = folder / f"{bench}.json", folder / f"{bench}.csv"
    write_json(as_json, bench, records, left_out, "--out")
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
    writer.writeheader()
    writer.writerows(records)
    atomic.write(as_csv, file.getvalue().encode(), "--out")
    return [as_json, as_csv]


def write_json(path: Path, bench: str, records: list[Record], left_out: list[str], option: str = "--json") -> None:
    """Write the records and what was left out as JSON; errors name the option that gave the path."""
    atomic.make_folder(path.parent, option)
    text = json.dumps({"bench": bench, "left_out": left_out, "records": records}, indent=1) + "\n"
    atomic.write(path, text.encode(), option)


def read(path: Path) -> list[Record]:
    """Read the records of a JSON file."""
    records: list[Record] = json.loads(path.read_text())["records"]
    return records


def _measure_here(bench: ModuleType, rows: list[Any], settings: Settings, left_out: list[str]) -> list[Record]:
    """Measure in this process, and print a table after each row."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ghostnoise.bench import tables
    from ghostnoise.terminal import LiteralConsole, print_table

    console = LiteralConsole()
    for line in (_heading(settings), *left_out):
        console.print(line, soft_wrap=True)
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("row {task.fields[row]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(rows), row="")
        for done, row in enumerate(rows):
            progress.update(task, description=row.name, row=f"{done + 1}/{len(rows)}")
            found = bench.measure(row, settings, lambda share, done=done: progress.update(task, completed=done + share))
            records += found
            print_table(console, tables.row_table(found))
    if summary := tables.summary_table(records):
        print_table(console, summary)
    return records


def _measure_in_new_process(mode: str, arguments: list[str]) -> list[Record]:
    """Measure in a new process: malloc reads its thresholds when a process starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.json")
        command = [sys.executable, "-m", "ghostnoise", *arguments, "--allocator", mode, "--json", str(path)]
        code = subprocess.run(command, env=allocator.environment(mode), check=False).returncode
        if code != 0:
            raise UserError(f"the process for --allocator {mode} ended with exit code {code}; see its message above")
        return read(path)


def _heading(settings: Settings) -> str:
    facts = conditions(settings)
    return (
        f"bench {settings.bench}: {facts['device_name']}, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, ghostnoise {facts['ghostnoise']}, {facts['date']}, "
        f"{allocator.WORDS[facts['allocator']]}"
    )

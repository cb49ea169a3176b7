"""Run `ghostnoise bench`: check the options, measure row after row, print tables, save JSON, CSV and a figure."""

import argparse
import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ghostnoise.bench import allocator
from ghostnoise.bench.files import read, write
from ghostnoise.bench.settings import Record, Settings, conditions

QUICK_ROUNDS = 2


class Refusal(Exception):
    """What was asked for cannot be done; the text says why, and what to do."""


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run one bench in one or both allocator modes; returns the exit code.

    `arguments` are those that `options` was parsed from, for the processes that other modes need.
    """
    try:
        modes = _check(options)
        settings = _settings(options)
        with _threads(options.threads):
            records, left_out = _measure_all(settings, modes, options, arguments)
            if records_only := getattr(options, "records", None):
                write(records_only.parent, records_only.stem, records, left_out)
            else:
                _save(options, records, left_out)
    except Refusal as refusal:
        print(f"ghostnoise bench: {refusal}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> list[str]:
    """The allocator modes to run in, after what can be known to fail before measuring."""
    needed = ("rich", "matplotlib", *(("pydantic", "filelock") if options.bench in ("net", "lab") else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(f"{' and '.join(missing)} missing; pip install 'ghostnoise[lab]'")
    wanted = getattr(options, "allocator", allocator.active())  # bytes do not depend on it
    modes = ["default", "raised"] if wanted == "both" else [wanted]
    for mode in modes:
        if mode != allocator.active() and (why := allocator.missing(mode)):
            raise Refusal(why)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--out {options.out}: cannot be made a folder ({error.strerror}); give another one") from None
    return modes


def _settings(options: argparse.Namespace) -> Settings:
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise Refusal(f"--device {options.device}: torch cannot use it here; try cpu") from None
    formats = ("contiguous", "channels_last") if options.formats == "both" else (options.formats,)
    rounds = getattr(options, "rounds", None)
    return Settings(
        bench=options.bench,
        device=device,
        formats=formats,
        only=tuple(options.only),
        quick=options.quick,
        seconds=getattr(options, "seconds", 0.0),
        rounds=QUICK_ROUNDS if options.quick and rounds is None else rounds,
        batch=getattr(options, "batch", None),
        compiled=getattr(options, "compile", False),
    )


def _measure_all(
    settings: Settings, modes: list[str], options: argparse.Namespace, arguments: list[str]
) -> tuple[list[Record], list[str]]:
    bench = importlib.import_module(f"ghostnoise.bench.{settings.bench}")
    rows, left_out = bench.plan(settings)
    if not rows:
        names = ", ".join(row.name for row in bench.plan(replace(settings, only=()))[0])
        raise Refusal(f"--only {' '.join(settings.only)}: no such row; there are {names}")
    records: list[Record] = []
    for mode in modes:
        if mode == allocator.active():
            records += _measure(bench, rows, settings, left_out)
        else:
            records += _elsewhere(mode, arguments)
    return records, left_out


def _measure(bench: ModuleType, rows: list[Any], settings: Settings, left_out: list[str]) -> list[Record]:
    """Measure in this process, with a table after each row."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ghostnoise.bench import tables

    console = Console(highlight=False)
    for line in (_heading(settings), *left_out):
        console.print(line, markup=False, soft_wrap=True)
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("row {task.fields[row]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(rows), row="")
        for done, row in enumerate(rows):
            progress.update(task, description=row.name, row=f"{done + 1}/{len(rows)}")
            found = bench.measure(row, settings, lambda share, done=done: progress.update(task, completed=done + share))
            records += found
            console.print(tables.row_table(found))
    if summary := tables.summary_table(records):
        console.print(summary)
    return records


def _elsewhere(mode: str, arguments: list[str]) -> list[Record]:
    """Measure in a new process, which malloc starts in `mode`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.json")
        command = [sys.executable, "-m", "ghostnoise", *arguments, "--allocator", mode, "--records", str(path)]
        code = subprocess.run(command, env=allocator.environment(mode), check=False).returncode
        if code != 0:
            raise Refusal(f"the process for --allocator {mode} ended with code {code}; its own message is above")
        return read(path)


def _save(options: argparse.Namespace, records: list[Record], left_out: list[str]) -> None:
    from ghostnoise.bench import figures

    paths = write(options.out, options.bench, records, left_out)
    paths.append(figures.draw(records, options.out / f"{options.bench}.png"))
    print("saved:", " ".join(map(str, paths)))


def _heading(settings: Settings) -> str:
    facts = conditions(settings)
    return (
        f"bench {settings.bench}: {facts['device_name']}, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, ghostnoise {facts['ghostnoise']}, {facts['date']}, "
        f"{allocator.WORDS[facts['allocator']]}"
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

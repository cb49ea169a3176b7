"""`ghostnoise report` and `ghostnoise watch`.

The parsers need no package at all; what a command needs is imported when it runs.
"""

import argparse
import importlib.util
import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from ghostnoise.lab.config.grid import Experiment
    from ghostnoise.lab.report.page import Made

NEEDED = ("plotly", "matplotlib", "scipy")
PORT = 8765


def add(commands: Any) -> None:
    """Add the two parsers."""
    report = commands.add_parser("report", help="tables, figures and a page of an experiment's runs")
    watch = commands.add_parser("watch", help="serve the page of an experiment while it runs, to this machine")
    for parser in (report, watch):
        option = parser.add_argument
        option("recipe", help="a name that `ghostnoise recipes` lists, or a TOML file; with a [grid]")
        option("overrides", nargs="*", metavar="key=value", help="other settings, as the runs were given them")
        option("--runs", type=Path, default=Path(os.environ.get("GHOSTNOISE_RUNS", "runs")), metavar="DIR",
               help="folder of the run folders (default runs/, or GHOSTNOISE_RUNS)")  # fmt: skip
        option("--seeds", type=_seeds, metavar="S", help="these seeds only: 0,1,2 or 0-4")
        option("--only", action="append", default=[], metavar="LABEL", help="this method only; may be repeated")
        option("--smoke", action="store_true", help="report runs that --smoke shrank")
        option("--debug", action="store_true", help="show the traceback of an error")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default out/RECIPE/)")
    report.add_argument("--open", action="store_true", help="open the page in a browser")
    watch.add_argument("--port", type=_port, default=PORT, help=f"0 for any that is free (default {PORT})")


def report(options: argparse.Namespace) -> int:
    """Write the report and print its table; returns the exit code."""
    experiment = _experiment(options)
    from rich.console import Console

    from ghostnoise.lab.report import sections, tables
    from ghostnoise.lab.report.writing import Report

    folder = options.runs / experiment.recipe.name
    out = options.out or Path("out") / experiment.recipe.name
    if out.resolve().is_relative_to(options.runs.resolve()):
        raise UserError(f"--out {out}: lies in {options.runs}, which reports only read; give another folder")
    console, errors = Console(), Console(stderr=True)

    def warn(line: str) -> None:
        errors.print(f"warning: {line}", highlight=False, soft_wrap=True, markup=False)

    made = Report(experiment, folder, _made(options), warn)
    path = made.write(out)
    console.print(tables.terminal(made.findings))
    lines = [f"{each.claim}: {each.verdict}. {each.why}" for each in made.judged]
    for line in [*lines, *sections.notes(made.findings, made.judged), str(path)]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


def watch(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    experiment = _experiment(options)
    from ghostnoise.lab.report.watch import Files, Server
    from ghostnoise.lab.report.writing import SERVED, Report

    folder = options.runs / experiment.recipe.name
    command = _made(options).command

    def make() -> Any:
        from ghostnoise.lab.report.page import Made

        return Report(experiment, folder, Made(command, datetime.now().astimezone()), lambda line: None).file

    with Server(options.port, Files(folder, SERVED, make)) as server:
        print(f"{server.url} shows {folder} as it grows; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended; the runs go on")
    return 0


COMMANDS = {"report": report, "watch": watch}


def _experiment(options: argparse.Namespace) -> "Experiment":
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install 'ghostnoise[lab]'")
    from ghostnoise.lab.config import grid

    return grid.load(
        options.recipe, options.overrides, smoke=options.smoke, seeds=options.seeds, only=tuple(options.only)
    )


def _made(options: argparse.Namespace) -> "Made":
    """The command that makes the same report again."""
    from ghostnoise.lab.report.page import Made

    words = ["ghostnoise", options.command, options.recipe, *options.overrides, "--runs", str(options.runs)]
    words += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    words += [word for label in options.only for word in ("--only", label)]
    words += ["--smoke"] if options.smoke else []
    words += ["--out", str(options.out)] if getattr(options, "out", None) else []
    return Made(shlex.join(words), datetime.now().astimezone())


def _seeds(text: str) -> list[int]:
    """Numbers and ranges, such as 0,2,5-9."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            found += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be seeds such as 0,1,2 or 0-4") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: has no seed; give such as 0,1,2 or 0-4")
    return found


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer from 0 to 65535")
    return int(text)

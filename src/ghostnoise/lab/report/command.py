"""`ghostnoise report` and `ghostnoise watch`.

Building the parsers imports no third-party package; a command imports what it needs when it runs.
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
    from ghostnoise.lab.grid import Experiment
    from ghostnoise.lab.report.page import Provenance

NEEDED = ("plotly", "matplotlib", "scipy")
PORT = 8765


def add(commands: Any) -> None:
    """Add the two parsers."""
    report = commands.add_parser("report", help="write tables, figures and an HTML page of an experiment's runs")
    watch = commands.add_parser("watch", help="serve the HTML page of an experiment on this machine while it runs")
    for parser in (report, watch):
        option = parser.add_argument
        option("recipe", help="a name that `ghostnoise recipes` lists, or a TOML file; with a [grid]")
        option("overrides", nargs="*", metavar="key=value", help="settings that were given to the runs")
        option("--runs", type=Path, default=Path(os.environ.get("GHOSTNOISE_RUNS", "runs")), metavar="DIR",
               help="folder that contains the run folders (default: $GHOSTNOISE_RUNS, or runs/)")  # fmt: skip
        option("--seeds", type=_seeds, metavar="S", help="report only these seeds: 0,1,2 or 0-4")
        option("--only", action="append", default=[], metavar="LABEL", help="report only this method; may be repeated")
        option("--smoke", action="store_true", help="report the runs of --smoke")
        option("--debug", action="store_true", help="show the traceback of an error")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: out/RECIPE/)")
    report.add_argument("--open", action="store_true", help="open the page in a browser")
    watch.add_argument(
        "--port", type=_port, default=PORT, help=f"port of the server; 0 for any free port (default: {PORT})"
    )


def report(options: argparse.Namespace) -> int:
    """Write the report, print its table and return the exit code."""
    experiment = _experiment(options)
    from rich.console import Console

    from ghostnoise.lab.report.files import ExperimentReport

    folder = options.runs / experiment.recipe.name
    out = options.out or Path("out") / experiment.recipe.name
    if out.resolve().is_relative_to(options.runs.resolve()):
        raise UserError(f"--out {out}: is inside {options.runs}, which reports do not change; give another folder")
    console, errors = Console(), Console(stderr=True)

    def warn(line: str) -> None:
        errors.print(f"warning: {line}", highlight=False, soft_wrap=True, markup=False)

    made = ExperimentReport(experiment, folder, _provenance(options), warn)
    path = made.write(out)
    console.print(made.table())
    for line in [*made.lines(), str(path)]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


def watch(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C and return the exit code."""
    experiment = _experiment(options)
    from ghostnoise.lab.report.files import SERVED, ExperimentReport
    from ghostnoise.lab.report.page import Provenance
    from ghostnoise.lab.report.server import CachedFiles, Server

    folder = options.runs / experiment.recipe.name
    command = _provenance(options).command

    def read() -> Any:
        provenance = Provenance(command, datetime.now().astimezone())
        return ExperimentReport(experiment, folder, provenance, lambda line: None).file

    with Server(options.port, CachedFiles(folder, SERVED, read)) as server:
        print(f"{server.url} shows the runs in {folder} while they continue; press Ctrl-C to stop", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nserver stopped; the runs continue")
    return 0


COMMANDS = {"report": report, "watch": watch}


def _experiment(options: argparse.Namespace) -> "Experiment":
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install 'ghostnoise[lab]'")
    from ghostnoise.lab import grid

    return grid.load(
        options.recipe, options.overrides, smoke=options.smoke, seeds=options.seeds, only=tuple(options.only)
    )


def _provenance(options: argparse.Namespace) -> "Provenance":
    """Return the command that makes the same report again, and the time."""
    from ghostnoise.lab.report.page import Provenance

    words = ["ghostnoise", options.command, options.recipe, *options.overrides, "--runs", str(options.runs)]
    words += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    words += [word for label in options.only for word in ("--only", label)]
    words += ["--smoke"] if options.smoke else []
    words += ["--out", str(options.out)] if getattr(options, "out", None) else []
    return Provenance(shlex.join(words), datetime.now().astimezone())


def _seeds(text: str) -> list[int]:
    """Parse numbers and ranges, such as 0,2,5-9."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            found += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be seeds such as 0,1,2 or 0-4") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: contains no seed; give seeds such as 0,1,2 or 0-4")
    return found


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer from 0 to 65535")
    return int(text)

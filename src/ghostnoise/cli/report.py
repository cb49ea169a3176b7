"""`ghostnoise report`: write tables, figures and an HTML page about the runs of an experiment."""

import argparse
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ghostnoise.cli import console
from ghostnoise.cli.options import add_recipe, add_runs_folder, add_selection, selecting_words
from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from ghostnoise.lab.config.grid import Experiment
    from ghostnoise.lab.run import Run

PACKAGES = (*console.LAB, "matplotlib", "scipy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_experiment(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: out/RECIPE/)")
    parser.add_argument(
        "--records", type=Path, metavar="FILE",
        help="report the runs in this file, which `ghostnoise runs export` wrote, instead of those in --runs",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=("report", "paper"), default="report",
        help="paper: only the figure, as the paper draws it, and a table: a panel for each kind of method, bands of "
        "one standard deviation, and dotted lines of batch norm and the best ghost batch norm",
    )  # fmt: skip
    parser.add_argument(
        "--with", action="append", default=[], dest="others", metavar="RECIPE",
        help="with --layout paper: also show this recipe; may be repeated",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the runs of an experiment."""
    add_recipe(parser, " with a [grid]", "the settings that the runs were given")
    add_runs_folder(parser)
    add_selection(parser)
    parser.add_argument("--smoke", action="store_true", help="report the runs of a sweep with --smoke")


def run(options: argparse.Namespace) -> int:
    """Write the report, print its table and return the exit code."""
    experiment = load(options)
    from ghostnoise.lab.report.files import ExperimentReport
    from ghostnoise.lab.report.page import Provenance

    if options.others and options.layout != "paper":
        raise UserError(f"--with {options.others[0]}: an option of --layout paper; add it, or leave --with out")
    out = options.out or Path("out") / experiment.recipe.name
    if out.resolve().is_relative_to(options.runs.resolve()):
        raise UserError(f"--out {out}: must not be inside {options.runs}, which reports only read; give another folder")
    terminal = console.output()
    provenance = Provenance(command_line(options), datetime.now().astimezone())

    def made(experiment: "Experiment") -> ExperimentReport:
        folder, found = _source(options, experiment)
        return ExperimentReport(experiment, folder, provenance, console.warn, found)

    report = made(experiment)
    if options.layout == "paper":
        others = [made(load(argparse.Namespace(**vars(options) | {"recipe": name}))) for name in options.others]
        for path in report.write_paper(out, [each.findings for each in others]):
            console.print_line(terminal, str(path))
        return 0
    path = report.write(out)
    console.print_table(terminal, report.table())
    for line in [*report.lines(), str(path)]:
        console.print_line(terminal, line)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


def _source(options: argparse.Namespace, experiment: "Experiment") -> tuple[Path, dict[str, "Run"] | None]:
    """Return the folder of the runs, or the file of records and the runs in it; `--with` has files beside that one."""
    folder: Path = options.runs / experiment.recipe.name
    if options.records is None:
        if not folder.is_dir():
            console.warn(
                f"{folder}: not found, so there is no run to report; run `ghostnoise sweep {experiment.recipe.words}`, "
                "or give the folder that contains it with --runs"
            )
        return folder, None
    from ghostnoise.lab.store import records

    path: Path = options.records
    if experiment.recipe.name in options.others:
        path = path.parents[1] / experiment.recipe.name / path.name
    read = records.load(path)
    if read.recipe != experiment.recipe.name:
        raise UserError(
            f"--records {path}: has the records of {read.recipe}, not of {experiment.recipe.name}; give another file "
            "or recipe"
        )
    return path, read.runs


def load(options: argparse.Namespace) -> "Experiment":
    """Load the experiment that the options select."""
    from ghostnoise.lab.config import grid

    return grid.load(
        options.recipe, options.overrides, smoke=options.smoke, seeds=options.seeds, only=tuple(options.only),
        variant=options.variant,
    )  # fmt: skip


def command_line(options: argparse.Namespace) -> str:
    """Return the command that makes the same report again."""
    words = ["ghostnoise", options.command, *selecting_words(options), "--runs", str(options.runs)]
    words += ["--layout", "paper"] if getattr(options, "layout", "") == "paper" else []
    words += [word for name in getattr(options, "others", []) for word in ("--with", name)]
    words += ["--records", str(options.records)] if getattr(options, "records", None) else []
    words += ["--out", str(options.out)] if getattr(options, "out", None) else []
    return shlex.join(words)

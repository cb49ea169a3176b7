"""`ghostnoise results`: rebuild the tables, figures and numbers in Markdown files from the records in `results/`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ghostnoise.cli import console, report
from ghostnoise.lab.errors import UserError
from ghostnoise.text import counted

if TYPE_CHECKING:
    from ghostnoise.lab.config.grid import Experiment

PACKAGES = report.PACKAGES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--root", type=Path, default=Path(), metavar="DIR",
        help="folder that contains README.md, docs/ and results/ (default: the current folder)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a file is out of date")


def run(options: argparse.Namespace) -> int:
    """Write the files that are out of date, or list them, and return the exit code."""
    from ghostnoise.lab.report import published

    if not (options.root / published.RESULTS).is_dir():
        raise UserError(f"{options.root}: has no folder {published.RESULTS}; run this from the folder that contains it")
    publisher = published.Publisher(options.root, load, bench_renderers(options.root))
    changes = publisher.changes()
    terminal = console.output()
    for change in changes:
        console.print_line(terminal, f"{'out of date' if options.check else 'wrote'}: {change.path}")
    if not options.check:
        publisher.write(changes)
    verb = "out of date; `ghostnoise results` rebuilds them" if options.check else "written"
    console.print_line(terminal, f"{counted(len(changes), 'file')} {verb}" if changes else "all files are up to date")
    return int(options.check and bool(changes))


class Words(argparse.ArgumentParser):
    """A parser of the arguments in a marker."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, to be reported with the file and the line of the marker."""
        raise UserError(f"{message}; see docs/guides/reports.md for the arguments of generated blocks")


def load(words: list[str]) -> "Experiment":
    """Load the experiment that words select, as `ghostnoise report` does."""
    parser = Words(prog="generated", add_help=False)
    report.add_experiment(parser)
    options, rest = parser.parse_known_args(words)
    if any(word.startswith("-") or "=" not in word for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides += rest
    return report.load(options)


def bench_renderers(root: Path) -> dict[str, Callable[[list[str]], str]]:
    """Return functions that render a block `bench FILE` with its options, `profile FILE`, or `targets FILE`."""
    parser = Words(prog="generated", add_help=False)
    parser.add_argument("file")
    parser.add_argument("--value")
    parser.add_argument("--backend")
    parser.add_argument("--contender", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--number", action="store_true")

    def render_bench(words: list[str]) -> str:
        from ghostnoise.bench.markdown import markdown, single

        options = parser.parse_args(words)
        if options.number:
            return single(root / options.file, options.value, options.only, options.contender)
        return markdown(root / options.file, options.value, options.backend, options.only, options.contender)

    def render_profile(words: list[str]) -> str:
        from ghostnoise.bench.markdown import profile

        return profile(root / parser.parse_args(words).file)

    def render_targets(words: list[str]) -> str:
        from ghostnoise.bench.targets import targets

        return targets(root / parser.parse_args(words).file)

    return {"bench": render_bench, "profile": render_profile, "targets": render_targets}

"""The `ghostnoise` command. Each command is a module of this package with `add_arguments` and `run`.

Only the module of the command that is used is imported, and it imports torch and the packages of the `[lab]` extra
when it runs: `--help` needs neither, and `doctor` works on a base install.
"""

import argparse
import importlib
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from ghostnoise.cli.console import announce, require
from ghostnoise.lab.errors import UserError
from ghostnoise.text import did_you_mean, for_stream, printable
from ghostnoise.version import __version__

MOST_SHOWN = 500  # characters of an unexpected error
GROUPS = {
    "Your own network": {
        "meter": "measure the noise in each layer of a network",
        "advise": "report how strong the noise in a network is, and suggest a ghost size",
        "methods": "list the methods, their layers and their options",
    },
    "Experiments": {
        "recipes": "list the recipes, or print one",
        "data": "list, download or verify data sets",
        "train": "train a recipe, or resume its training",
        "sweep": "run all missing runs of a recipe's grid",
        "runs": "list, show, remove, export or import runs",
        "report": "write tables, figures and an HTML page about the runs of an experiment",
        "watch": "serve the HTML page of an experiment on this machine while it runs",
        "uncertainty": "measure calibration and the detection of shifted inputs, with and without noise",
    },
    "This machine": {
        "doctor": "print versions, the CPU, and what runs the operators",
        "check": "compare operators and layers with float64 on this machine, and time them",
        "bench": "measure time and memory against nn.BatchNorm and other libraries",
    },
    "The documentation": {
        "results": "rebuild the tables, figures and numbers in Markdown files from records",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
START = "A first run, in seconds and without a download: ghostnoise train digits"


# Words that are not commands, and what they may mean.
ELSEWHERE = {
    "help": "--help", "version": "--version", "list": "runs", "ls": "runs", "show": "runs show", "rm": "runs remove",
    "remove": "runs remove", "export": "runs export", "import": "runs import", "download": "data get",
    "get": "data get", "verify": "data verify", "fit": "train", "resume": "train", "benchmark": "bench",
    "measure": "meter",
}  # fmt: skip


# Options that do not exist, and how a recipe's settings are changed instead.
SETTINGS = {
    "--epochs": "train.epochs=", "--batch-size": "train.batch_size=", "--lr": "optim.lr=",
    "--method": "norm.method=", "--norm": "norm.method=", "--ghost-size": "norm.ghost_size=", "--model": "model.name=",
    "--learning-rate": "optim.lr=", "--optimizer": "optim.name=", "--weight-decay": "optim.weight_decay=",
    "--momentum": "optim.momentum=", "--dataset": "data.name=",
}  # fmt: skip
RESUME = "the same command resumes an interrupted run, without an option"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        message = message.replace(", key=value", "")  # which is never required
        if message.endswith("arguments are required: recipe"):
            message += f"; for example {self.prog} demo (`ghostnoise recipes` lists all)"
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, for_stream(f"{self.prog}: {message}{see} {self.prog} --help", sys.stderr) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Errors that the user can correct have the exit code 2, and unexpected ones 70 (EX_SOFTWARE); `--debug` shows their
    tracebacks.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("ghostnoise: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at exit
        return 1
    except Exception as error:
        if "--debug" in arguments:
            raise
        word = next((word for word in arguments if word in COMMANDS), "")
        line = f"{' '.join(['ghostnoise', word]).strip()}: {_line(error)}"
        print(for_stream(line, sys.stderr), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 70


def _run(arguments: list[str]) -> int:
    options = _parse(arguments)
    options.arguments = arguments
    command = importlib.import_module(f"ghostnoise.cli.{options.command}")
    require(getattr(command, "PACKAGES", ()))
    announce(options)
    code: int = command.run(options)
    return code


def _line(error: Exception) -> str:
    """Describe an error: in one line if it is unexpected."""
    if isinstance(error, UserError):
        return "\n".join(map(printable, str(error).split("\n")))
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return (
        f"unexpected error ({type(error).__name__}: {printable(first)[:MOST_SHOWN]}); repeat the command with --debug "
        "for the traceback, and report it if the input is valid"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ghostnoise",
        usage="ghostnoise [-h] [--version] command ...",
        description="Ghost noise for PyTorch: experiments, measurements, set-up.",
        epilog=_groups(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ghostnoise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, prog="ghostnoise", help=argparse.SUPPRESS)
    arguments = arguments or ["--help"]
    used = next((word for word in arguments if not word.startswith("-")), None)
    if used is not None and used not in COMMANDS:
        parser.error(f"unknown command {used!r}: {_suggestion(used)}")
    if used is None and (mistyped := [word for word in arguments if word not in ("-h", "--help", "--version")]):
        meant = did_you_mean(mistyped[0], ("--help", "--version"), cutoff=0.6)
        parser.error(f"unrecognized arguments: {' '.join(mistyped)}{meant and '; ' + meant}")
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, description=f"{description[0].upper()}{description[1:]}.")
        if name == used:  # the others only exist as names
            importlib.import_module(f"ghostnoise.cli.{name}").add_arguments(command)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        command = commands.choices[options.command]
        _take_overrides(command, options, rest, command._option_string_actions)
    return options


def _groups() -> str:
    """Return the list of commands, by group, for the width of the terminal."""
    width = shutil.get_terminal_size().columns - 2
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        for name, about in commands.items():
            lines += textwrap.wrap(f"    {name:<12} {about}", width, subsequent_indent=" " * 17)
        lines.append("")
    return "\n".join([*lines, START, "Options and arguments of a command: ghostnoise COMMAND --help"])


def _suggestion(word: str) -> str:
    """Return what may be meant by an unknown command: another command, or to train a recipe."""
    if word in ELSEWHERE:
        return f"did you mean ghostnoise {ELSEWHERE[word]}?"
    recipes = Path(__file__).parent.parent / "lab" / "recipes"
    if (recipes / f"{word}.toml").is_file():
        return f"it is a recipe; did you mean ghostnoise train {word}?"
    return did_you_mean(word, COMMANDS, cutoff=0.6) or f"the commands are {', '.join(COMMANDS)}"


def _take_overrides(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str], known: Collection[str]
) -> None:
    """Add words that follow an option to the overrides: argparse itself takes only those before it."""
    any_word = getattr(options, "any_word", False)
    if not hasattr(options, "overrides") or any(word.startswith("-") or not (any_word or "=" in word) for word in rest):
        meant = [
            _meant(word, following, known, settings=hasattr(options, "overrides"))
            for word, following in itertools.zip_longest(rest, rest[1:], fillvalue="")
            if word.startswith("--")
        ]
        parser.error("; ".join([f"unrecognized arguments: {' '.join(rest)}", *filter(None, meant)]))
    options.overrides += rest


def _meant(word: str, following: str, known: Collection[str], *, settings: bool) -> str:
    """Return what may be meant by an unknown option: another one, or a setting of the recipe."""
    option, _, value = word.partition("=")
    if option in known:
        return f"write {option} after the command"
    if settings and option in SETTINGS:
        return f"did you mean {SETTINGS[option]}{value or following or '...'}?"
    return RESUME if settings and option == "--resume" else did_you_mean(option, known, cutoff=0.7)

"""Console settings that the commands share: plain lines, warnings on stderr, and a check of installed packages."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ghostnoise.lab.errors import UserError
from ghostnoise.text import install_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LAB = ("pydantic", "rich", "filelock", "sklearn")
"""Packages that every command of the lab imports."""


def require(packages: Iterable[str]) -> None:
    """Raise a `UserError` that names the missing packages, if any, and how to install them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed; run {install_command('lab')}")


def announce(options: argparse.Namespace) -> None:
    """Print that PyTorch is being loaded, which takes seconds, so that a command does not start in silence."""
    light = options.command == "runs" or (options.command == "recipes" and options.recipe is None)
    if not (light or getattr(options, "quiet", False)):
        loading(options.command)


def loading(command: str) -> None:
    """Print that a command is loading PyTorch, unless it is loaded, or another process of the same run prints it."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        line = f"ghostnoise {command}: loading PyTorch, which takes a few seconds, and longer the first time ..."
        print(line, file=sys.stderr, flush=True)


def output() -> "Console":
    """Return the console of standard output."""
    from ghostnoise.terminal import LiteralConsole

    return LiteralConsole()


def print_line(console: "Console", text: str) -> None:
    """Print text as it is: no markup, no highlighting, no line breaks of its own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: "Console", table: "Table", titles: int = 1, one_line: bool = False) -> None:
    """Print a table, or a list if the terminal is too narrow for it; see `terminal.print_table`."""
    from ghostnoise import terminal

    terminal.print_table(console, table, titles, one_line)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    from ghostnoise.terminal import LiteralConsole

    print_line(LiteralConsole(stderr=True), f"warning: {text}")

"""`ghostnoise recipes`: list the recipes, or print one."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from ghostnoise.cli import console

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.config.grid import Experiment

PACKAGES = console.LAB
FIRST = "digits"
TIME_WIDTH = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("recipe", nargs="?", help="the recipe to print (default: list all)")


def run(options: argparse.Namespace) -> int:
    """List the recipes or print one, and return the exit code."""
    if options.recipe is None:
        print_list(console.output())
    else:
        print_recipe(options.recipe, console.output())
    return 0


def print_list(terminal: "Console") -> None:
    """Print a table of all recipes: first those for a CPU, led by the one to start with, then those for a GPU."""
    from rich import box
    from rich.table import Table

    from ghostnoise.lab.config import recipe

    headers = {
        name: recipe.header(recipe.read(name)) for name in sorted(recipe.names(), key=lambda name: name != FIRST)
    }
    for title, on_cpu in (("On a CPU", True), ("On a GPU", False)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column(title, style="bold", no_wrap=True, min_width=max(map(len, headers)))
        table.add_column("what", ratio=1)
        table.add_column("time per run", width=TIME_WIDTH)
        for name, header in headers.items():
            if ("CPU" in header["time"]) == on_cpu:
                table.add_row(name, header["claim"], header["time"])
        terminal.print(table)
    terminal.print(
        "ghostnoise recipes NAME prints a recipe, ghostnoise sweep NAME runs its whole\n"
        "grid, and ghostnoise train NAME trains a single run.",
        highlight=False,
    )


def print_recipe(name: str, terminal: "Console") -> None:
    """Print the text of a recipe, its identity and the size of its grid."""
    from rich.syntax import Syntax

    from ghostnoise.lab.config import grid, recipe

    made = recipe.load(name)
    terminal.print(Syntax(made.text, "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print_line(
        terminal,
        f"identity {made.identity} as written; the identity of a run also covers its device and number of processes",
    )
    if "grid" in made.plan:
        console.print_line(terminal, _extent(grid.load(name)))


def _extent(experiment: "Experiment") -> str:
    """Describe how many runs a sweep has."""
    cells, seeds = Counter(cell.method for cell in experiment.cells()), len(experiment.seeds)
    tuned = sum(count > 1 for count in cells.values()) if experiment.select else 0
    line = f"runs of a sweep: {(sum(cells.values()) + tuned) * seeds}; methods: {len(cells)}; seeds: {seeds}"
    return f"{line}; test runs of the best cell of each tuned method: {tuned * seeds}" if tuned else line

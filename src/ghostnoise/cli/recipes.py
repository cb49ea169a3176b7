"""`ghostnoise recipes`: list the recipes, or print one."""

import argparse
import tomllib
from collections import Counter
from typing import TYPE_CHECKING

from ghostnoise.cli import console
from ghostnoise.cli.options import add_variant
from ghostnoise.lab.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ghostnoise.lab.config.grid import Experiment

PACKAGES = console.LAB
FIRST = "digits"
TIME_WIDTH = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("recipe", nargs="?", help="the recipe to print (default: list all)")
    add_variant(parser, "describe this variant of the recipe")


def run(options: argparse.Namespace) -> int:
    """List the recipes or print one, and return the exit code."""
    if options.recipe is not None:
        print_recipe(options.recipe, console.output(), options.variant)
    elif options.variant is None:
        print_list(console.output())
    else:
        from ghostnoise.lab.config import recipe

        having = ", ".join(recipe.having_variant(options.variant)) or "none"
        raise UserError(f"--variant {options.variant}: needs a recipe; the recipes that have this variant are {having}")
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
        console.print_table(terminal, table)
    terminal.print(
        "ghostnoise recipes NAME prints a recipe, ghostnoise sweep NAME runs its whole\n"
        "grid, and ghostnoise train NAME trains a single run. With --variant released,\n"
        "recipes with a section [variants.released] follow the authors' released code.",
        highlight=False,
    )


def print_recipe(name: str, terminal: "Console", variant: str | None = None) -> None:
    """Print the text of a recipe, all settings if it extends another, its identity and the size of its grid.

    All but the text are those of the variant.
    """
    from rich.syntax import Syntax

    from ghostnoise.lab.config import grid, own, recipe
    from ghostnoise.lab.config.overrides import flat, spelled

    made = recipe.load(name, variant=variant)
    terminal.print(Syntax(made.text, "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    if "extends" in tomllib.loads(made.text):
        pairs = flat(made.settings.model_dump(exclude_none=True)).items()
        console.print_line(terminal, f"all settings: {', '.join(f'{key}={spelled(value)}' for key, value in pairs)}\n")
    console.print_line(
        terminal,
        f"identity {made.identity} as written; the identity of a run also covers its device and number of processes",
    )
    parts = {section: getattr(made.settings, section).name for section in ("model", "data", "optim")}
    if mine := [f"{section}.name={name}" for section, name in parts.items() if own.named(name)]:
        console.print_line(terminal, f"the identity holds name and args of {' and '.join(mine)}, but not the code")
    if "grid" in made.plan:
        console.print_line(terminal, _extent(grid.load(name, variant=variant)))


def _extent(experiment: "Experiment") -> str:
    """Describe how many runs a sweep has."""
    runs = experiment.runs()
    seeds = {run.label: len(experiment.seeds_of(run.label)) for run in runs}
    cells = Counter(label for label, _ in dict.fromkeys((run.label, run.at) for run in runs))
    tests = sum(seeds[label] for label, count in cells.items() if count > 1) if experiment.select else 0
    several = " or ".join(map(str, dict.fromkeys(seeds.values())))
    line = f"runs of a sweep: {len(runs) + tests}; methods: {len(cells)}; seeds: {several}"
    return f"{line}; test runs of the best cell of each tuned method: {tests}" if tests else line

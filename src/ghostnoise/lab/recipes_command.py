"""What `ghostnoise recipes` prints: all recipes, or one of them."""

from collections import Counter

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from ghostnoise.lab.config import grid, recipe

FIRST = "digits"
TIME_WIDTH = 18


def run(name: str | None, console: Console) -> int:
    """List the recipes, or print the one that is called `name`; returns the exit code."""
    if name is None:
        _list(console)
    else:
        _show(name, console)
    return 0


def _list(console: Console) -> None:
    """CPU-sized ones come first, and of these the one to start with."""
    headers = {
        name: recipe.header(recipe.read(name)) for name in sorted(recipe.names(), key=lambda name: name != FIRST)
    }
    for title, on_cpu in (("On a CPU", True), ("On a GPU", False)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column(title, style="bold", no_wrap=True, min_width=max(map(len, headers)))
        table.add_column("what", ratio=1)
        table.add_column("time of a run", width=TIME_WIDTH)
        for name, header in headers.items():
            if ("CPU" in header["time"]) == on_cpu:
                table.add_row(name, header["claim"], header["time"])
        console.print(table)
    console.print(
        "ghostnoise recipes NAME prints one, ghostnoise sweep NAME runs all of it, and\nghostnoise train NAME one row.",
        highlight=False,
    )


def _show(name: str, console: Console) -> None:
    made = recipe.load(name)
    console.print(Syntax(made.text, "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print(
        f"identity {made.identity} as written; that of a run has the device and the number of processes in it too",
        highlight=False,
        soft_wrap=True,
    )
    if "grid" in made.plan:
        console.print(_extent(grid.load(name)), highlight=False, soft_wrap=True)


def _extent(experiment: grid.Experiment) -> str:
    """How many runs a sweep is."""
    cells, seeds = Counter(cell.method for cell in experiment.cells()), len(experiment.seeds)
    tuned = sum(count > 1 for count in cells.values()) if experiment.select else 0
    line = f"runs of a sweep: {(sum(cells.values()) + tuned) * seeds}; methods: {len(cells)}; seeds: {seeds}"
    return f"{line}; runs that test the best of a method: {tuned * seeds}" if tuned else line

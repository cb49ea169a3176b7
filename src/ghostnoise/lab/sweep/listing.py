"""What a sweep would run, without running anything."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from ghostnoise.lab.config import plan
from ghostnoise.lab.config.grid import Experiment
from ghostnoise.lab.config.plan import Point
from ghostnoise.lab.store import scan
from ghostnoise.lab.store.scan import Found
from ghostnoise.lab.sweep import machine
from ghostnoise.lab.sweep.run import OVER, Options
from ghostnoise.version import NUMERICS


def show(experiment: Experiment, options: Options) -> None:
    """Print counts, and a table of cells with the seeds that are done and those that are missing."""
    resolve = machine.resolver(options.data, options.engine)
    folder = options.runs / experiment.recipe.name
    found = scan.scan(folder, options.warn, NUMERICS)
    points = plan.first_points(experiment, resolve)
    results = {
        point.key: result
        for point in points
        if point.identity in found and (result := found[point.identity].result) is not None
    }
    winners = plan.winners(experiment, points, results)
    tests = plan.test_points(experiment, winners, resolve)
    if not options.quiet:
        options.console.print(_table([*points, *tests], found))
    done = sum(_over(point, found) for point in (*points, *tests))
    text = f"{len(points) + len(tests) - done} to run, {done} done; {folder}"
    tuned = {experiment.group(point.cell) for point in points if point.stage == "tune"}
    if later := len(tuned - set(winners)) * len(experiment.seeds):
        text += f"; then up to {later} tests of what is tuned best"
    options.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _over(point: Point, found: dict[str, Found]) -> bool:
    return point.identity in found and found[point.identity].status in OVER


def _table(points: Iterable[Point], found: dict[str, Found]) -> Table:
    rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for point in points:
        done, missing = rows.setdefault((point.stage, point.cell.name), ([], []))
        status = found[point.identity].status if point.identity in found else "missing"
        note = f" ({status})" if status not in ("finished", "missing") else ""
        (done if status in OVER else missing).append(f"{point.seed}{note}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "cell", "seeds done", "seeds missing"):
        table.add_column(name)
    for (stage, cell), (done, missing) in rows.items():
        table.add_row(stage, cell, " ".join(done), " ".join(missing))
    return table

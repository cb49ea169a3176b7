"""`ghostnoise bench recipe`: a training step of each method of a recipe, as a ratio to its baseline."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ghostnoise.bench.layers import synchronizer, times
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.lab import models
from ghostnoise.lab.config import grid
from ghostnoise.lab.data import catalog
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.run import Run
from ghostnoise.lab.train.session import PRECISIONS, build_optimizer

WARMUP = 3  # rounds


@dataclass(frozen=True)
class Row:
    """A run of each cell of a recipe, the baseline first."""

    recipe: str
    cells: tuple[Run, ...]

    @property
    def name(self) -> str:
        """Return the name of the row in tables."""
        return f"{self.recipe} batch {self.cells[0].settings.train.batch_size}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a batch."""
        settings = self.cells[0].settings
        return settings.train.batch_size, *catalog.find(settings.data.name).shape


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return a row with the cells of the recipe, and nothing that is left out."""
    experiment = grid.load(settings.recipe, list(settings.overrides), smoke=settings.quick)
    cells = list({run.cell: run for run in reversed(experiment.runs())}.values())[::-1]
    baseline = experiment.report.baseline or cells[0].label
    first = [run for run in cells if run.label == baseline]
    if len(first) != 1:
        raise UserError(
            f"recipe {settings.recipe}: its baseline, the method {baseline!r}, must be one cell, and has {len(first)}; "
            "give one value for each axis, such as optim.lr=0.1, or choose another recipe"
        )
    name = cells[0].settings.data.name
    if name == "imagefolder":
        raise UserError(f"recipe {settings.recipe}: its images have no fixed shape; choose another recipe")
    rows = [Row(experiment.recipe.name, (*first, *(run for run in cells if run not in first)))]
    return [row for row in rows if settings.selects(row.name)], []


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time a training step of each cell, and return a record for each.

    `ratio_paired` is the median of the ratios to the baseline's step of the same round, and `ratio_low` to `ratio_high`
    its 95 % interval.
    """
    synchronize = synchronizer(settings.device)
    clock = time.process_time if settings.cpu_time else time.perf_counter
    taken: dict[str, list[float]] = {run.cell: [] for run in row.cells}
    steps = {run.cell: _timed(training_step(run, settings), synchronize, clock, taken[run.cell]) for run in row.cells}
    length = Length(settings.seconds, settings.rounds, WARMUP)
    timings = interleave(steps, length, synchronize=synchronize, on_progress=on_progress, clock=clock)
    baseline, first = row.cells[0].cell, row.cells[0].settings
    shape = "x".join(map(str, row.shape))
    shared = {"bench": "recipe", "row": row.name, "shape": shape, "memory_format": "contiguous"}
    records = []
    for name, timing in timings.items():
        pairs = zip(taken[name][WARMUP:], taken[baseline][WARMUP:], strict=True)
        ratios = sorted(own / base for own, base in pairs)
        low, high = median_interval(ratios)
        records.append(
            shared
            | {"contender": name, "kind": "torch" if name == baseline else "ours"}
            | times(timing, timings[baseline])
            | {"ratio_paired": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
            | {"clock": "CPU time" if settings.cpu_time else "elapsed time"}
            | conditions(settings)
            | {"dtype": str(PRECISIONS.get(first.train.amp, torch.float32)).removeprefix("torch.")}
        )
    return records


def training_step(cell: Run, settings: Settings) -> Callable[[], None]:
    """Return a training step with the network, optimizer, batch size and precision of a cell, on random inputs."""
    entry = catalog.find(cell.settings.data.name)
    generator = torch.Generator().manual_seed(0)
    count = cell.settings.train.batch_size
    inputs = torch.randn((count, *entry.shape), generator=generator).to(settings.device)
    labels = torch.randint(entry.classes, (count,), generator=generator).to(settings.device)
    torch.manual_seed(0)
    model = models.build(cell.settings.model, cell.settings.norm, entry.shape, entry.classes).to(settings.device)
    optimizer = build_optimizer(model, cell.settings.optim)
    precision = PRECISIONS.get(cell.settings.train.amp)

    def run() -> None:
        with torch.autocast(settings.device.type, precision, enabled=precision is not None):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of sorted independent values, between two of them; NaN below n = 6."""
    n = len(ordered)
    outside, tail = -1, 0.0  # the interval leaves out this many values on each side, and one more
    while tail + math.comb(n, outside + 1) / 2**n <= 0.025:
        outside += 1
        tail += math.comb(n, outside) / 2**n
    if outside < 0:
        return math.nan, math.nan
    return ordered[outside], ordered[n - 1 - outside]


def _timed(
    run: Callable[[], None], synchronize: Callable[[], object], clock: Callable[[], float], taken: list[float]
) -> Callable[[], None]:
    def timed() -> None:
        before = clock()
        run()
        synchronize()
        taken.append(clock() - before)

    return timed

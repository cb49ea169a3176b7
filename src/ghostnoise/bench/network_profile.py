"""The parts of training steps, from PyTorch's profiler; a part of `ghostnoise bench profile`.

The rows are a network that is compiled, the recipe `table4` in bf16, and ghost noise that is compiled, each beside the
step that its target in docs/performance.md is relative to.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.profiler_util import FunctionEvent

from ghostnoise.bench import net, recipe
from ghostnoise.bench import rows as shapes
from ghostnoise.bench.contenders import Compiled, Contender, normalizers
from ghostnoise.bench.parts import Divided, records, with_rest
from ghostnoise.bench.profiler import profiled
from ghostnoise.bench.settings import Record, Settings
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.lab.config import grid

CONVOLUTIONS, PRODUCTS, NORMALIZATION = "convolutions", "matrix products", "normalization"
OPTIMIZER, GENERATED, REST = "optimizer", "generated code", "rest"
PARTS = {
    "convolution": CONVOLUTIONS,
    "aten::mm": PRODUCTS,
    "aten::addmm": PRODUCTS,
    "ghostnoise::": NORMALIZATION,
    "_Normalize": NORMALIZATION,  # the autograd function of this library, and its backward pass
    "aten::native_batch_norm": NORMALIZATION,
    "Optimizer.step": OPTIMIZER,
}
NETWORK = "resnet-20"
METHODS = {"nn.BatchNorm2d compiled": net.BATCH_NORM, "GNI-16 compiled": net.METHODS["GNI-16"]}
RECIPE, SETTINGS, CELLS = "table4", ["optim.lr=0.1", "train.amp=bf16"], ["baseline", "GNI-16"]
LAYERS = ((1024, 1024), (256, 512, 4, 4))
LAYER = "BN+GNI-32"

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Steps that are profiled by name; the first one is what the others are compared with."""

    name: str
    shape: tuple[int, ...]
    steps: Callable[[Settings], dict[str, Step]]
    memory_format: str = "contiguous"


def rows(settings: Settings) -> list[Row]:
    """Return all rows."""
    networks = [row for row in net.rows(settings) if row.network == NETWORK and row.memory_format == "contiguous"]
    found = [Row(row.name, row.shape, partial(_compiled_network, row)) for row in networks]
    chosen = grid.load(RECIPE, SETTINGS, only=CELLS, smoke=settings.quick)
    row = recipe.Row(chosen.recipe.name, tuple(chosen.cells()))
    found.append(Row(f"{row.name} bf16", row.shape, partial(_recipe, row)))
    layers = map(shapes.Row, ((64, 32),) if settings.quick else LAYERS)
    found += [Row(f"{layer.name} compiled", layer.shape, partial(_compiled_layer, layer)) for layer in layers]
    return found if "contiguous" in settings.formats else []


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Profile each step of a row in interleaved rounds, and return a record for each part."""
    torch.compiler.reset()  # earlier rows count towards the limit of recompilations
    found = {name: Profiled(step) for name, step in row.steps(settings).items()}
    length = Length(settings.seconds, settings.rounds, warmup=2)  # the first one compiles
    timings = interleave({name: each.run for name, each in found.items()}, length, on_progress=on_progress)
    steps: list[Divided] = []
    for name, each in found.items():
        medians = {
            part: statistics.median(taken[part] for taken in each.taken[length.warmup :]) for part in each.taken[-1]
        }
        total = medians.pop("total")
        steps.append(Divided(name, "ours" if steps else "torch", "", total, with_rest(total, medians, REST)))
    return records(row, "network", steps, min(timing.n for timing in timings.values()))


def _compiled_network(row: net.Row, settings: Settings) -> dict[str, Step]:
    batch = net.draw(row, settings.device)
    return {name: net.step(row, norm, batch, compiled=True) for name, norm in METHODS.items()}


def _recipe(row: recipe.Row, settings: Settings) -> dict[str, Step]:
    return {cell.method: recipe.training_step(cell, settings) for cell in row.cells}


def _compiled_layer(row: shapes.Row, settings: Settings) -> dict[str, Step]:
    x, dy = row.draw(settings.device)
    layer = normalizers(row)[LAYER]
    compiled = Compiled(layer)
    return {
        LAYER: Contender(LAYER, "ours", layer).step(x, dy),
        f"{LAYER} compiled": Contender(LAYER, "ours", compiled).step(x, dy),
    }


class Profiled:
    """A step under PyTorch's profiler; `taken` has the milliseconds of each run and of its parts."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.taken: list[dict[str, float]] = []

    def run(self) -> None:
        """Run the step."""
        seconds = 0.0

        def timed() -> None:
            nonlocal seconds
            begun = time.perf_counter()
            self.step()
            seconds = time.perf_counter() - begun

        parts = dict.fromkeys((*dict.fromkeys(PARTS.values()), GENERATED), 0.0)
        for event in profiled(timed).events():
            if part := part_of(event):
                parts[part] += event.self_cpu_time_total / 1e3
        self.taken.append({"total": 1e3 * seconds} | parts)


def part_of(event: FunctionEvent) -> str | None:
    """Return the part that the time of an event, without that of the events inside of it, belongs to.

    A part includes the operators that it calls. Inductor's kernels are not events: their time is that of the call of
    the graph, with the memory that it allocates.
    """
    if "CompiledFxGraph" in event.name:
        return GENERATED
    inside: FunctionEvent | None = event
    while inside is not None:
        for text, part in PARTS.items():
            if inside.name.startswith(text) or (text == "convolution" and text in inside.name):
                return part
        inside = inside.cpu_parent
    return None

"""The parts of a training step of a compiled network, from PyTorch's profiler; a part of `ghostnoise bench profile`."""

import statistics
import time
from collections.abc import Callable

import torch
from torch.autograd.profiler_util import FunctionEvent

from ghostnoise.bench import net
from ghostnoise.bench.parts import Divided, records, with_rest
from ghostnoise.bench.profiler import profiled
from ghostnoise.bench.settings import Record, Settings
from ghostnoise.bench.timing import Length, interleave

CONVOLUTIONS, NORMALIZATION, GENERATED, REST = "convolutions", "ghostnoise ops", "generated code", "rest"
METHODS = {"nn.BatchNorm2d compiled": net.BATCH_NORM, "GNI-16 compiled": net.METHODS["GNI-16"]}


def measure(row: net.Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Profile a training step with each method in interleaved rounds, and return a record for each part."""
    torch.compiler.reset()  # earlier rows count towards the limit of recompilations
    batch = net.draw(row, settings.device)
    found = {name: Profiled(net.step(row, norm, batch, compiled=True)) for name, norm in METHODS.items()}
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


class Profiled:
    """A step under PyTorch's profiler; `taken` has the milliseconds of each run and of its parts."""

    def __init__(self, step: Callable[[], object]) -> None:
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

        parts = dict.fromkeys((CONVOLUTIONS, NORMALIZATION, GENERATED), 0.0)
        for event in profiled(timed).events():
            if part := part_of(event):
                parts[part] += event.self_cpu_time_total / 1e3
        self.taken.append({"total": 1e3 * seconds} | parts)


def part_of(event: FunctionEvent) -> str | None:
    """Return the part that the time of an event, without that of the events inside of it, belongs to.

    Convolutions and the ops of this library include the operators that they call. Inductor's kernels are not events:
    their time is that of the call of the graph, with the memory that it allocates.
    """
    if "CompiledFxGraph" in event.name:
        return GENERATED
    inside: FunctionEvent | None = event
    while inside is not None:
        if "convolution" in inside.name:
            return CONVOLUTIONS
        if inside.name.startswith("ghostnoise::"):
            return NORMALIZATION
        inside = inside.cpu_parent
    return None

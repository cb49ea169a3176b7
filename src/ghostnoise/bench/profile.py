"""`ghostnoise bench profile`: the time of a layer's forward and backward, and of its operators alone.

The operators are those of this library and the random draws. They are called with the arguments that they have in a
step of the layer, each as often as there. The rest of the step is that of checks in Python, of autograd, and at the
general level of the operations on tables.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ghostnoise.bench.contenders import contenders
from ghostnoise.bench.layers import check_contenders, synchronizer
from ghostnoise.bench.rows import SMALL, Row
from ghostnoise.bench.settings import Record, Settings, conditions, plain
from ghostnoise.bench.tables import PART, REST, STEP
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.torch_private import DispatchMode

DEFAULT = ("BN", "GBN-32", "XBN-32", "BN+GNI-32")
ROWS = (Row(SMALL), Row((256, 512)), Row((1024, 1024)), Row((256, 512, 4, 4)))
QUICK = (Row(SMALL), Row((64, 16)))

Step = Callable[[], object]


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line if the operators run in plain PyTorch."""
    rows = [Row(row.shape, form if row.images else "contiguous") for row in (QUICK if settings.quick else ROWS)
            for form in (settings.formats if row.images else ("",))]  # fmt: skip
    check_contenders(rows, settings)
    return [row for row in rows if settings.selects(row.name)], plain(settings.device)


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time layers, their operators, and the layer of `torch.nn`, in interleaved rounds."""
    torch.manual_seed(0)
    x, dy = row.draw(settings.device)
    found = contenders(row, settings.device, only=settings.contenders or DEFAULT)
    layers = {each.name: each.step(x, dy) for each in found}
    alone = {name: operators(step) for name, step in layers.items()}
    steps = {(name, STEP): step for name, step in layers.items()}
    steps |= {(name, part): step for name, parts in alone.items() for part, step in parts.items()}
    timings = interleave(
        {"|".join(key): step for key, step in steps.items()},
        Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2),
        synchronize=synchronizer(settings.device),
        on_progress=on_progress,
    )
    shared = {"bench": "profile", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    shared |= {"scope": "layer"} | conditions(settings)
    baseline = timings[f"{found[0].name}|{STEP}"]
    records = []
    for each in found:
        total = timings[f"{each.name}|{STEP}"].p50
        parts = {part: timings[f"{each.name}|{part}"].p50 for part in alone[each.name]}
        lines = [(STEP, STEP, total), *((PART, *pair) for pair in parts.items())]
        lines += [(PART, REST, total - sum(parts.values()))] if parts else []
        about = shared | {"contender": each.name, "kind": each.kind, "n": baseline.n}
        records += [
            about | {"level": level, "part": part, "p50_ms": taken, "ratio_p50": taken / baseline.p50}
            for level, part, taken in lines
        ]
    return records


def operators(step: Step) -> dict[str, Step]:
    """Return the operators of a step by name, each of which runs all of its calls with the same arguments."""
    calls: dict[str, list[Step]] = {}

    class Recorded(DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            run = partial(function, *args, **(kwargs or {}))
            if function.namespace == "ghostnoise" or torch.Tag.nondeterministic_seeded in function.tags:
                calls.setdefault(function.name().partition("::")[2].partition(".")[0], []).append(run)
            return run()

    with Recorded():
        step()
    return {name: partial(_run, runs) for name, runs in calls.items()}


def _run(steps: list[Step]) -> None:
    for step in steps:
        step()

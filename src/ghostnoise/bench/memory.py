"""`ghostnoise bench memory`: what a layer holds for its backward, and the peak of a forward and backward."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from ghostnoise.bench import peers
from ghostnoise.bench.contenders import Contender, contenders, usable_backends
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes two lines to stderr every time it is used


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """The rows, and a line for everything that is left out of them."""
    return rows(settings), [*usable_backends(settings.device)[1], *peers.absent()]


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Count the bytes of every contender on a row; a record for each.

    `saved_x` and `saved_tables` are what autograd was given to save: x, and everything else that was made for it.
    `held` is everything that was allocated in the forward, y aside, and is still there after it: also what is held by
    other means, such as drawn indices. `peak` is the most that was allocated at a time, x and its upstream gradient
    aside. What a library allocates without PyTorch's allocator is not seen.
    """
    torch.manual_seed(0)
    found = contenders(row, usable_backends(settings.device)[0], settings.device)
    found = [contender for contender in found if contender.most_rounds is None]  # the loop has a graph node per sample
    x, dy = row.draw(settings.device)
    counted = []
    for done, contender in enumerate(found, 1):
        contender.step(x, dy)()  # what is made once, and kept, is not this batch's
        saved_x, saved_tables = saved(contender, x)
        counts = {"saved_x": saved_x, "saved_tables": saved_tables, "held": held(contender, x)}
        counted.append(counts | {"peak": peak(contender, x, dy)})
        on_progress(done / len(found))
    shared = {"bench": "memory", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    table, baseline = 4 * row.shape[0] * row.channels, counted[0]
    return [
        shared
        | {"contender": contender.method, "kind": contender.kind, "backend": contender.backend or ""}
        | {f"{key}_bytes": value for key, value in counts.items()}
        | {"x_bytes": x.nbytes, "tables_saved": counts["saved_tables"] / table, "tables_held": counts["held"] / table}
        | {"ratio_kept": _kept(counts) / _kept(baseline), "ratio_peak": counts["peak"] / baseline["peak"]}
        | conditions(settings)
        for contender, counts in zip(found, counted, strict=True)
    ]


def saved(contender: Contender, x: Tensor) -> tuple[int, int]:
    """Bytes that autograd saves: of x, and of all else but parameters and buffers; each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with contender.running(), saved_tensors_hooks(pack, lambda tensor: tensor):
        y = contender.layer(x)
    state = [*contender.layer.parameters(), *contender.layer.buffers()]
    for tensor in state:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    of_x = storages.pop(x.untyped_storage().data_ptr(), 0)
    del y  # alive until here, so that no storage of the graph could be freed and its address given again
    return of_x, sum(storages.values())


def held(contender: Contender, x: Tensor) -> int:
    """Bytes that were allocated in the forward and are held by the graph of y after it."""
    kept: list[Tensor] = []

    def forward() -> None:
        with contender.running():
            kept.append(contender.layer(x))

    return sum(allocations(forward)) - kept[0].untyped_storage().nbytes()


def peak(contender: Contender, x: Tensor, dy: Tensor) -> int:
    """The most bytes that a forward and backward have allocated at a time."""
    now = most = 0
    for size in allocations(contender.step(x, dy)):
        now += size
        most = max(most, now)
    return most


def allocations(run: Callable[[], object]) -> list[int]:
    """The bytes that `run` takes from PyTorch's allocator, and gives back (negative), in this order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    events = [event for event in trace if event.get("name") == "[memory]"]
    return [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: float(event["ts"]))]


def _kept(counts: dict[str, int]) -> int:
    return counts["saved_x"] + counts["held"]

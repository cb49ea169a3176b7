"""`ghostnoise bench memory`: bytes that a layer keeps for its backward, and the peak of forward + backward."""

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
from ghostnoise.bench.contenders import Contender, contenders
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions, plain


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    return rows(settings), [*plain(settings.device), *peers.absent()]


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Count the bytes of every contender on a row, and return a record for each.

    `saved_x` and `saved_tables` are what autograd saves: x, and all other tensors except parameters and buffers. `held`
    is everything that the forward allocated, except y, and that still exists after it, including tensors that autograd
    does not save, such as drawn indices. `peak` is the maximum of allocated bytes, without x and its upstream gradient.
    Memory that a library allocates without PyTorch's allocator is not counted.
    """
    torch.manual_seed(0)
    found = [each for each in contenders(row, settings.device) if each.most_rounds is None]  # a loop has many nodes
    x, dy = row.draw(settings.device)
    counted = []
    for done, contender in enumerate(found, 1):
        contender.step(x, dy)()  # allocations that are made once and kept do not count
        saved_x, saved_tables = saved(contender, x)
        counts = {"saved_x": saved_x, "saved_tables": saved_tables, "held": held(contender, x)}
        counted.append(counts | {"peak": peak(contender, x, dy)})
        on_progress(done / len(found))
    shared = {"bench": "memory", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    table, baseline = 4 * row.shape[0] * row.channels, counted[0]
    return [
        shared
        | {"contender": contender.name, "kind": contender.kind}
        | {f"{key}_bytes": value for key, value in counts.items()}
        | {"x_bytes": x.nbytes, "tables_saved": counts["saved_tables"] / table, "tables_held": counts["held"] / table}
        | {"ratio_kept": _kept(counts) / _kept(baseline), "ratio_peak": counts["peak"] / baseline["peak"]}
        | conditions(settings)
        for contender, counts in zip(found, counted, strict=True)
    ]


def saved(contender: Contender, x: Tensor) -> tuple[int, int]:
    """Return the bytes that autograd saves of x, and of all else except parameters and buffers; each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = contender.layer(x)
    state = [*contender.layer.parameters(), *contender.layer.buffers()]
    for tensor in state:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del y  # kept alive until here, so that no storage of the graph is freed and its address reused
    of_x = storages.pop(x.untyped_storage().data_ptr(), 0)
    return of_x, sum(storages.values())


def held(contender: Contender, x: Tensor) -> int:
    """Return the bytes that the forward allocated and that the graph of y still holds."""
    kept: list[Tensor] = []
    return sum(allocations(lambda: kept.append(contender.layer(x)))) - kept[0].untyped_storage().nbytes()


def peak(contender: Contender, x: Tensor, dy: Tensor) -> int:
    """Return the maximum of bytes that are allocated during a forward and backward."""
    now = most = 0
    for size in allocations(contender.step(x, dy)):
        now += size
        most = max(most, now)
    return most


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes that `run` allocates and frees (negative) with PyTorch's allocator, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes two lines to stderr on each use
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

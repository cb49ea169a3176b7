"""`ghostnoise bench memory`: bytes that a layer keeps for its backward, and the peak of forward + backward."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ghostnoise.bench import peers
from ghostnoise.bench.contenders import Contender, contenders, usable_backends
from ghostnoise.bench.profiler import profiled
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    return rows(settings), [*usable_backends(settings.device)[1], *peers.absent()]


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Count the bytes of every contender on a row, and return a record for each.

    `saved_x` and `saved_tables` are what autograd saves: x, and all other tensors except parameters and buffers. `held`
    is everything that the forward allocated, except y, and that still exists after it, including tensors that autograd
    does not save, such as drawn indices. `peak` is the maximum of allocated bytes, without x and its upstream gradient.
    Memory that a library allocates without PyTorch's allocator is not counted.
    """
    torch.manual_seed(0)
    found = contenders(row, usable_backends(settings.device)[0], settings.device)
    found = [
        contender for contender in found if contender.most_rounds is None
    ]  # the loop makes a graph node per sample
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
        | {"contender": contender.method, "kind": contender.kind, "backend": contender.backend or ""}
        | {f"{key}_bytes": value for key, value in counts.items()}
        | {"x_bytes": x.nbytes, "tables_saved": counts["saved_tables"] / table, "tables_held": counts["held"] / table}
        | {"ratio_kept": _kept(counts) / _kept(baseline), "ratio_peak": counts["peak"] / baseline["peak"]}
        | conditions(settings)
        for contender, counts in zip(found, counted, strict=True)
    ]


def saved(contender: Contender, x: Tensor) -> tuple[int, int]:
    """Return the bytes that autograd saves of x, and of all else except parameters and buffers; each storage once."""
    storages = saved_storages(contender, x)
    of_x = storages.pop(x.untyped_storage().data_ptr(), 0)
    return of_x, sum(storages.values())


def saved_storages(contender: Contender, x: Tensor) -> dict[int, int]:
    """Return the storages that autograd saves, except those of parameters and buffers: their bytes by address."""
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
    del y  # kept alive until here, so that no storage of the graph is freed and its address reused
    return storages


def held(contender: Contender, x: Tensor) -> int:
    """Return the bytes that the forward allocated and that the graph of y still holds."""
    kept: list[Tensor] = []

    def forward() -> None:
        with contender.running():
            kept.append(contender.layer(x))

    return sum(allocations(forward)) - kept[0].untyped_storage().nbytes()


def peak(contender: Contender, x: Tensor, dy: Tensor) -> int:
    """Return the maximum of bytes that are allocated during a forward and backward."""
    now = most = 0
    for size in allocations(contender.step(x, dy)):
        now += size
        most = max(most, now)
    return most


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes that `run` allocates and frees (negative) with PyTorch's allocator, in order."""
    profiler = profiled(run, memory=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    events = [event for event in trace if event.get("name") == "[memory]"]
    return [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: float(event["ts"]))]


def _kept(counts: dict[str, int]) -> int:
    return counts["saved_x"] + counts["held"]

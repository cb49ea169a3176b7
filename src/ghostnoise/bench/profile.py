"""`ghostnoise bench profile`: the parts of a training step, of layers of the native backend and of networks.

The step of a layer is forward + backward. Its parts are

- `autograd.Function`: one that allocates what the layer allocates, and computes nothing; no layer in Python is faster,
- `random draws`: the time in `torch.randint`,
- `fused_forward`, `fused_backward`: the time in these functions of the C++ library, with the conversion of arguments,
- `rest`: the time of the step without any timers in it minus that of the other parts, which is that of checks and calls
  in Python, and of freeing memory that was written.

The C++ time is divided further in steps that run without fused calls: the library then executes the same functions in
the same order, but each in a call of its own, which reads and writes its tables in memory. They are therefore slower.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ghostnoise.bench import memory, network_profile
from ghostnoise.bench.contenders import Contender, normalizers, usable_backends
from ghostnoise.bench.parts import Divided, records, with_rest
from ghostnoise.bench.rows import SMALL, Row
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import Length, interleave
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.native.library import Library, library
from ghostnoise.engine.repeat import Repeats
from ghostnoise.lab.errors import UserError

METHODS = ("BN", "GBN-32", "XBN-32", "BN+GNI-32")
ROWS = (Row(SMALL), Row((256, 512)), Row((1024, 1024)), Row((256, 512, 4, 4), "channels_last"))
QUICK = (Row(SMALL), Row((64, 16)))
FLOOR, DRAWS, REST = "autograd.Function", "random draws", "rest"


def plan(settings: Settings) -> tuple[list[Row | network_profile.Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    if settings.device.type != "cpu":
        raise UserError(f"--device {settings.device}: the native backend runs on CPUs; leave --device out")
    known = normalizers(ROWS[0])
    if unknown := [method for method in settings.methods if method not in known]:
        raise UserError(f"--method {' '.join(unknown)}: must be one of {', '.join(known)}")
    usable, left_out = usable_backends(settings.device)
    layers = (QUICK if settings.quick else ROWS) if "native" in usable else ()
    rows: list[Row | network_profile.Row] = [
        row for row in layers if row.memory_format in settings.formats or not row.images
    ]
    rows += network_profile.rows(settings)
    return [row for row in rows if settings.selects(row.name)], left_out


def measure(row: Row | network_profile.Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time the parts of each contender of a row, and return a record for each part."""
    run = measure_layers if isinstance(row, Row) else network_profile.measure
    return [record | conditions(settings) for record in run(row, settings, on_progress)]  # type: ignore[arg-type]


def measure_layers(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time layers of the native backend, their parts, and the layer of `torch.nn`, in interleaved rounds."""
    torch.manual_seed(0)
    x, dy = row.draw(settings.device)
    method, layer = row.baseline()
    layers = normalizers(row)
    ours = {name: Contender(name, "ours", layers[name], "native") for name in settings.methods or METHODS}
    plain = {name: contender.step(x, dy) for name, contender in ours.items()}
    floors = {name: Contender(FLOOR, "ours", Uncomputed(each, x)).step(x, dy) for name, each in ours.items()}
    fused, separate = ({name: Recorded(step, how) for name, step in plain.items()} for how in (True, False))
    steps = {method: Contender(method, "torch", layer(row.channels)).step(x, dy)} | plain
    steps |= {f"{name} {FLOOR}": step for name, step in floors.items()}
    steps |= {f"{name} fused": recorded.run for name, recorded in fused.items()}
    steps |= {f"{name} separate": recorded.run for name, recorded in separate.items()}
    length = Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2)
    timings = interleave(steps, length, on_progress=on_progress)
    baseline = timings.pop(method)
    found = [Divided(method, "torch", "", baseline.p50)]
    for name in ours:
        total, calls = timings[name].p50, fused[name].medians(length.warmup)
        parts = {FLOOR: timings[f"{name} {FLOOR}"].p50, DRAWS: calls.pop(DRAWS, 0.0)} | calls
        functions = separate[name].medians(length.warmup)
        functions.pop(DRAWS, None)
        found.append(Divided(name, "ours", "native", total, with_rest(total, parts, REST), functions))
    return records(row, "layer", found, baseline.n)


class Recorded:
    """A step that records the seconds in each function of the C++ library and in `torch.randint`.

    With `fused=False` the native backend has no fused calls while it runs.
    """

    def __init__(self, step: Callable[[], object], fused: bool = True) -> None:
        self.step, self.fused = step, fused
        self.taken: list[dict[str, float]] = []
        self.library = library()
        assert isinstance(self.library, Library)
        found = self.library.functions.items()
        self.functions = {name: (self._timed(name, function), count) for name, (function, count) in found}
        self.randint = self._timed(DRAWS, torch.randint)

    def run(self) -> None:
        """Run the step."""
        self.taken.append({})
        with ExitStack() as stack:
            stack.enter_context(patch.object(self.library, "functions", self.functions))
            stack.enter_context(patch.object(torch, "randint", self.randint))
            without = () if self.fused else ("fused_forward", "fused_backward", "prepare")
            for name in without:
                stack.enter_context(patch.object(backends.load("native"), name, lambda *given: None))
            if without:
                stack.enter_context(patch.object(Repeats, "run", lambda *given: None))
            self.step()

    def medians(self, warmup: int) -> dict[str, float]:
        """Return the median of the milliseconds in each function over all runs after the first `warmup`."""
        names = dict.fromkeys(name for taken in self.taken for name in taken)
        return {name: 1e3 * statistics.median(taken.get(name, 0.0) for taken in self.taken[warmup:]) for name in names}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments, **options)
            taken = time.perf_counter() - begun
            self.taken[-1][name] = self.taken[-1].get(name, 0.0) + taken
            return result

        return timed


class Uncomputed(nn.Module):
    """A layer that allocates its output, its gradients and what `contender` saves for its backward, and no more."""

    def __init__(self, contender: Contender, x: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(each.detach().clone()) for each in contender.layer.parameters())
        storages = memory.saved_storages(contender, x)
        storages.pop(x.untyped_storage().data_ptr(), None)
        self.sizes = tuple(storages.values())

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x whose values are arbitrary."""
        y: Tensor = _Uncomputed.apply(x, self.weight, self.bias, self.sizes)
        return y


class _Uncomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, bias, *(torch.empty(size, dtype=torch.uint8) for size in sizes))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias), None

"""The layers that are compared on a row."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ghostnoise import doctor
from ghostnoise.bench import peers
from ghostnoise.bench.rows import Row
from ghostnoise.engine.backends import select as backends
from ghostnoise.methods import registry

LOOP_ROUNDS = 2  # the loop over samples takes seconds per round


@dataclass(frozen=True)
class Contender:
    """A layer in training mode; `kind` is "torch", "ours" or "peer", and only ours has a backend.

    `noise` means that no gradient flows through the statistics, so that less memory is read and written.
    """

    method: str
    kind: str
    layer: nn.Module
    backend: backends.Name | None = None
    noise: bool = False
    most_rounds: int | None = None

    @property
    def name(self) -> str:
        """Return the method, with its backend if it has one."""
        return f"{self.method} ({self.backend})" if self.backend else self.method

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which the layer must be called."""
        return backends.backend(self.backend) if self.backend else nullcontext()

    def step(self, x: Tensor, dy: Tensor) -> Callable[[], object]:
        """Return a forward and backward whose gradients of x and of the parameters are new tensors."""
        wanted = [x, *self.layer.parameters()]

        def run() -> object:
            return torch.autograd.grad(self.layer(x), wanted, dy)

        context = copy_context()  # chosen once: entering a block takes microseconds, which are not those of the layer
        if self.backend:
            context.run(backends.backend, self.backend)
        return lambda: context.run(run)


def contenders(
    row: Row, usable: list[backends.Name], device: torch.device, released: Path | None = None
) -> list[Contender]:
    """Return the layer of `torch.nn`, ours on each backend, and those of other libraries, in this order.

    With `released`, a checkout of the paper's code, its layers are among the latter.
    """
    method, layer = row.baseline()
    found = [Contender(method, "torch", layer(row.channels))]
    for name in usable:
        found += [Contender(method, "ours", layer, name) for method, layer in normalizers(row).items()]
        found += [Contender(method, "ours", layer, name, noise=True) for method, layer in noises(row).items()]
    found += [Contender(method, "peer", layer) for method, layer in peers.ghost_batch_norms(row).items()]
    if released is not None:
        theirs = peers.released_layers(row, released)
        found += [Contender(method, "peer", layer, noise=noise) for method, (layer, noise) in theirs.items()]
    loop = peers.NaiveGhostNoise(row.ghost_size, channel_dim=-1 if row.tokens else 1)
    found.append(Contender(f"naive GNI-{row.ghost_size}", "peer", loop, noise=True, most_rounds=LOOP_ROUNDS))
    for contender in found:
        contender.layer.to(device)
    return found


def compiled(found: list[Contender]) -> list[Contender]:
    """Return the layer of `torch.nn` and ours through `torch.compile`."""
    first = next((contender.backend for contender in found if contender.kind == "ours"), None)
    chosen = [each for each in found if each.kind == "torch" or (each.kind == "ours" and each.backend == first)]
    torch.compiler.reset()  # earlier rows count towards the limit of recompilations
    return [
        replace(each, method=f"{each.method} compiled", layer=Compiled(each.layer), backend=None) for each in chosen
    ]


class Compiled(nn.Module):
    """A compiled layer, called by code of its own, as in a network.

    Dynamo keeps graphs by the code that it compiled. If all layers of a benchmark were compiled by the code that they
    share, it would search for a layer's graph among those of all others in every call.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

        def call(x: Tensor) -> Tensor:
            y: Tensor = layer(x)
            return y

        own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
        self.compiled = torch.compile(own, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        """Call the compiled layer."""
        y: Tensor = self.compiled(x)
        return y


def normalizers(row: Row) -> dict[str, nn.Module]:
    """Return our layers that hold batch-norm state, for images and features."""
    if row.tokens:
        return {}
    found: dict[str, nn.Module] = {}
    for spec in registry.specs().values():
        if spec.norms is None or spec.changes_inference:  # EvalNorm trains as ghost batch norm
            continue
        layer = spec.norms[1 if row.images else 0]
        label = spec.label if spec.noise is None else f"BN+{spec.label}"
        options = spec.example if row.images else {}
        if spec.ghost_size == "none":
            found[label] = layer(row.channels, **options)
        else:
            found[f"{label}-{row.ghost_size}"] = layer(row.channels, ghost_size=row.ghost_size, **options)
    return found


def noises(row: Row) -> dict[str, nn.Module]:
    """Return our standalone noise layers."""
    channel_dim = -1 if row.tokens else 1
    found: dict[str, nn.Module] = {}
    for spec in registry.specs().values():
        if spec.noise in registry.noises():
            layer: Any = spec.noise
            found[f"{spec.label}-{row.ghost_size}"] = layer(row.ghost_size, channel_dim=channel_dim, **spec.example)
    return found


def usable_backends(device: torch.device) -> tuple[list[backends.Name], list[str]]:
    """Return the backends that can run on `device`, and a line for each that cannot."""
    usable: list[backends.Name] = []
    reasons: list[str] = []
    for name in backends.NAMES:
        if name == "auto":
            continue
        why = doctor.reason(name)
        if why is None and name != "aten":
            why = backends.load(name).refuses(torch.empty(2, 3, 4, device=device))
        if why is None and name == "triton" and device.type == "cpu":
            why = "on a CPU it runs in Triton's interpreter, whose speed is meaningless"
        if why:
            reasons.append(f"backend {name} is left out: {why}")
        else:
            usable.append(name)
    return usable, reasons

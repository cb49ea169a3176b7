"""The layers that are compared on a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ghostnoise.bench import peers
from ghostnoise.bench.rows import Row
from ghostnoise.engine.general import Decide
from ghostnoise.flex import flex_norm
from ghostnoise.methods import registry
from ghostnoise.methods.base import decide_batch_norm
from ghostnoise.methods.exclusive_batch_norm import decide_exclusive_batch_norm
from ghostnoise.methods.ghost_batch_norm import decide_ghost_batch_norm
from ghostnoise.methods.ghost_noise import DrawnNoise, decide_with_noise
from ghostnoise.randomness import draw_rows

LOOP_ROUNDS = 2  # the loop over samples takes seconds per round
EPS, NOISE_EPS = 1e-5, 1e-3
COMPILED = " compiled"


@dataclass(frozen=True)
class Contender:
    """A layer in training mode; `kind` is "torch", "ours", "flex" (the general level) or "peer".

    `noise` means that no gradient flows through the statistics, so that less memory is read and written.
    """

    name: str
    kind: str
    layer: nn.Module
    noise: bool = False
    most_rounds: int | None = None

    def step(self, x: Tensor, dy: Tensor) -> Callable[[], object]:
        """Return a forward and backward whose gradients of x and of the parameters are new tensors."""
        wanted = [x, *self.layer.parameters()]
        return lambda: torch.autograd.grad(self.layer(x), wanted, dy)


def contenders(
    row: Row, device: torch.device, released: Path | None = None, only: Sequence[str] = ()
) -> list[Contender]:
    """Return the layer of `torch.nn`, ours, the general level, and those of other libraries, in this order.

    With `released`, a checkout of the paper's code, its layers are among the latter. `only` selects by name; the layer
    of `torch.nn` is always included.
    """
    name, layer = row.baseline()
    found = [Contender(name, "torch", layer(row.channels))]
    found += [Contender(name, "ours", layer) for name, layer in normalizers(row).items()]
    found += [Contender(name, "ours", layer, noise=True) for name, layer in noises(row).items()]
    found += [Contender(name, "flex", layer) for name, layer in generals(row).items()]
    found += [Contender(name, "peer", layer) for name, layer in peers.ghost_batch_norms(row).items()]
    if released is not None:
        theirs = peers.released_layers(row, released)
        found += [Contender(name, "peer", layer, noise=noise) for name, (layer, noise) in theirs.items()]
    loop = peers.NaiveGhostNoise(row.ghost_size, channel_dim=-1 if row.tokens else 1)
    found.append(Contender(f"naive GNI-{row.ghost_size}", "peer", loop, noise=True, most_rounds=LOOP_ROUNDS))
    found = [each for each in found if not only or each.kind == "torch" or each.name in only]
    for contender in found:
        contender.layer.to(device)
    return found


def compiled(found: list[Contender]) -> list[Contender]:
    """Return the layer of `torch.nn` and ours through `torch.compile`."""
    torch.compiler.reset()  # earlier rows count towards the limit of recompilations
    chosen = [each for each in found if each.kind in ("torch", "ours")]
    return [replace(each, name=each.name + COMPILED, layer=Compiled(each.layer)) for each in chosen]


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


class General(nn.Module):
    """A method by `flex_norm`, as users write their own, with weight and bias and without running statistics.

    `decide` returns the method for an input, with new draws.
    """

    def __init__(self, channels: int, decide: Callable[[Tensor], Decide]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return flex_norm(x, self.decide(x), self.weight, self.bias)


def generals(row: Row) -> dict[str, nn.Module]:
    """Return the general level with methods of ours, for images and features."""
    if row.tokens:
        return {}
    size = row.ghost_size

    def noise(x: Tensor) -> Decide:
        indices = draw_rows(x.shape[0], x.shape[0], size, x.device, None)
        return partial(decide_with_noise, EPS, False, DrawnNoise(NOISE_EPS, "both", indices), None)

    methods: dict[str, Callable[[Tensor], Decide]] = {
        "BN": lambda x: partial(decide_batch_norm, EPS),
        f"GBN-{size}": lambda x: partial(decide_ghost_batch_norm, EPS, size),
        f"XBN-{size}": lambda x: partial(decide_exclusive_batch_norm, EPS, size, 0.0, 0.0),
        f"BN+GNI-{size}": noise,
    }
    return {f"flex {name}": General(row.channels, decide) for name, decide in methods.items()}


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
        layer: Any = spec.noise
        if layer in registry.noises():
            found[f"{spec.label}-{row.ghost_size}"] = layer(row.ghost_size, channel_dim=channel_dim, **spec.example)
        elif layer in registry.inserted() and (row.images or row.tokens):  # with several positions
            found[spec.label] = layer(channel_dim=channel_dim, **spec.example | {"p": 1.0})  # in every step
    return found

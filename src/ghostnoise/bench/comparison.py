"""Every backend against float64: the layers of all methods, in all layouts and dtypes, with the same draws."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostnoise.engine import op
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.plan import Normalizer, Plan, Seeded
from ghostnoise.laws import Law, LawDraws
from ghostnoise.methods import registry
from ghostnoise.statistics.samples import GhostBatch, draw_indices

# Largest error over the largest absolute value of the result. Half types: one rounding.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}
LAYOUTS = {
    "contiguous": ((24, 20, 5, 3), 1),
    "channels_last": ((24, 20, 5, 3), 1),
    "features": ((40, 24), 1),
    "tokens": ((24, 6, 20), -1),
}
GHOST_SIZE = 7  # not a divisor of any batch
NAMES = ("output", "gradient of x", "gradient of weight", "gradient of bias", "running mean", "running variance")


class Case(NamedTuple):
    """A method, and the input that it is called with."""

    method: str
    run: Callable[..., list[Tensor]]
    layout: str


@dataclass(frozen=True)
class Comparison:
    """The result of one case on one backend: the largest error in units of its bound, and what failed, if anything."""

    method: str
    backend: str
    layout: str
    dtype: str
    error: float | None
    failure: str = ""


def compare(usable: list[backends.Name], device: torch.device) -> list[Comparison]:
    """Run all cases on all backends."""
    found = []
    for case in cases():
        expected = case.run("aten", _inputs(case.layout, torch.float64, torch.device("cpu")), torch.float64)
        for dtype in BOUNDS:
            exact = expected
            if dtype != torch.float64:  # the reference gets the rounded inputs
                given = [table.to(dtype).double() for table in _inputs(case.layout, torch.float64, torch.device("cpu"))]
                exact = case.run("aten", given, torch.float64)
            found += [_compared(case, name, dtype, device, exact) for name in usable]
    return found


def cases() -> Iterator[Case]:
    """Yield every method that runs on backends, in every layout; and draws that a backend makes itself."""
    for layout, (shape, channel_dim) in LAYOUTS.items():
        for spec in registry.specs().values():
            if spec.norm is not None:
                for training in (True, False) if spec.changes_inference else (True,):
                    label = spec.label if training else f"{spec.label} in eval mode"
                    options = _options(spec.norm.function, spec, shape, channel_dim)
                    yield Case(label, _norm(spec.norm.function, training, options), layout)
            if spec.noise in registry.noises():
                function = registry.functions()[_snake(spec.noise.__name__)]
                options = _options(function, spec, shape, channel_dim)
                yield Case(f"{spec.label} alone", _noise(function, options), layout)
        yield Case("GNI from a seed", _seeded(channel_dim), layout)


def _compared(
    case: Case, backend: backends.Name, dtype: torch.dtype, device: torch.device, expected: list[Tensor]
) -> Comparison:
    about = case.method, str(backend), case.layout, str(dtype).removeprefix("torch.")
    try:
        found = case.run(backend, _inputs(case.layout, dtype, device), _parameter_dtype(dtype))
        ratios = [_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    except Exception as error:  # a backend that crashes is a finding, and the others are still compared
        return Comparison(*about, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    worst = max(ratios)
    failure = "" if worst <= 1 else f"{NAMES[ratios.index(worst)]}: the error is {worst:.3g} times the bound"
    return Comparison(*about, worst if math.isfinite(worst) else None, failure)


def _error(ours: Tensor, exact: Tensor) -> float:
    """Return the largest error in units of its bound; infinite if one is not finite and the other is."""
    ours = ours.detach().cpu()
    bound = BOUNDS[ours.dtype] * max(exact.abs().max().item(), 1e-30)
    error = (ours.double() - exact.detach()).abs().max().item() / bound
    return math.inf if math.isnan(error) else error


def _inputs(layout: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x and the gradient of y: always the same numbers, in this layout."""
    generator = torch.Generator().manual_seed(0)
    shape, _ = LAYOUTS[layout]
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return [table.to(device, dtype).contiguous(memory_format=form) for table in (1 + 2 * x, dy)]


def _parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norm(function: Callable[..., Tensor], training: bool, options: dict[str, Any]) -> Callable[..., list[Tensor]]:
    def run(backend: backends.Name, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, dy = inputs[0].requires_grad_(), inputs[1]
        channels = x.shape[options.get("channel_dim", 1)]
        vectors = [table.to(x.device, dtype) for table in _vectors(channels)]
        weight, bias, mean, var = vectors[0].requires_grad_(), vectors[1].requires_grad_(), vectors[2], vectors[3]
        with backends.backend(backend):
            y = function(x, mean, var, weight, bias, training, **_moved(options, x.device))
            gradients = torch.autograd.grad(y, (x, weight, bias), dy)
        return [y, *gradients, *([mean, var] if training else [])]

    return run


def _noise(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., list[Tensor]]:
    def run(backend: backends.Name, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, dy = inputs[0].requires_grad_(), inputs[1]
        with backends.backend(backend):
            y = function(x, **_moved(options, x.device))
            return [y, *torch.autograd.grad(y, x, dy)]

    return run


def _seeded(channel_dim: int) -> Callable[..., list[Tensor]]:
    def run(backend: backends.Name, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, dy = inputs[0].requires_grad_(), inputs[1]
        noise = Seeded(1e-3, "both", torch.tensor([123_456_789_012], device=x.device), GHOST_SIZE)
        with backends.backend(backend):
            y, _ = op.normalize(x, Plan(Normalizer(GhostBatch(), 1e-5), noise), channel_dim=channel_dim)
            return [y, *torch.autograd.grad(y, x, dy)]

    return run


def _vectors(channels: int) -> Iterator[Tensor]:
    """Yield weight, bias, and running mean and variance."""
    generator = torch.Generator().manual_seed(1)
    for add in (1.0, 0.0, 0.5, 2.0):
        yield add + 0.3 * torch.rand(channels, dtype=torch.float64, generator=generator)


def _options(
    function: Callable[..., Any], spec: registry.MethodSpec, shape: tuple[int, ...], dim: int
) -> dict[str, Any]:
    """Return the keywords of a call, with draws that do not depend on the device."""
    taken, generator = inspect.signature(function).parameters, torch.Generator().manual_seed(2)
    options: dict[str, Any] = spec.example | {"channel_dim": dim}
    if spec.ghost_size != "none":
        options["ghost_size"] = GHOST_SIZE
    if "indices" in taken:
        options["indices"] = draw_indices(shape[0], GHOST_SIZE, torch.device("cpu"), generator)
    if "draws" in taken:
        channels = shape[dim]
        spatial = math.prod(shape) // (shape[0] * channels)
        law = Law(GHOST_SIZE, options.get("law", "fc"), options.get("dof", "paper"))
        options["draws"] = law.draw((shape[0], channels), spatial, torch.device("cpu"), generator)
    return {name: value for name, value in options.items() if name in taken}


def _moved(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    moved = dict(options)
    if "indices" in moved:
        moved["indices"] = moved["indices"].to(device)
    if "draws" in moved:
        moved["draws"] = LawDraws(*(table.to(device) for table in moved["draws"]))
    return moved


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

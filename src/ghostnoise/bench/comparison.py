"""What a device computes, against plain PyTorch in float64: the operators, and the layers with the same draws.

A layer is compared as it runs on the device, and where that may be a fused operator, also at the general level.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ghostnoise.engine import fused, general, ops
from ghostnoise.laws import Law, LawDraws
from ghostnoise.methods import registry
from ghostnoise.randomness import draw_rows
from ghostnoise.tables import table_dtype

# Largest error over the largest absolute value of the result. Half types: one rounding.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}
LAYOUTS = {
    "contiguous": ((24, 20, 5, 3), 1),
    "channels_last": ((24, 20, 5, 3), 1),
    "features": ((40, 24), 1),
    "tokens": ((24, 6, 20), -1),
}
GHOST_SIZE = 7  # not a divisor of any batch
CPU = torch.device("cpu")
NAMES = ("output", "gradient of x", "gradient of weight", "gradient of bias", "running mean", "running variance")
# Of each operator: itself, its plain form, whether it takes dy, and the number of tables that it takes.
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool, int]] = {
    "moments": (ops.moments, ops.measure, False, 0),
    "transform": (ops.transform, ops.apply, False, 3),
    "gradient_sums": (ops.gradient_sums, ops.sums, True, 1),
    "input_gradient": (ops.input_gradient, ops.linear, True, 4),
}

Block = Callable[[], AbstractContextManager[object]]
Run = Callable[[Tensor, Tensor], list[Tensor]]


class Case(NamedTuple):
    """A function of x and dy, and the same in plain PyTorch.

    `level` is "operator", "layer" as the device runs it, or "general" for a layer at the general level.
    """

    name: str
    level: str
    layout: str
    run: Run
    exact: Run


@dataclass(frozen=True)
class Comparison:
    """The result of one case: the largest error in units of its bound, and what failed, if anything."""

    name: str
    level: str
    layout: str
    dtype: str
    error: float | None
    failure: str = ""


def compare(device: torch.device) -> list[Comparison]:
    """Run all cases on a device, in all dtypes that it has."""
    dtypes = [dtype for dtype in BOUNDS if dtype.itemsize <= table_dtype(device).itemsize]
    return [_compared(case, dtype, device) for case in cases(device) for dtype in dtypes]


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every operator, and every method that normalizes or injects ghost noise, in every layout."""
    levels: dict[str, Block] = {"general": _general}
    if fused.covers(torch.empty(2, 3, 4, device=device)):
        levels = {"layer": nullcontext} | levels
    for layout, (shape, channel_dim) in LAYOUTS.items():
        for name, (operator, plain, takes_dy, tables) in OPERATORS.items():
            runs = (_operator(function, takes_dy, tables, channel_dim) for function in (operator, plain))
            yield Case(name, "operator", layout, *runs)
        for name, function, spec, training in _functions():
            if spec.inserts and layout == "features":  # a sample needs several positions
                continue
            run = _layer(function, training, _options(function, spec, shape, channel_dim, device))
            for level, block in levels.items():
                yield Case(name, level, layout, _within(block, run), _within(_plain, run))


def _functions() -> Iterator[tuple[str, Callable[..., Tensor], registry.MethodSpec, bool]]:
    """Yield the functions of methods with their names, and whether they run in training."""
    for spec in registry.specs().values():
        if spec.norm is not None:
            yield spec.label, spec.norm.function, spec, True
            if spec.changes_inference:
                yield f"{spec.label} in eval mode", spec.norm.function, spec, False
        if spec.noise in registry.inserted():
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", spec.noise.__name__).lower()
            yield f"{spec.label} alone", registry.functions()[name], spec, True


def _general() -> AbstractContextManager[object]:
    """Return a block in which layers run at the general level."""
    return patch.object(fused, "covers", lambda *given: False)


def _plain() -> AbstractContextManager[object]:
    """Return a block in which layers run in plain PyTorch."""
    stack = ExitStack()
    stack.enter_context(_general())
    stack.enter_context(patch.object(general, "needs_operators", lambda *given: True))
    return stack


def _within(block: Block, run: Run) -> Run:
    def inside(x: Tensor, dy: Tensor) -> list[Tensor]:
        with block():
            return run(x, dy)

    return inside


def _compared(case: Case, dtype: torch.dtype, device: torch.device) -> Comparison:
    about = case.name, case.level, case.layout, str(dtype).removeprefix("torch.")
    given = [table.to(dtype) for table in _inputs(case.layout)]
    exact = case.exact(*(table.double() for table in given))
    try:
        found = case.run(*(table.to(device) for table in given))
        ratios = [_error(ours, theirs, given[0]) for ours, theirs in zip(found, exact, strict=True)]
    except Exception as error:  # a device that fails is a finding, and the other cases are still compared
        return Comparison(*about, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    worst = max(ratios)
    name = "result" if case.level == "operator" else NAMES[ratios.index(worst)]
    failure = "" if worst <= 1 else f"{name}: the error is {worst:.3g} times the bound"
    return Comparison(*about, worst if math.isfinite(worst) else None, failure)


def _error(ours: Tensor, exact: Tensor, x: Tensor) -> float:
    """Return the largest error in units of its bound; infinite if one is not finite and the other is.

    Tables are as accurate as the arithmetic of x.
    """
    ours = ours.detach().cpu()
    dtype = x.dtype if ours.dtype == x.dtype else ops.arithmetic_dtype(x)
    bound = BOUNDS[dtype] * max(exact.abs().max().item(), 1e-30)
    error = (ours.double() - exact.detach()).abs().max().item() / bound
    return math.inf if math.isnan(error) else error


def _inputs(layout: str) -> list[Tensor]:
    """Return x and the gradient of y: always the same numbers, in this layout."""
    generator = torch.Generator().manual_seed(0)
    shape, _ = LAYOUTS[layout]
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return [table.contiguous(memory_format=form) for table in (1 + 2 * x, dy)]


def _operator(function: Callable[..., Any], takes_dy: bool, tables: int, channel_dim: int) -> Run:
    def run(x: Tensor, dy: Tensor) -> list[Tensor]:
        x, dy = x.movedim(channel_dim, 1), dy.movedim(channel_dim, 1)
        generator, (batch_size, channels) = torch.Generator().manual_seed(1), x.shape[:2]
        rows = [batch_size if number % 2 else 1 for number in range(tables)]  # one row serves all samples
        made = [torch.rand((n, channels), dtype=torch.float64, generator=generator) for n in rows]
        made = [0.5 + table.to(x.device, table_dtype(x.device)) for table in made]
        result = function(dy, x, *made) if takes_dy else function(x, *made)
        return [result] if isinstance(result, Tensor) else list(result)

    return run


def _layer(function: Callable[..., Tensor], training: bool, options: dict[str, Any]) -> Run:
    def run(x: Tensor, dy: Tensor) -> list[Tensor]:
        x, moved = x.requires_grad_(), {name: _moved(value, x.device) for name, value in options.items()}
        buffers: list[Tensor] = []
        with torch.random.fork_rng(devices=[]):  # what is drawn on a CPU
            torch.manual_seed(3)
            if "weight" in inspect.signature(function).parameters:
                vectors = _vectors(x.shape[options["channel_dim"]])
                weight, bias, *buffers = (table.to(x.device, ops.arithmetic_dtype(x)) for table in vectors)
                inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
                y = function(x, *buffers, weight, bias, training, **moved)
            else:
                inputs = [x]
                y = function(x, **moved)
        return [y, *torch.autograd.grad(y, inputs, dy), *(buffers if training else [])]

    return run


def _vectors(channels: int) -> Iterator[Tensor]:
    """Yield weight, bias, and running mean and variance."""
    generator = torch.Generator().manual_seed(1)
    for add in (1.0, 0.0, 0.5, 2.0):
        yield add + 0.3 * torch.rand(channels, dtype=torch.float64, generator=generator)


def _options(
    function: Callable[..., Any], spec: registry.MethodSpec, shape: tuple[int, ...], dim: int, device: torch.device
) -> dict[str, Any]:
    """Return the keywords of a call; with draws, unless they follow from a seed that does not depend on the device."""
    taken, generator = inspect.signature(function).parameters, torch.Generator().manual_seed(2)
    options: dict[str, Any] = spec.example | {"channel_dim": dim}
    if spec.ghost_size != "none":
        options["ghost_size"] = GHOST_SIZE
    if "indices" in taken and spec.noise in registry.noises():
        options["indices"] = draw_rows(shape[0], shape[0], GHOST_SIZE, CPU, generator)
    elif "indices" in taken:
        options["indices"] = torch.randperm(shape[0], generator=generator)
    if "history" in options:
        options["history"] = None
    if "draws" in taken and device.type != "cpu":
        spatial = math.prod(shape) // (shape[0] * shape[dim])
        law = Law(GHOST_SIZE, options.get("law", "fc"), options.get("dof", "paper"))
        options["draws"] = law.draw((shape[0], shape[dim]), spatial, CPU, generator)
    return {name: value for name, value in options.items() if name in taken}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, LawDraws):
        return LawDraws(*(table.to(device) for table in value))
    return value.to(device) if isinstance(value, Tensor) else value

"""Hooks that measure what passes through a model's normalization layers."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ghostnoise import checks
from ghostnoise.functional.running import recomputing
from ghostnoise.meter.layer import Layer
from ghostnoise.meter.reading import Reading
from ghostnoise.meter.selection import Side, places


class Meter:
    """Measure the ghost noise of a model's layers while it runs, without a change to its outputs and random streams.

    Inside the `with` block every forward pass is measured: in training or eval, of a converted model or of any other.
    What is measured is the noise that ghost batches of `ghost_size` samples of the same activations would make, not
    what the layer itself injects. Memory does not grow with the number of batches.

    Args:
        model: any module.
        ghost_size: samples in a ghost batch, N.
        modules: names of modules to measure, or patterns such as "layer1.*"; None: all normalization layers.
        side: measure the "input" or the "output" of modules; None: the input of batch norms and of ghost noise, the
            output of others, where noise would follow them.
        channel_dim: where channels are, if the type of a module does not tell.
        draws: ghost batches to draw from each batch, for each method.
        gap: also compare training with inference, which takes a few passes over the activations.
        seed: of the draws.

    >>> model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU())
    >>> with torch.no_grad(), Meter(model, ghost_size=16) as meter:
    ...     for _ in range(10):
    ...         _ = model(torch.randn(128, 20))
    >>> layer = meter.result()["1"]
    >>> float(layer.noise["gni"].shift.std.mean().round(2))  # 1/sqrt(16): the layer is fully connected
    0.25
    """

    def __init__(
        self,
        model: nn.Module,
        ghost_size: int = 32,
        *,
        modules: str | Sequence[str] | None = None,
        side: Side | None = None,
        channel_dim: int | None = None,
        draws: int = 256,
        gap: bool = True,
        seed: int = 0,
    ) -> None:
        size = checks.ghost_size(ghost_size)
        if side is not None:
            checks.choice("side", side, ("input", "output"))
        if channel_dim is not None:
            checks.dimension(channel_dim)
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise ValueError(f"draws={draws!r}: must be an integer of 1 or more, the ghost batches drawn from a batch")
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.layers = [Layer(place, size, draws, gap, channel_dim) for place in places(model, modules, side)]
        self.called: list[Layer] = []
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        if self.handles:
            raise RuntimeError("this Meter measures already: leave its `with` block first, or make another Meter")
        for layer in self.layers:
            module = layer.place.found.module
            if layer.place.side == "input":
                hook = self._before(layer)
                self.handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            else:
                self.handles.append(module.register_forward_hook(self._after(layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def result(self) -> Reading:
        """What was measured so far."""
        readings = [reading for layer in self.called if (reading := layer.result()) is not None]
        if not readings:
            skipped = sum(layer.skipped for layer in self.layers)
            why = f"{skipped} were of fewer than two samples, or not finite" if skipped else "none reached them"
            raise ValueError(
                f"nothing was measured in {len(self.layers)} layers: of the batches, {why}; run forward passes of two "
                "samples or more inside the `with` block (a compiled model as it was before torch.compile)"
            )
        return Reading(readings)

    def _before(self, layer: Layer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._see(layer, args or kwargs)

        return hook

    def _after(self, layer: Layer) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._see(layer, output)

        return hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _see(self, layer: Layer, value: Any) -> None:
        if recomputing():  # activation checkpointing: the batch was seen
            return
        if layer not in self.called:
            self.called.append(layer)
        # Tables outlive the mode and the default device of one forward pass.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            layer.see(value, self.generator)

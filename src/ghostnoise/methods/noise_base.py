"""What the methods that inject ghost noise share: checks of their options, and histories of earlier samples."""

import functools
import warnings
from typing import Any

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.engine import op
from ghostnoise.engine.plan import COMPONENTS, Components, Drawn, Noise
from ghostnoise.engine.ranks import Extent, Group
from ghostnoise.methods.base import Sampled, is_recomputed, met
from ghostnoise.statistics.history import History
from ghostnoise.statistics.moments import Moments, Stored
from ghostnoise.statistics.samples import draw_indices


def check_noise(noise_eps: float, components: str, generator: Generator | None) -> None:
    """Check the options that all ghost noise has."""
    checks.number("noise_eps", noise_eps, 0)
    checks.choice("components", components, COMPONENTS)
    checks.generator(generator)


def checked_input(
    input: Tensor, name: str, channel_dim: int, process_group: Group, uneven: bool, mask: Tensor | None
) -> tuple[int, Extent]:
    """Check the input of noise on its own; returns the number of channels, and the extent of the batch."""
    channels, spatial = checks.layout(input, name, channel_dim)
    extent = met(name, input, spatial, channel_dim, process_group, uneven, mask)
    checks.trainable(extent.shape, name)
    return channels, extent


def warn_without_variance(condition: bool, input: Tensor) -> None:
    """Warn about ghost batches of a single value, once for each shape of samples."""
    if condition and not torch.compiler.is_compiling():
        _warn_of_single_values(tuple(input.shape[1:]))


@functools.cache
def _warn_of_single_values(sample_shape: tuple[int, ...]) -> None:
    warnings.warn(
        f"ghost_size=1 on samples of shape {sample_shape}: a ghost batch of a single value has no variance, so the "
        "scale noise divides by sqrt(noise_eps); raise ghost_size, or use components='shift'",
        stacklevel=4,
    )


def earlier(history: History, input: Tensor, channel_dim: int, extent: Extent) -> Stored:
    """Return the samples before this batch; those before the first pass, if this is a recomputed one."""
    if not is_recomputed():
        return history.stored(input.shape[channel_dim], input.device)
    ranks, mask = extent.ranks, extent.mask
    first = 0 if ranks is None else sum(ranks.sizes[: ranks.rank])
    own = mask if mask is None or ranks is None else mask._replace(counts=ranks.rows(mask.counts))
    return history.before(op.measure(input, channel_dim, own), first)


def differ(extent: Extent, stored: Stored | None) -> bool:
    """Return whether samples that can be drawn may have different numbers of values, or none.

    Samples that weigh equally are drawn and pooled faster. On other devices than CPUs, the comparison of the stored
    samples would synchronize.
    """
    if stored is None or extent.mask is not None:
        return extent.mask is not None
    if stored.counts.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return not bool((stored.counts == extent.spatial).all())


def remember(history: History, moments: Moments | None, extent: Extent) -> None:
    """Add the samples of this batch to the history, unless this is a recomputed pass."""
    if not is_recomputed():
        assert moments is not None
        history.add(moments, extent.spatial if extent.counts is None else extent.counts.flatten())


def pool_counts(extent: Extent, stored: Stored | None) -> Tensor:
    """Return the numbers of values of the samples of the batch, and of those that are stored."""
    parts = [] if stored is None else [stored.counts]
    own = parts[0].new_ones(extent.shape[0]) if extent.counts is None else extent.counts.flatten()
    return torch.cat([own, *(part.to(own.dtype) for part in parts)])


class Remembering(Sampled):
    """A layer with a `history`, which is a part of the state_dict if it is persistent."""

    history: History | None
    noise_eps: float
    components: Components
    injects_noise = True

    def stored_noise(
        self, stored: Stored, ghost_size: int, input: Tensor, spatial: int | Tensor, generator: Generator | None
    ) -> Noise:
        """Draw ghost batches from stored samples, with replacement."""
        single = isinstance(spatial, int) and ghost_size * spatial == 1
        warn_without_variance(self.components != "shift" and single, input)
        indices = draw_indices(len(stored.counts), ghost_size, input.device, generator, input.shape[0])
        return Drawn(float(self.noise_eps), self.components, indices)

    def _described_history(self) -> list[str]:
        return [] if self.history is None else [f"history={self.history.size}"]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.history is not None and self.history.persistent:
            destination.update({f"{prefix}history_{name}": table for name, table in self.history.state().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.history is not None and self.history.persistent:
            keys = {name: f"{prefix}history_{name}" for name in Stored._fields}
            missing = [key for key in keys.values() if key not in state_dict]
            missing_keys.extend(missing if strict else [])
            saved = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
            try:
                self.history.load(saved) if not missing else None
            except ValueError as error:
                error_msgs.append(f"{prefix}history: {error}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def history_of(size: int) -> History | None:
    """Return the history of a layer; None if it has none."""
    return History(size) if checks.history(size) else None

"""What the methods that inject ghost noise share: checks of their options, and histories of earlier samples."""

import functools
import warnings
from typing import Any

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.engine.ranks import Extent, Group, Ranks
from ghostnoise.history import History
from ghostnoise.methods.base import Sampled, met
from ghostnoise.randomness import draw_rows
from ghostnoise.tables import COMPONENTS, Affine, Components, Moments, drawn_samples, ghost_noise


def check_noise(noise_eps: float, components: str, generator: Generator | None) -> None:
    """Check the options that all ghost noise has."""
    if type(noise_eps) is not float or not 0 <= noise_eps < torch.inf:
        checks.number("noise_eps", noise_eps, 0)
    if components not in COMPONENTS:
        checks.choice("components", components, COMPONENTS)
    if generator is not None:
        checks.generator(generator)


def checked_input(
    input: Tensor, name: str, channel_dim: int, process_group: Group, uneven: bool, mask: Tensor | None
) -> Extent:
    """Check the input of noise on its own; returns the extent of the batch."""
    _, spatial = checks.layout(input, name, channel_dim)
    if mask is None and process_group is None:
        extent = Extent(input.shape, spatial)
    else:
        extent = met(name, input, spatial, channel_dim, process_group, uneven, mask)
    if not spatial or not extent.shape[0]:
        checks.trainable(extent.shape, name)
    return extent


def inject_before(norm: Affine, noise: Affine, ranks: Ranks | None) -> Affine:
    """Return a normalization followed by the noise of this rank's samples."""
    return (norm if ranks is None else Affine(*(ranks.own(table) for table in norm))).before(noise)


def warn_without_variance(input: Tensor) -> None:
    """Warn about ghost batches of a single value, once for each shape of samples."""
    if not torch.compiler.is_compiling():
        _warn_of_single_values(tuple(input.shape[1:]))


@functools.cache
def _warn_of_single_values(sample_shape: tuple[int, ...]) -> None:
    warnings.warn(
        f"ghost_size=1 on samples of shape {sample_shape}: a ghost batch of a single value has no variance, so the "
        "scale noise divides by sqrt(noise_eps); raise ghost_size, or use components='shift'",
        stacklevel=4,
    )


STORED = ("mean", "var", "counts")


class Remembering(Sampled):
    """A layer with a `history`, which is a part of the state_dict if it is persistent."""

    history: History | None
    noise_eps: float
    components: Components
    injects_noise = True

    def stored_noise(
        self, stored: Moments, whole: Moments, ghost_size: int, input: Tensor, generator: Generator | None
    ) -> Affine:
        """Draw ghost batches from stored samples, with replacement."""
        if self.components != "shift" and not isinstance(stored.n, Tensor) and ghost_size * stored.n == 1:
            warn_without_variance(input)
        indices = draw_rows(stored.mean.shape[0], input.shape[0], ghost_size, input.device, generator)
        return ghost_noise(whole, drawn_samples(stored, indices), float(self.noise_eps), self.components)

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
            keys = {name: f"{prefix}history_{name}" for name in STORED}
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

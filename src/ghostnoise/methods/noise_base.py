"""What the methods that inject ghost noise share."""

import functools
import warnings

import torch
from torch import Generator, Tensor

from ghostnoise import checks
from ghostnoise.engine.ranks import Extent, Group, Ranks
from ghostnoise.methods.base import Remembering, met
from ghostnoise.randomness import draw_rows, drawn_by
from ghostnoise.tables import COMPONENTS, Affine, Components, Moments, drawn_samples, ghost_noise, normalize


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


def inject(
    stats: Moments, eps: float, noise: Affine, ranks: Ranks | None, weight: Tensor | None, bias: Tensor | None
) -> Affine:
    """Normalize with the statistics, inject the noise of this rank's samples, then apply weight and bias.

    The weight comes before the noise, whose center it scales: it is then multiplied with one row for all samples.
    """
    norm = normalize(stats, eps, 0.0, weight)
    norm = norm if ranks is None else Affine(*(ranks.own(table) for table in norm))
    center = noise.center if weight is None or not isinstance(noise.center, Tensor) else noise.center * weight
    return norm.before(Affine(center, noise.scale, 0.0 if bias is None else bias))


def without_noise(name: str, ghost_size: int, draw: str) -> str:
    """Return the warning about a batch whose ghost batches have the statistics of the batch itself."""
    given, remedy = "of a single sample", "history=256, which draws from earlier batches too"
    if draw == "partition":
        given, remedy = f"of fewer than {2 * ghost_size} samples with ghost_size={ghost_size}", "a smaller ghost_size"
    why = "its ghost batch is the batch itself, so there is no noise"
    return f"{name} got a batch {given}: {why}; use larger batches or {remedy}"


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


class Drawing(Remembering):
    """A layer that injects the noise of drawn samples."""

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


# Noise of the style of a sample, the mean and standard deviation of its channels over positions.


def check_style(p: float, noise_eps: float, generator: Generator | None) -> None:
    """Check the options that all noise of styles has."""
    checks.number("p", p, 0, 1)
    checks.number("noise_eps", noise_eps, 0, open_low=True)
    checks.generator(generator)


def check_positions(extent: Extent, name: str) -> None:
    """Check that samples have several positions."""
    if extent.spatial == 1:
        raise ValueError(
            f"{name} got an input of shape {tuple(extent.shape)}: a sample needs 2 positions or more, over which its "
            "standard deviation is computed; use it on images or sequences"
        )


def drawn_for_call(p: float, device: torch.device, generator: Generator | None) -> Tensor | None:
    """Draw whether a call has noise (1,), with probability p; None if it certainly has."""
    return None if p == 1 else torch.rand(1, device=device, **drawn_by(generator)) < p


def standard_deviations(m: Moments, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return those of samples (B, C), unbiased; and which samples have several positions (B, 1), or None for all."""
    if not isinstance(m.n, Tensor):
        return (m.var * (m.n / (m.n - 1)) + eps).sqrt(), None
    several = m.n > 1
    factor = torch.where(several, m.n, 2.0)
    return (m.var * (factor / (factor - 1)) + eps).sqrt(), several


def only_where(condition: Tensor | None, affine: Affine) -> Affine:
    """Return a map that is the identity where a condition, which broadcasts to (B, C), is False; None is True."""
    if condition is None:
        return affine
    return Affine(*(torch.where(condition, table, float(at == 1)) for at, table in enumerate(affine)))

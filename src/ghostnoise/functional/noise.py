"""Ghost noise on its own, for any place in any network."""

import functools
import warnings

import torch
from torch import Generator, Tensor

from ghostnoise import checks, methods
from ghostnoise.distributed import Extent, Group, meet
from ghostnoise.engine import op
from ghostnoise.ghosts import draw_indices
from ghostnoise.laws import Dof, Kind, Law, LawDraws


def ghost_noise(
    x: Tensor,
    ghost_size: int | None,
    eps: float = 1e-3,
    *,
    shift: bool = True,
    scale: bool = True,
    channel_dim: int = 1,
    indices: Tensor | None = None,
    generator: Generator | None = None,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Shift and scale each sample's channels as the statistics of a random ghost batch would have (eq. 10).

        y = (x - (m - μ)) / sqrt((s² + eps) / (σ² + eps))

    with the batch's moments μ and σ², and those, m and s², of `ghost_size` samples that are drawn with replacement,
    afresh for each sample and shared by its channels. All four are constants for the gradient. `indices` (B, N) are
    the drawn samples if given; else `generator`, or the device's default one, draws them. With `ghost_size=None`
    nothing is drawn, and x is returned. With a `process_group`, the batch is that of all its ranks, which hold equal
    parts of it unless they say `uneven`; `indices` are a row for each sample of this rank, out of all.

    Shape: (B, C, *spatial) with 2 to 5 dimensions, or the channels in `channel_dim`.
    """
    ghost_size = checks.ghost_size_or_none(ghost_size)
    checks.number("eps", eps, 0)
    _, extent = check(x, "ghost_noise", channel_dim, process_group, uneven)
    if ghost_size is None:
        checks.nothing_drawn("indices", indices)
        return x
    drawn = drawn_samples(x, extent.shape[0], ghost_size, indices, generator)
    warn_without_variance(scale and ghost_size * extent.spatial == 1 < extent.shape[0], x)
    return op.inject(x, methods.ghost_noise(eps, shift, scale, drawn), channel_dim, extent.ranks)


def analytical_ghost_noise(
    x: Tensor,
    ghost_size: int | None,
    eps: float = 1e-3,
    *,
    kind: Kind = "fc",
    dof: Dof = "paper",
    shift: bool = True,
    scale: bool = True,
    channel_dim: int = 1,
    draws: LawDraws | None = None,
    generator: Generator | None = None,
    process_group: Group = None,
    uneven: bool = False,
) -> Tensor:
    """Shift and scale as `ghost_noise` does, with moments from the analytical law of ghost batches (eqs. 11-16).

    m - μ and s² are drawn for each sample and channel: for `kind="fc"` from N(0, σ²/N) and σ²·χ²(N)/N, for
    `kind="conv"` from the law with the variances between and within samples that the batch has. `dof="exact"` counts
    the degrees of freedom that the drawn mean takes (χ²(N-1)/N where `kind="fc"`). `draws` are the standard draws of
    `ghostnoise.laws` if given; else `generator`, or the device's default one, draws them. With `ghost_size=None`
    nothing is drawn, and x is returned.

    Shape: (B, C, *spatial) with 2 to 5 dimensions, or the channels in `channel_dim`.
    """
    checks.number("eps", eps, 0)
    channels, extent = check(x, "analytical_ghost_noise", channel_dim, process_group, uneven)
    if ghost_size is None:
        checks.nothing_drawn("draws", draws)
        return x
    law, draws = drawn_law(x, ghost_size, channels, extent.spatial, kind, dof, draws, generator)
    warn_without_variance(scale and not law.has_variance, x)
    return op.inject(x, methods.analytical_noise(eps, shift, scale, law, draws), channel_dim, extent.ranks)


def check(x: Tensor, name: str, channel_dim: int, process_group: Group, uneven: bool) -> tuple[int, Extent]:
    """The checks that noise on its own shares; returns C, and what the batch is with that of the other ranks."""
    channels, spatial = checks.layout(x, name, channel_dim)
    extent = meet(x, spatial, process_group, uneven)
    checks.trainable(extent.shape, name)
    return channels, extent


def drawn_samples(
    x: Tensor, batch_size: int, ghost_size: int, indices: Tensor | None, generator: Generator | None
) -> Tensor:
    """A table (B, N) of samples, drawn for each one of x out of `batch_size`: the given one, checked, or a new one."""
    if indices is None:
        return draw_indices(batch_size, ghost_size, x.device, generator, rows=x.shape[0])
    checks.index_table(indices, x.shape[0], ghost_size, batch_size)
    return indices.to(x.device, copy=True)  # backward needs them as they are now


def drawn_law(
    x: Tensor,
    ghost_size: int,
    channels: int,
    spatial: int,
    kind: Kind,
    dof: Dof,
    draws: LawDraws | None,
    generator: Generator | None,
) -> tuple[Law, LawDraws]:
    """The law of ghost batches of x, and draws from it: the given ones, checked, or new ones."""
    ghost_size = checks.ghost_size(ghost_size)
    checks.choice("kind", kind, ("fc", "conv"))
    checks.choice("dof", dof, ("paper", "exact"))
    law, shape = Law(ghost_size, spatial, kind, dof), (x.shape[0], channels)
    if draws is None:
        return law, law.draw(shape, x.device, generator)
    draws = LawDraws(*(table.clone() for table in draws))  # backward needs them as they are now
    for name, table in zip(draws._fields, draws, strict=True):
        if table.shape != shape:
            raise ValueError(f"draws.{name} of shape {tuple(table.shape)}: must be (B, C) = {shape}")
    return law, draws


def warn_without_variance(condition: bool, x: Tensor) -> None:
    """Warn, once for each shape of samples, of ghost batches of a single value."""
    if condition and not torch.compiler.is_compiling():
        _warn_of_single_values(tuple(x.shape[1:]))


@functools.cache
def _warn_of_single_values(sample_shape: tuple[int, ...]) -> None:
    warnings.warn(
        f"ghost_size=1 on samples of shape {sample_shape}: a ghost batch of a single value has no variance, so the "
        "scale noise divides by sqrt(eps); raise ghost_size, or switch the scale off with scale=False",
        stacklevel=4,
    )

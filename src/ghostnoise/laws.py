"""The analytical laws of ghost noise (eqs. 11-12, 15-16): the distribution of a ghost batch's mean and variance.

A channel varies between samples with variance `between` (σ_B² of the paper) and within a sample with variance `within`
(σ_I²). A fully connected layer has a single position per sample: within = 0. Relative to the channel's mean, a ghost
batch of N samples with S positions each has

| | mean | variance |
| --- | --- | --- |
| in the paper | N(0, within/(N·S) + between/N) | within/(N·S)·χ²(N·S) + between/N·χ²(N) |
| exactly | the same | within/(N·S)·χ²(N·(S-1)) + (between + within/S)/N·χ²(N-1) |

The paper takes the squares around the true mean; a ghost batch takes them around its own mean.

On a CPU, the draws are a function of one seed (`Law.draws_from`), which the fused operators compute where they are
needed, in parallel. On other devices they are drawn by torch (`Law.draw`), whose generators are parallel there.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostnoise.chi_square import INTERVALS, Floats, chi_square_mean, root_table
from ghostnoise.randomness import drawn_by, philox_normals
from ghostnoise.tables import Moments, mean_count, table_dtype, whole_batch
from ghostnoise.torch_private import standard_gamma

__all__ = ["Law", "LawDraws"]

SLICE = 2**14  # draws that are computed together, so that the steps of Philox stay in a core's cache

LawName = Literal["fc", "conv"]
Dof = Literal["paper", "exact"]


class LawDraws(NamedTuple):
    """Standard draws for each sample and channel (B, C): N(0, 1), and χ² divided by its number of terms."""

    normal: Tensor
    between: Tensor
    within: Tensor


@dataclass(frozen=True)
class Law:
    """The law of ghost batches of `ghost_size` samples: "fc" for fully connected layers, "conv" for convolutions."""

    ghost_size: int
    law: LawName = "fc"
    dof: Dof = "paper"

    def has_variance(self, spatial: int) -> bool:
        """Return False if the variance is always 0, as it is for a single value around its own mean."""
        return self.dof == "paper" or self.ghost_size * (1 if self.law == "fc" else spatial) > 1

    def draw(
        self, shape: tuple[int, int], spatial: int | Tensor, device: torch.device, generator: torch.Generator | None
    ) -> LawDraws:
        """Draw one ghost batch per entry of `shape`, (B, C), for samples with `spatial` positions."""
        dtype = table_dtype(device)

        def drawn(degrees: int | Tensor, terms: int | Tensor) -> Tensor:
            if isinstance(degrees, Tensor):  # of a number of positions that is known on the device only
                half = (degrees / 2).to(dtype).expand(shape)
                gamma = standard_gamma(half.where(half > 0, 1), **drawn_by(generator)) * (2 / terms)
                return gamma.where(half > 0, 0)
            if degrees == 0:
                return torch.zeros(shape, dtype=dtype, device=device)
            half = torch.full(shape, degrees / 2, dtype=dtype, device=device)
            return standard_gamma(half, **drawn_by(generator)) * (2 / terms)

        normal = torch.randn(shape, dtype=dtype, device=device, **drawn_by(generator))
        return LawDraws(normal, *(drawn(*counts) for counts in self.degrees(spatial)))

    def draws_from(self, seed: Tensor, shape: tuple[int, int], spatial: int) -> LawDraws:
        """Return the draws of a seed (1,), as the C++ operators compute them."""
        batch_size, channels = shape
        dtype, step = table_dtype(seed.device), max(SLICE // max(channels, 1), 1)

        def drawn(z: Tensor, degrees: int, terms: int) -> Tensor:
            return chi_square_mean(z, degrees) * (degrees / terms) if degrees else torch.zeros_like(z)

        def part(start: int) -> list[Tensor]:
            rows = range(start, min(start + step, batch_size))
            normal, *others, _ = philox_normals(seed, rows, channels, dtype)
            return [normal, *(drawn(z, *counts) for z, counts in zip(others, self.degrees(spatial), strict=True))]

        parts = [part(start) for start in range(0, max(batch_size, 1), step)]
        return LawDraws(*(torch.cat(tables) for tables in zip(*parts, strict=True)))

    def degrees(self, spatial: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return the degrees of freedom and the number of terms, between samples and within them."""
        n, terms, exact = self.ghost_size, self.ghost_size * spatial, self.dof == "exact"
        return (n - exact, n), (0 if self.law == "fc" else terms - n * exact, terms)

    def variances(self, m: Moments, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return a channel's variance (within, between) samples, (1, C) each; `var` is its total variance."""
        if self.law == "fc":
            return torch.zeros_like(var), var
        within, between = variance_components(m)
        return within, between.clamp_min(0)

    def ghost_moments(self, draws: LawDraws, within: Tensor, between: Tensor, spatial: "int | Tensor") -> Moments:
        """Return the moments of the drawn ghost batches (B, C); the mean is relative to the channel's mean."""
        mean = draws.normal * (within / (self.ghost_size * spatial) + between / self.ghost_size).sqrt()
        around = between + within / spatial if self.dof == "exact" else between
        return Moments(mean, within * draws.within + around * draws.between)


def law_tables(seed: Tensor, law: Law, spatial: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers and the quantiles of a law, as the fused operator takes them with a seed."""
    if torch.compiler.is_compiling():
        settings = law.ghost_size, law.law, law.dof  # Dynamo of torch 2.10 does not trace dataclasses.astuple
        made: tuple[Tensor, Tensor] = torch.ops.ghostnoise.law_tables(seed, *settings, spatial, dtype)
        return made
    # Tensors of their own: those of a FakeTensorMode, or of inference mode, must not reach later calls.
    numbers, quantiles = (torch.from_numpy(array) for array in _law_arrays(law, spatial, dtype))
    return numbers, quantiles


@functools.lru_cache(maxsize=256)
def _law_arrays(law: Law, spatial: int, dtype: torch.dtype) -> tuple[Floats, Floats]:
    (between, samples), (within, values) = law.degrees(spatial)
    exact, conv = law.dof == "exact", law.law == "conv"
    numbers = (spatial if conv else 0, conv / values, 1 / samples, exact / spatial, between / samples, within / values)
    quantiles = np.zeros((2, 4, INTERVALS), np.float32 if dtype == torch.float32 else np.float64)
    for made, degrees in zip(quantiles, (between, within), strict=True):
        if degrees:
            made[:] = root_table(degrees)
    return np.array(numbers, np.float64), quantiles


# In graphs of `torch.compile`, whose tensors cannot come from a cache.
_LIBRARY = torch.library.Library("ghostnoise", "FRAGMENT")
_LIBRARY.define(
    "law_tables(Tensor seed, SymInt ghost_size, str law, str dof, SymInt spatial, ScalarType dtype) -> (Tensor, Tensor)"
)


def _make_law_tables(
    seed: Tensor, ghost_size: int, law: LawName, dof: Dof, spatial: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    numbers, quantiles = _law_arrays(Law(ghost_size, law, dof), spatial, dtype)
    return torch.tensor(numbers), torch.tensor(quantiles)


def _fake_law_tables(
    seed: Tensor, ghost_size: int, law: LawName, dof: Dof, spatial: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return seed.new_empty(6, dtype=torch.float64), seed.new_empty((2, 4, INTERVALS), dtype=dtype)


_LIBRARY.impl("law_tables", _make_law_tables, "CompositeExplicitAutograd")
torch.library.register_fake("ghostnoise::law_tables", _fake_law_tables, lib=_LIBRARY)


def variance_components(m: Moments) -> tuple[Tensor, Tensor]:
    """Estimate a channel's variance (within, between) its samples from their moments (B, C); (1, C) each.

    They sum to the total variance. The second estimate may be negative if the true value is close to 0. Samples weigh
    by their numbers of positions.
    """
    spatial = mean_count(m)
    inside = whole_batch(Moments(m.var, torch.zeros_like(m.var), m.n)).mean
    inside = inside / ((spatial - 1).where(spatial > 1, 1) if isinstance(spatial, Tensor) else max(spatial - 1, 1))
    around = whole_batch(Moments(m.mean, torch.zeros_like(m.var), m.n)).var
    return spatial * inside, around - inside

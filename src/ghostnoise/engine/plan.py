"""What a method asks of the engine: a normalizer, noise, and a correction towards the running statistics.

A `Normalizer` selects which samples contribute to each sample's statistics. `Noise` has one source: samples drawn from
the batch (`Drawn`, or `Seeded` if the backend draws them) and from earlier batches too (`DrawnWithHistory`), a
partition of the shuffled batch (`Partition`), or tables drawn from an analytical law (`Tables`). A `Correction` is
Batch Renormalization's r and d, and an `Update` that of the running statistics. Methods only combine these, so every
backend serves every method.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from ghostnoise.engine.masks import Valid
from ghostnoise.engine.running import Running, Update
from ghostnoise.randomness import philox_indices
from ghostnoise.statistics.laws import Law, LawDraws
from ghostnoise.statistics.moments import Moments, Stored, expand_pools, table_dtype
from ghostnoise.statistics.samples import Contributors, GhostBatch
from ghostnoise.torch_private import intercepted, is_traced, transformed

Components = Literal["both", "shift", "scale"]
COMPONENTS: tuple[Components, ...] = get_args(Components)


@dataclass(frozen=True)
class Normalizer:
    """Normalize each sample with the pooled statistics of its contributing samples.

    y = (x - mean) · rstd        rstd = 1 / max(sqrt(var + eps), min_std)
    """

    contributors: Contributors
    eps: float
    min_std: float = 0.0

    def rstd(self, var: Tensor) -> Tensor:
        """Return the reciprocal standard deviation of a variance, differentiable."""
        var = var + self.eps
        # Clamped before the root, whose slope at 0 is infinite.
        return (var.clamp_min(self.min_std**2) if self.min_std > 0 else var).rsqrt()

    def var_gradient(self, var: Tensor, rstd: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the variance, given that of `rstd`."""
        slope = -0.5 * rstd * rstd.square() * gradient
        return slope.where(var + self.eps >= self.min_std**2, 0) if self.min_std > 0 else slope


class Batch(NamedTuple):
    """A batch as noise sees it: the moments of its samples (B, C) and of the whole batch (1, C).

    If a single pool serves all samples, normalization commutes with pooling, and these are moments of x; else they are
    moments of the normalized x, and `normalized` is True. `unit` is the variance that is 1 after normalization, in the
    units of these moments. `pool_drawn` pools drawn samples. `counts` (B,) are the numbers of values of the samples, if
    they may differ; a sample whose count is 0 is not there. `spatial` is then their mean.
    """

    moments: Moments
    whole: Moments
    unit: Tensor
    spatial: int | Tensor
    pool_drawn: Callable[[Moments, Tensor, Tensor, Tensor | None], Moments]
    normalized: bool = False
    counts: Tensor | None = None

    def or_identity(self, ghost: Moments, values: Tensor | None) -> Moments:
        """Return the moments of ghost batches, or those of the batch for a ghost batch without `values` (B, 1)."""
        if values is None:
            return ghost
        var = self.whole.var.to(ghost.var.dtype)
        return Moments(torch.where(values > 0, ghost.mean, 0), torch.where(values > 0, ghost.var, var))


@dataclass(frozen=True)
class Noise:
    """Shift and scale x as the statistics of a ghost batch would, relative to those of the whole batch.

    y = (x - m) / sqrt((s² + eps) / (var + eps))        m, s²: the ghost batch's moments, m relative to the batch mean

    All of m, s² and var are constants for the gradient.
    """

    eps: float
    components: Components

    @property
    def shifts(self) -> bool:
        """Whether the shift is injected."""
        return self.components != "scale"

    @property
    def scales(self) -> bool:
        """Whether the scale is injected."""
        return self.components != "shift"

    def ghost_moments(self, batch: Batch) -> Moments:
        """Return the moments of the ghost batches (B, C)."""
        raise NotImplementedError

    def var(self, batch: Batch) -> Tensor:
        """Return the variance that the scale is relative to (1, C)."""
        return batch.whole.var


@dataclass(frozen=True)
class Drawn(Noise):
    """Ghost batches of samples that were drawn from the batch: `indices` (B, N) (eqs. 9-10)."""

    indices: Tensor

    def ghost_moments(self, batch: Batch) -> Moments:
        """Pool the drawn samples."""
        ghost = batch.pool_drawn(batch.moments, batch.whole.mean, self.indices, batch.counts)
        return batch.or_identity(ghost, None if batch.counts is None else batch.counts[self.indices].sum(1, True))


@dataclass(frozen=True)
class DrawnWithHistory(Drawn):
    """Ghost batches that were drawn from the batch and from samples of earlier batches, whose raw moments are `stored`.

    The stored samples count as further samples of the batch, after its own. If not `weighted`, all of them are there
    and have as many values as those of the batch.
    """

    stored: Stored
    weighted: bool = True


@dataclass(frozen=True)
class Seeded(Noise):
    """Ghost batches of `ghost_size` samples that the backend draws from the batch, given a `seed` (1,) on the device.

    The draws are those of `philox_indices`, so `Drawn` with these indices is the same noise.
    """

    seed: Tensor
    ghost_size: int

    def drawn(self, batch_size: int) -> Drawn:
        """Return the same noise with its indices."""
        indices = philox_indices(self.seed, batch_size, self.ghost_size)
        return Drawn(self.eps, self.components, indices)

    def ghost_moments(self, batch: Batch) -> Moments:
        """Draw the samples, and pool them."""
        return self.drawn(batch.moments.mean.shape[0]).ghost_moments(batch)


@dataclass(frozen=True)
class Partition(Noise):
    """Ghost batches that partition the shuffled batch: `indices` (B,) is the permutation.

    The ghost batches are `ghost_size` consecutive samples of the shuffled batch; the last one also takes the remaining
    samples. Each serves the samples at its own positions of the batch, whether or not they are its members.
    """

    indices: Tensor
    ghost_size: int

    def ghost_moments(self, batch: Batch) -> Moments:
        """Pool the ghost batches of the shuffled batch."""
        batch_size, contributors = self.indices.shape[0], GhostBatch(self.ghost_size)
        shuffled = Moments(*(table[self.indices].to(batch.whole.mean.dtype) for table in batch.moments))
        counts = None if batch.counts is None else batch.counts[self.indices].unsqueeze(1)
        mean, var = contributors.pool(shuffled, None, counts)
        ghost = Moments(mean - batch.whole.mean, var)
        ghost = batch.or_identity(ghost, None if counts is None else contributors.values(counts))
        shared = contributors.samples_per_pool(batch_size)
        return Moments(*(expand_pools(table, batch_size, shared) for table in ghost))


@dataclass(frozen=True)
class Tables(Noise):
    """Ghost batches whose moments follow an analytical law: standard draws in tables (B, C) (eqs. 11-16).

    Instead of the draws there may be a seed (1,) on the device, for those of `Law.draws_from`, so that a backend can
    compute them where it needs them. If x is `normalized`, its variance is taken as 1.
    """

    law: Law
    draws: LawDraws | Tensor
    normalized: bool

    def var(self, batch: Batch) -> Tensor:
        """Return 1 after normalization, else the variance of the batch."""
        return batch.unit if self.normalized else batch.whole.var

    def ghost_moments(self, batch: Batch) -> Moments:
        """Scale the draws by the variances within and between samples."""
        draws = self.draws
        if not isinstance(draws, LawDraws):
            samples, channels = batch.moments.mean.shape
            assert isinstance(batch.spatial, int)  # under a mask, the draws are made before
            draws = self.law.draws_from(draws, (samples, channels), batch.spatial)
        within, between = self.law.variances(batch.moments, self.var(batch), batch.spatial, batch.counts)
        return self.law.ghost_moments(draws, within, between, batch.spatial)


class Correction(NamedTuple):
    """Batch Renormalization's correction of the normalized x, `x̂ * r + d`, constant for the gradient: (C,) each.

    r = clip(σ_B / σ_run, 1/r_max, r_max)        d = clip((μ_B - μ_run) / σ_run, -d_max, d_max)
    """

    r: Tensor
    d: Tensor


class Reference(NamedTuple):
    """The running statistics (C,) that a method uses during normalization, in float64.

    `limits` holds r_max and d_max of a `Correction`, on the same device; None if there is no correction.
    """

    moments: Moments
    limits: Tensor | None = None

    def correction(self, pooled: Moments, normalizer: Normalizer, dtype: torch.dtype) -> Correction:
        """Compute r and d from the pooled statistics (1, C)."""
        assert self.limits is not None
        r_max, d_max = self.limits.unbind()
        rstd = normalizer.rstd(self.moments.var)
        r = rstd / normalizer.rstd(pooled.var.detach()[0])
        d = (pooled.mean.detach()[0] - self.moments.mean) * rstd
        r = torch.minimum(torch.maximum(r, r_max.reciprocal()), r_max)
        return Correction(r.to(dtype), torch.minimum(torch.maximum(d, -d_max), d_max).to(dtype))


class Limits(NamedTuple):
    """The limits r_max and d_max of a `Correction` as a function of the number of batches.

    They are 1 and 0 for `warmup_steps` batches, and grow linearly over the next `transition_steps` batches.
    """

    r_max: float
    d_max: float
    warmup_steps: int = 0
    transition_steps: int = 0

    def at(self, count: Tensor | None, device: torch.device) -> Tensor:
        """Return r_max and d_max after `count` batches (2,), without synchronizing with the device."""
        dtype = table_dtype(device)
        if count is None or is_plain_number(count):
            return _pair(*self._at(count), dtype, device)
        done = count.detach() >= self.warmup_steps
        if self.transition_steps:
            done = (count.detach().to(dtype) - self.warmup_steps) / self.transition_steps
        progress = done.to(dtype).clamp(0, 1)
        return torch.stack([1 + (self.r_max - 1) * progress, self.d_max * progress])

    def _at(self, count: Tensor | None) -> tuple[float, float]:
        """Return r_max and d_max as numbers, which takes a fraction of the time of the same with tensors."""
        if count is None:
            return self.r_max, self.d_max
        done = int(count) - self.warmup_steps
        progress = min(max(done / self.transition_steps, 0.0), 1.0) if self.transition_steps else float(done >= 0)
        return 1 + (self.r_max - 1) * progress, self.d_max * progress


@functools.lru_cache(maxsize=64)  # they are the same before and after the transition; nothing writes to them
def _pair(r_max: float, d_max: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # later calls may run outside of it
        return torch.tensor((r_max, d_max), dtype=dtype, device=device)


class LiveReference(NamedTuple):
    """The buffers and the limits of a correction, which the forward pass reads before it updates the buffers."""

    running: Running
    schedule: Limits

    def evaluated(self, device: torch.device) -> Reference:
        """Return the running statistics and the limits of this batch; both running statistics must be present."""
        moments = self.running.moments(device)
        assert moments is not None
        return Reference(moments, self.schedule.at(self.running.num_batches_tracked, device))


class Plan(NamedTuple):
    """All that a call asks of the engine, with its tensors."""

    normalizer: Normalizer
    noise: Noise | None = None
    reference: Reference | LiveReference | None = None
    update: Update | None = None
    valid: Valid | None = None

    @property
    def counts(self) -> Tensor | None:
        """The numbers of valid positions of the samples (B, 1); None if all positions are valid."""
        return None if self.valid is None else self.valid.counts

    @property
    def corrects(self) -> bool:
        """Whether the normalized x is corrected towards the running statistics."""
        return isinstance(self.reference, LiveReference) or (self.known is not None and self.known.limits is not None)

    @property
    def known(self) -> Reference | None:
        """The reference after `evaluated`."""
        assert not isinstance(self.reference, LiveReference), "call Plan.evaluated first"
        return self.reference

    def evaluated(self, device: torch.device) -> "Plan":
        """Return the plan with a copy of the running statistics that it reads, as they are now."""
        live = self.reference
        return self._replace(reference=live.evaluated(device)) if isinstance(live, LiveReference) else self

    def tensors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the tensors of the noise, the reference and the mask, in the order in which `decode` takes them."""
        drawn = [self.noise.indices] if isinstance(self.noise, Drawn | Partition) else []
        if isinstance(self.noise, DrawnWithHistory):
            drawn += self.noise.stored
        if isinstance(self.noise, Tables):
            drawn = list(self.noise.draws) if isinstance(self.noise.draws, LawDraws) else [self.noise.draws]
        drawn = [self.noise.seed] if isinstance(self.noise, Seeded) else drawn
        valid = [] if self.valid is None else list(self.valid)
        if self.known is None:
            return drawn, [], valid
        moments, limits = self.known
        return drawn, [*moments, *([] if limits is None else [limits])], valid

    def encode(self) -> tuple[str, list[int], list[float]]:
        """Describe everything but the tensors by names, integers and floats, as arguments of a registered op.

        `torch.compile` traces this, and specializes on the numbers.
        """
        contributors, noise = self.normalizer.contributors, self.noise
        if not (noise is None or isinstance(noise, Drawn | Seeded | Partition | Tables)):
            kinds = "Drawn, Seeded, Partition or Tables"
            raise TypeError(f"noise of type {type(noise).__name__}: must be {kinds} to be part of a graph")
        sizes, shares = contributors.numbers()
        names, integers = [type(contributors).__name__], [-1 if size is None else size for size in sizes]
        floats = [self.normalizer.eps, self.normalizer.min_std, *shares]
        if noise is not None:
            floats.append(noise.eps)
            names += [type(noise).__name__, noise.components]
        if isinstance(noise, Seeded | Partition):
            integers.append(noise.ghost_size)
        if isinstance(noise, DrawnWithHistory):
            names.append("weighted" if noise.weighted else "equal")
        if isinstance(noise, Tables):
            names += [noise.law.law, noise.law.dof, "normalized" if noise.normalized else "raw"]
            integers.append(noise.law.ghost_size)
        return " ".join(names), integers, floats


def decode(
    drawn: list[Tensor] | None,
    reference: list[Tensor],
    valid: list[Tensor],
    names: str,
    integers: list[int],
    floats: list[float],
    update: Update | None = None,
) -> Plan:
    """Return the plan that `Plan.encode` described, with its tensors; without noise if `drawn` is None."""
    contributors, _, rest = names.partition(" ")
    chosen: Any = Contributors.kinds[contributors]  # not by name: a class may be defined again
    normalizer, made = _described(chosen, rest, tuple(integers), tuple(floats))
    known = Reference(Moments(*reference[:2]), reference[2] if len(reference) > 2 else None) if reference else None
    noise = None if made is None or drawn is None else made(drawn)
    return Plan(normalizer, noise, known, update, Valid(*valid) if valid else None)


@functools.lru_cache(maxsize=1024)
def _described(
    contributors: type[Contributors], names: str, integers: tuple[int, ...], floats: tuple[float, ...]
) -> tuple[Normalizer, Callable[[list[Tensor]], Noise] | None]:
    """Return what is the same in all calls of a graph: the normalizer, and how tensors that were drawn become noise."""
    sizes = [None if value < 0 else value for value in integers]
    normalizer = Normalizer(contributors.from_numbers(sizes, floats[2:]), floats[0], floats[1])
    if not names:
        return normalizer, None
    kind, chosen, *rest = names.split(" ")
    eps, components = floats[-1], cast(Components, chosen)
    if kind == Drawn.__name__:
        return normalizer, lambda drawn: Drawn(eps, components, drawn[0])
    if kind == DrawnWithHistory.__name__:
        weighted = rest[0] == "weighted"
        return normalizer, lambda drawn: DrawnWithHistory(eps, components, drawn[0], Stored(*drawn[1:]), weighted)
    if kind == Seeded.__name__:
        return normalizer, lambda drawn: Seeded(eps, components, drawn[0], integers[-1])
    if kind == Partition.__name__:
        return normalizer, lambda drawn: Partition(eps, components, drawn[0], integers[-1])
    law: Any = Law(integers[-1], rest[0], rest[1])  # type: ignore[arg-type]

    def of_law(drawn: list[Tensor]) -> Noise:
        draws = LawDraws(*drawn) if len(drawn) > 1 else drawn[0]
        return Tables(eps, components, law, draws, rest[2] == "normalized")

    return normalizer, of_law


def is_plain_number(count: Tensor) -> bool:
    """Return whether the value of a tensor can be read without synchronization, and is not part of a graph."""
    special = torch.compiler.is_compiling() or transformed() or intercepted() or is_traced()
    return type(count) is Tensor and count.device.type == "cpu" and not special


def positions(x: Tensor) -> int:
    """Return the number of spatial positions S of (B, C, *spatial)."""
    return math.prod(x.shape[2:])

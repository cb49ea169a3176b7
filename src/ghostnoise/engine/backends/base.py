"""The interface of a backend: passes over x, operations on small tables, and optional fused calls.

x has shape (B, C, *spatial) with at least one spatial dimension, in any strides; S is the number of positions. Moments
are in float64, other tables in the dtype of the arithmetic. A table has shape (R, C): each row serves
`samples_per_pool` consecutive samples, and the last row also serves the remaining ones.

    moments           mean = Σ x / S        var = Σ (x - mean)² / S
    transform         y = scale·(x - center) + shift
    gradient_sums     Σ dy                  Σ dy·(x - center)
    input_gradient    dx = gain·scale·dy + slope·(x - center) + offset
    scale_gradient    dx = scale·dy
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ghostnoise.engine.plan import Batch, Correction, LiveReference, Noise, Normalizer, Plan, Reference
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Contributors, LinearTerm

T = TypeVar("T")


class Affine(NamedTuple):
    """The transformation of x: `scale * (x - center) + shift`, tables in the dtype of the arithmetic.

    The center is separate because `scale * x + shift` loses the digits of x where |mean| is large compared to std.
    """

    center: Tensor
    scale: Tensor
    shift: Tensor


class Coefficients(NamedTuple):
    """Per-pool coefficients in the dtype of the arithmetic: (R, C) each.

    `center` is the rounded mean and `rounding` the error of that rounding. `rstd` is the reciprocal standard deviation,
    `factor` is `rstd` times the weight, and `shift` is the bias plus the effect of the rounding.
    """

    center: Tensor
    rounding: Tensor
    rstd: Tensor
    factor: Tensor
    shift: Tensor


class NoiseTables(NamedTuple):
    """The shift m and the scale k of the noise `(x̂ - m)·k`, (B, C) each; None for a component that is not injected."""

    m: Tensor | None
    k: Tensor | None

    @classmethod
    def allocated(cls, noise: Noise, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> "NoiseTables":
        """Allocate the tables of the components of the noise, both in one piece of memory.

        Malloc keeps freed memory up to twice the largest piece that was freed before; the rest is returned to the
        system, and would have to be mapped again in the next step.
        """
        if noise.components == "both":
            return cls(*torch.empty((2, *shape), dtype=dtype, device=device).unbind())
        one = torch.empty(shape, dtype=dtype, device=device)
        return cls(one, None) if noise.shifts else cls(None, one)


NO_NOISE = NoiseTables(None, None)


class Normalized(NamedTuple):
    """The result of a normalizer's forward pass, and the tables that it computed on the way.

    `moments` (B, C) are those of the samples and `pooled` (R, C) those of the pools; a fused call of the native backend
    makes only those that `Contributors.keeps_moments` asks for, and the others have no rows. `reference` holds the
    running statistics that the pass used, and `updated` is True if it has updated them.
    """

    y: Tensor
    moments: Moments
    pooled: Moments
    noise: NoiseTables
    correction: Correction | None = None
    reference: Reference | None = None
    updated: bool = False


class Saved(NamedTuple):
    """The tables that a normalizer's backward pass needs.

    `kept` are the pooled statistics (R, C), or the moments of the samples (B, C) if `Contributors.keeps_moments`; those
    of a single position may be left out, since they are x itself.
    """

    kept: Moments
    noise: NoiseTables
    correction: Correction | None = None


class Gradients(NamedTuple):
    """The gradients of x, if it needs one, and of weight and bias (C,)."""

    x: Tensor | None
    weight: Tensor
    bias: Tensor

    def unfolded(self, correction: Correction | None) -> "Gradients":
        """Return the gradient of the weight itself, given that of `folded`."""
        if correction is None:
            return self
        return self._replace(weight=correction.r * self.weight + correction.d * self.bias)


def folded(
    correction: Correction | None, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Fold r and d into weight and bias: w·r and b + w·d; differentiable."""
    if correction is None:
        return weight, bias
    d = correction.d
    shift = d if weight is None else weight.to(dtype) * d
    return folded_weight(correction, weight, dtype), shift if bias is None else bias.to(dtype) + shift


def folded_weight(correction: Correction | None, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Fold r alone into the weight, w·r, which is all that the backward pass needs."""
    if correction is None:
        return weight
    return correction.r if weight is None else weight.to(dtype) * correction.r


# The tensors of a layer, each of which may be None: weight, bias, running mean, running variance, number of batches.
State: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Prepared(ABC):
    """The forward pass of a plan, prepared for further tensors with the metadata of the first ones.

    It does not refer to tensors of its callers. Noise is drawn for each call.
    """

    __slots__ = ("backend", "limits", "normalizer")

    def __init__(self, backend: "Backend", plan: Plan) -> None:
        self.backend, self.normalizer = backend, plan.normalizer
        self.limits = plan.reference.schedule if isinstance(plan.reference, LiveReference) else None

    @abstractmethod
    def admitted(self, x: Tensor, state: State) -> list[int] | None:
        """Return the addresses of x and the state of the layer, 0 for None; None if their metadata differ."""

    @abstractmethod
    def forward(self, x: Tensor, state: State, at: list[int], noise: Noise | None) -> Normalized:
        """Run the forward pass on tensors that were admitted, whose addresses are `at`."""


class Latest(Generic[T]):
    """The latest few values of each key. All are dropped when there are too many keys."""

    KEYS, PER_KEY = 4096, 8

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: dict[Hashable, tuple[T, ...]] = {}

    def get(self, key: Hashable) -> tuple[T, ...]:
        """Return the values of a key, the latest one first."""
        return self.found.get(key, ())

    def add(self, key: Hashable, value: T) -> None:
        """Add a value, in place of the oldest one if there are many."""
        if len(self.found) >= self.KEYS:
            self.found.clear()
        self.found[key] = (value, *self.get(key)[: self.PER_KEY - 1])


@dataclass(frozen=True)
class Capabilities:
    """What a backend can run: device types (None: any), and dtypes of x (None: any floating dtype)."""

    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None


class Backend(ABC):
    """Runs the steps of the engine. `Aten` is the reference; other backends must equal it.

    Other backends derive from `Aten`, override what they do better, and call it for tensors that they cannot take.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    draws: ClassVar[bool] = False  # whether fused calls draw samples from a seed (`Seeded`)

    def unavailable(self) -> str | None:
        """Return why this backend cannot run on this machine, or None if it can."""
        return None

    def refuses(self, x: Tensor) -> str | None:
        """Return why this backend cannot run on `x`, or None if it can."""
        return None

    # Fused calls: the steps of `engine.steps` in a single call with equal results.

    def fused_forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
        """Run `steps.forward` in one call; None if this backend has no fused call for these arguments.

        It may also update the running statistics (`Plan.update`), and reports this in `Normalized.updated`.
        """
        return None

    def fused_noise(self, x: Tensor, noise: Noise) -> Affine | None:
        """Run `steps.inject_tables` in one call; None if this backend has no fused call for these arguments."""
        return None

    def fused_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool
    ) -> Gradients | None:
        """Run `steps.backward` in one call; None if this backend has no fused call for these arguments."""
        return None

    def prepare(self, x: Tensor, state: State, plan: Plan) -> Prepared | None:
        """Prepare `fused_forward` for calls like this one; None if this backend has no such preparation for it."""
        return None

    # Passes over x.

    @abstractmethod
    def moments(self, x: Tensor) -> Moments:
        """Measure the moments of each sample (B, C)."""

    @abstractmethod
    def transform(self, x: Tensor, affine: Affine, samples_per_pool: int = 1) -> Tensor:
        """Apply `scale * (x - center) + shift`, in the memory format of x."""

    @abstractmethod
    def gradient_sums(self, dy: Tensor, x: Tensor, center: Tensor, samples_per_pool: int = 1) -> tuple[Tensor, Tensor]:
        """Sum dy and dy·(x - center) over the positions of each sample (B, C)."""

    @abstractmethod
    def input_gradient(
        self, dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, term: LinearTerm, samples_per_pool: int = 1
    ) -> Tensor:
        """Return the gradient of x: `gain·scale·dy` and the linear term, which is the path through the statistics.

        `scale` has a row per pool, `gain` a row per sample or is None.
        """

    @abstractmethod
    def scale_gradient(self, dy: Tensor, scale: Tensor) -> Tensor:
        """Return `scale·dy`, the gradient of x if nothing else depends on it."""

    # Operations on tables.

    @abstractmethod
    def pool(
        self,
        contributors: Contributors,
        moments: Moments,
        reference: Moments | None = None,
        counts: Tensor | None = None,
    ) -> Moments:
        """Pool the moments of the samples (B, C) into one row per pool (R, C).

        Samples weigh by their numbers of values `counts` (B, 1), or equally if these are None.
        """

    @abstractmethod
    def pool_drawn(
        self, moments: Moments, around: Tensor, indices: Tensor, counts: Tensor | None, dtype: torch.dtype
    ) -> Moments:
        """Pool the samples in each row of `indices` (B, N); the mean is relative to `around` (1, C).

        Samples weigh by their numbers of values `counts`, or equally if these are None.
        """

    @abstractmethod
    def coefficients(
        self, normalizer: Normalizer, pooled: Moments, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Coefficients:
        """Compute the per-pool coefficients from the pooled statistics."""

    @abstractmethod
    def noise_tables(self, noise: Noise, batch: Batch, dtype: torch.dtype) -> NoiseTables:
        """Compute the noise m and k of `(x - m)·k` from the moments of ghost batches."""

    @abstractmethod
    def noisy_affine(
        self,
        noise: Noise,
        batch: Batch,
        coefficients: Coefficients,
        weight: Tensor | None,
        bias: Tensor | None,
        samples_per_pool: int = 1,
    ) -> tuple[NoiseTables, Affine]:
        """Compute the noise m and k on the normalized x, and the resulting transformation of x.

        y = weight·k·((x - mean)·rstd - m) + bias
        """

    @abstractmethod
    def statistics_gradient(
        self,
        normalizer: Normalizer,
        coefficients: Coefficients,
        var: Tensor,
        weight: Tensor | None,
        total: Tensor,
        moment: Tensor,
        noise: NoiseTables,
        samples_per_pool: int = 1,
    ) -> tuple[Tensor, Tensor, Moments]:
        """Return the gradients of weight and bias (C,) and of the pooled statistics (R, C), from `gradient_sums`."""

    @abstractmethod
    def linear_term(
        self,
        contributors: Contributors,
        kept: Moments,
        pooled: Moments,
        gradient: Moments,
        reference: Moments | None,
        batch_size: int,
        spatial: int,
        counts: Tensor | None = None,
    ) -> LinearTerm:
        """Return the gradient of x through the pooled statistics, given their gradient (R, C)."""

    @abstractmethod
    def update_running(
        self, mean: Tensor | None, var: Tensor | None, count: Tensor | None, momentum: float | None, stats: Moments
    ) -> None:
        """Update running buffers (C,) in place towards `stats` (1, C), and the count, unless `stats` are not finite.

        Does not synchronize with the device. `momentum=None` is the cumulative average.
        """

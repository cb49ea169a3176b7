"""A layer in a few launches: measure, decide, apply; and backward: sum, decide, apply.

The kernels cover ghost batches and exclusive ghost batches, and if all samples share one pool also drawn noise or a
correction towards running statistics. The forward pass also updates the running statistics: the decide kernel computes
the new ones, and the first program of the transform writes them, since whether those of all channels are finite is
known only between launches. Nothing synchronizes with the device, so that the launches can be captured in CUDA graphs.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostnoise.engine.backends.base import NO_NOISE, Affine, Gradients, NoiseTables, Normalized, Saved
from ghostnoise.engine.backends.triton.decisions import (
    drawn_kernel,
    exclusive_gradient_kernel,
    exclusive_kernel,
    pools_gradient_kernel,
    pools_kernel,
)
from ghostnoise.engine.backends.triton.kernels import triton
from ghostnoise.engine.backends.triton.passes import (
    PROGRAMS,
    Part,
    accumulator,
    aligned,
    combined,
    launch,
    measured,
    registers,
    summed,
)
from ghostnoise.engine.plan import Correction, Drawn, Noise, Plan, Reference, Seeded, positions
from ghostnoise.engine.running import Update
from ghostnoise.statistics.moments import Moments, arithmetic_dtype
from ghostnoise.statistics.samples import Exclusive, GhostBatch, first_and_last_size

CHANNELS = 8  # of a program that pools ghost batches: lines of 64 bytes
ROWS = 128  # samples of a program at a time
DRAWN_CHANNELS = 32  # of a program that pools drawn samples
DRAWN_ROWS = 32  # samples of such a program, if there are enough programs
EACH = 8  # elements of a thread
REGISTERS = 255  # of a thread: all that there are, since programs are few
EXCLUSIVE_EACH = 4  # if samples are excluded from their pools, which needs more registers


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Normalize in three launches; None if the kernels do not cover the plan."""
    if not _covers(x, weight, bias, plan):
        return None
    samples = _Samples.of(x)
    if isinstance(plan.normalizer.contributors, Exclusive):
        return _exclusive(x, weight, bias, plan, samples)
    if plan.noise is not None:
        return _noisy(x, weight, bias, plan, samples)
    return _pools(x, weight, bias, plan, samples)


def noise_alone(x: Tensor, noise: Noise) -> Affine | None:
    """Decide on noise of x itself in two launches; None if the kernel does not cover the noise."""
    if type(noise) not in (Drawn, Seeded) or not _draws_are_plain(x, noise):
        return None
    samples, dtype = _Samples.of(x), arithmetic_dtype(x)
    m, k = tables = _noise_tables(x, noise)
    constants = x.new_empty((2, x.shape[1]), dtype=dtype)
    _launch_drawn(x, samples, noise, tables, constants=constants)
    zero, one = constants[:1], constants[1:]
    return Affine(zero if m is None else m, one if k is None else k, zero)


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Return the gradients in three launches; None if the kernels do not cover the plan."""
    contributors, (m, k), channels = plan.normalizer.contributors, saved.noise, x.shape[1]
    if type(contributors) not in (GhostBatch, Exclusive) or not all(map(is_plain, _present(dy, weight, m, k))):
        return None
    exclusive = isinstance(contributors, Exclusive)
    dy, dtype, sizes = aligned(dy, x), arithmetic_dtype(x), _Sizes.of(x, plan)
    samples = _Samples.kept(x, saved.kept) if exclusive else None
    center = saved.kept.mean if samples is None else samples.mean
    sums, part = summed(dy, x, center, sizes.size)
    vector = x.new_empty if weight is None else weight.new_empty
    g_weight, g_bias = (vector(channels, dtype=dtype if weight is None else weight.dtype) for _ in range(2))
    rows = len(x) if exclusive else sizes.ghosts
    tables = x.new_empty((3, rows, channels), dtype=dtype) if needs_x else None
    normalizer = plan.normalizer
    noise = None if m is None else _strided(m), None if k is None else _strided(k)
    shares = (*sizes.shares(exclusive), 1 / positions(x))
    given = (g_weight, g_bias, tables, tuple(sizes), *shares, normalizer.eps, normalizer.min_std**2)
    gradient_sums = _Samples(*sums, part).argument
    if samples is None:
        pooled = tuple(table.contiguous() for table in saved.kept)
        correction = None if saved.correction is None else tuple(saved.correction)
        _launch_pools(pools_gradient_kernel, x, sizes, gradient_sums, pooled, *noise, _vector(weight), correction,
                      *given)  # fmt: skip
    else:
        _launch_pools(exclusive_gradient_kernel, x, sizes, gradient_sums, samples.argument, *noise, _vector(weight),
                      *given, each=EXCLUSIVE_EACH)  # fmt: skip
    if tables is None:
        return Gradients(None, g_weight, g_bias)
    factor, slope, offset = tables.unbind()
    dx = combined(torch.empty_like(x), dy, x, factor, k, center, slope, offset, sizes.size)
    return Gradients(dx, g_weight, g_bias)


def _pools(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, samples: "_Samples") -> Normalized:
    normalizer, sizes = plan.normalizer, _Sizes.of(x, plan)
    pooled, tables = _two_tables(x, sizes.ghosts), x.new_empty((2, sizes.ghosts, x.shape[1]), dtype=arithmetic_dtype(x))
    renorm, update = _Renorm.of(x, plan), _Updated.of(x, plan.update)
    _launch_pools(
        *(pools_kernel, x, sizes, samples.argument, tuple(pooled), tables, _vector(weight), _vector(bias)),
        *(renorm.argument, update.argument, tuple(sizes), *sizes.shares(), 1 / len(x)),
        *(normalizer.eps, normalizer.min_std**2, *renorm.limits),
        *(update.momentum, update.bessel, update.ghosts),
    )
    factor, shift = tables.unbind()
    y = combined(torch.empty_like(x), None, x, None, None, pooled.mean, factor, shift, sizes.size, update.argument)
    moments, updated = Moments(*samples[:2]), plan.update is not None
    return Normalized(y, moments, pooled, NO_NOISE, renorm.correction, renorm.reference, updated)


def _exclusive(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, samples: "_Samples") -> Normalized:
    normalizer, sizes, batch_size = plan.normalizer, _Sizes.of(x, plan), len(x)
    in_parts = samples.part is not None and samples.part.K > 1
    kept, pooled = _two_tables(x, batch_size) if in_parts else None, _two_tables(x, batch_size)
    tables, update = x.new_empty((2, *x.shape[:2]), dtype=arithmetic_dtype(x)), _Updated.of(x, plan.update)
    _launch_pools(
        *(exclusive_kernel, x, sizes, samples.argument, None if kept is None else tuple(kept), tuple(pooled), tables),
        *(_vector(weight), _vector(bias), update.argument, tuple(sizes), *sizes.shares(1), 1 / batch_size),
        *(normalizer.eps, normalizer.min_std**2, update.momentum, update.bessel),
        each=EXCLUSIVE_EACH,
    )
    factor, shift = tables.unbind()
    y = combined(torch.empty_like(x), None, x, None, None, pooled.mean, factor, shift, 1, update.argument)
    moments = Moments(*samples[:2]) if kept is None else kept
    return Normalized(y, moments, pooled, NO_NOISE, updated=plan.update is not None)


def _noisy(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, samples: "_Samples") -> Normalized:
    assert plan.noise is not None
    dtype = arithmetic_dtype(x)
    pooled, factor = _two_tables(x, 1), x.new_empty((1, x.shape[1]), dtype=dtype)
    shift, tables, update = (
        x.new_empty(x.shape[:2], dtype=dtype),
        _noise_tables(x, plan.noise),
        _Updated.of(x, plan.update),
    )
    _launch_drawn(x, samples, plan.noise, tables, (weight, bias), (tuple(pooled), factor, shift), None, plan, update)
    y = combined(torch.empty_like(x), None, x, None, tables.k, pooled.mean, factor, shift, 1, update.argument)
    return Normalized(y, Moments(*samples[:2]), pooled, tables, updated=plan.update is not None)


def _launch_pools(kernel: Any, x: Tensor, sizes: "_Sizes", *arguments: Any, each: int = EACH) -> None:
    """Give CHANNELS channels to a program."""
    BLOCK_C = min(triton.next_power_of_2(x.shape[1]), CHANNELS)
    BLOCK_N = min(triton.next_power_of_2(sizes.last), ROWS)
    BLOCK_G = min(triton.next_power_of_2(sizes.ghosts), ROWS // BLOCK_N)
    programs, warps = triton.cdiv(x.shape[1], BLOCK_C), _warps(BLOCK_G * BLOCK_N * BLOCK_C, each)
    launch(
        kernel,
        x,
        programs,
        *arguments,
        BLOCK_G,
        BLOCK_N,
        BLOCK_C,
        accumulator(x),
        num_warps=warps,
        **registers(REGISTERS),
    )


def _launch_drawn(
    x: Tensor,
    samples: "_Samples",
    noise: Noise,
    tables: NoiseTables,
    parameters: tuple[Tensor | None, Tensor | None] = (None, None),
    outputs: tuple[Any, Any, Any] = (None, None, None),
    constants: Tensor | None = None,
    plan: Plan | None = None,
    update: "_Updated | None" = None,
) -> None:
    """Give DRAWN_CHANNELS channels of DRAWN_ROWS samples to a program, or of fewer samples if programs are few."""
    batch_size, channels = x.shape[:2]
    BLOCK_C = min(triton.next_power_of_2(channels), DRAWN_CHANNELS)
    BLOCK_B, blocks = min(triton.next_power_of_2(batch_size), DRAWN_ROWS), triton.cdiv(channels, BLOCK_C)
    while BLOCK_B > 4 and triton.cdiv(batch_size, BLOCK_B) * blocks < PROGRAMS:
        BLOCK_B //= 2
    update = update or _Updated.of(x, None)
    eps, least = (1.0, 0.0) if plan is None else (plan.normalizer.eps, plan.normalizer.min_std**2)
    indices, seed, draws = None, None, 0
    if isinstance(noise, Drawn):
        indices, draws = _strided(noise.indices), noise.indices.shape[1]
    elif isinstance(noise, Seeded):
        seed, draws = noise.seed, noise.ghost_size
    pooled, factor, shift = outputs
    weight, bias = parameters
    launch(
        *(drawn_kernel, x, triton.cdiv(batch_size, BLOCK_B) * blocks, samples.argument, indices, seed, pooled),
        *(tuple(tables), factor, shift, _vector(weight), _vector(bias), constants, update.argument),
        *(
            (batch_size, channels, draws),
            1 / batch_size,
            1 / draws,
            eps,
            least,
            noise.eps,
            update.momentum,
            update.bessel,
        ),
        *(plan is not None, BLOCK_B, DRAWN_ROWS, BLOCK_C, accumulator(x)),
        num_warps=_warps(DRAWN_ROWS * BLOCK_C, EACH),
        **registers(REGISTERS),
    )


def _warps(elements: int, each: int) -> int:
    return max(1, elements // (32 * each))


class _Samples(NamedTuple):
    """The moments of samples, which may be in parts (B, K, C), or sums of gradients; without a part, x itself."""

    mean: Tensor
    var: Tensor
    part: Part | None

    @classmethod
    def of(cls, x: Tensor) -> "_Samples":
        """Measure the samples, unless they have a single position."""
        if positions(x) == 1:
            return cls(x.detach().flatten(1), x.new_empty(0), None)
        (mean, var), part = measured(x)
        return cls(mean, var, part)

    @classmethod
    def kept(cls, x: Tensor, kept: Moments) -> "_Samples":
        """Take the moments that the forward pass kept."""
        return cls.of(x) if positions(x) == 1 else cls(*kept, None)

    @property
    def argument(self) -> tuple[Any, ...]:
        """What kernels take."""
        mean, var, part = self
        strides = mean.stride(0), mean.stride(-1)
        if part is None or part.K == 1:
            return mean, var if var.numel() else None, *strides, None
        # Kernels take floats of a tuple in float32, so that a float64 comes as two.
        high = float(np.float32(1 / part.S))
        return mean, var, *strides, (mean.stride(1), part.K, part.P * part.BLOCK_S, part.S, high, 1 / part.S - high)


class _Sizes(NamedTuple):
    """The sizes of a batch and of its ghost batches."""

    batch_size: int
    channels: int
    ghosts: int
    size: int
    last: int

    @classmethod
    def of(cls, x: Tensor, plan: Plan) -> "_Sizes":
        """Divide the batch into ghost batches."""
        contributors = plan.normalizer.contributors
        assert isinstance(contributors, GhostBatch | Exclusive)
        size, last = first_and_last_size(len(x), contributors.ghost_size)
        return cls(len(x), x.shape[1], (len(x) - last) // size + 1, size, last)

    def shares(self, excluded: int = 0) -> tuple[float, float]:
        """Return the reciprocals of the sizes of the first and the last ghost batch, without the excluded samples."""
        return 1 / max(self.size - excluded, 1), 1 / max(self.last - excluded, 1)


class _Updated(NamedTuple):
    """The update of running statistics: what the decide kernel and the transform take, which commits it."""

    argument: tuple[Any, ...] | None
    momentum: float
    bessel: float
    ghosts: bool

    @classmethod
    def of(cls, x: Tensor, update: Update | None) -> "_Updated":
        """Allocate the updated statistics."""
        if update is None:
            return cls(None, 0.0, 1.0, False)
        (mean, var, count, momentum), (ghosts, unbiased) = update
        buffers = x.new_empty((2, x.shape[1]), dtype=torch.float64), _vector(mean), _vector(var), count
        values = x.numel() // x.shape[1]
        bessel = values / (values - 1) if unbiased else 1.0
        return cls(buffers, math.nan if momentum is None else momentum, bessel, ghosts)


class _Renorm(NamedTuple):
    """Batch renormalization: what the decide kernel takes, and the tables that it writes."""

    argument: tuple[Any, ...] | None = None
    limits: tuple[float, float] = (1.0, 0.0)
    correction: Correction | None = None
    reference: Reference | None = None

    @classmethod
    def of(cls, x: Tensor, plan: Plan) -> "_Renorm":
        """Allocate r and d, and copies of the running statistics and limits that they depend on."""
        if plan.reference is None:
            return cls()
        channels, dtype = x.shape[1], arithmetic_dtype(x)
        made = Correction(x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype))
        if isinstance(plan.reference, Reference):
            (mean, var), limits = plan.reference
            given: tuple[Any, ...] = (_vector(mean), _vector(var), limits, *made, None, 0, 0, None)
            return cls(given, (1.0, 0.0), made, plan.reference)
        running, (r_max, d_max, warmup, transition) = plan.reference
        known = Reference(Moments(*(table[0] for table in _two_tables(x, 1))), x.new_empty(2, dtype=torch.float64))
        given = (_vector(running.mean), _vector(running.var), None, *made, running.num_batches_tracked, warmup)
        return cls((*given, transition, (*known.moments, known.limits)), (r_max, d_max), made, known)


def is_plain(x: Tensor) -> bool:
    """Return whether a kernel can be given the address of this tensor."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_neg()


def _covers(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> bool:
    """Return whether the kernels cover a plan, and can be given the addresses of all tensors of a call."""
    contributors, noise, reference = plan.normalizer.contributors, plan.noise, plan.reference
    if type(contributors) not in (GhostBatch, Exclusive):
        return False
    if noise is not None or reference is not None:
        whole = type(contributors) is GhostBatch and contributors.pools(len(x)) == 1
        if not whole or (noise is not None and reference is not None):
            return False
    if noise is not None and not (type(noise) in (Drawn, Seeded) and _draws_are_plain(x, noise)):
        return False
    buffers: tuple[Any, ...] = ()
    if isinstance(reference, Reference):
        if reference.limits is None:
            return False
        buffers = (*reference.moments, reference.limits)
    elif reference is not None:
        buffers = reference.running[:3]
    if plan.update is not None:
        buffers += plan.update.running[:3]
        if plan.update.population.ghosts and type(contributors) is not GhostBatch:
            return False
    return all(is_plain(tensor) and tensor.device == x.device for tensor in _present(weight, bias, *buffers))


def _draws_are_plain(x: Tensor, noise: Noise) -> bool:
    drawn = noise.indices if isinstance(noise, Drawn) else noise.seed  # type: ignore[attr-defined]
    return is_plain(drawn) and drawn.device == x.device


def _noise_tables(x: Tensor, noise: Noise) -> NoiseTables:
    return NoiseTables.allocated(noise, (x.shape[0], x.shape[1]), arithmetic_dtype(x), x.device)


def _two_tables(x: Tensor, rows: int) -> Moments:
    """Allocate tables of means and variances, each in memory of its own, as outputs of a registered op must be."""
    mean, var = (x.new_empty((rows, x.shape[1]), dtype=torch.float64) for _ in range(2))
    return Moments(mean, var)


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _vector(vector: Tensor | None) -> tuple[Tensor, int] | None:
    return None if vector is None else (vector, vector.stride(0))


def _strided(table: Tensor) -> tuple[Tensor, int, int]:
    return table, table.stride(0), table.stride(1)

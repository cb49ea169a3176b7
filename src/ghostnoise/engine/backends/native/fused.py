"""All steps of a normalizer's forward pass, of its backward pass, or of noise alone, in one call of the C++ library.

It covers ghost batches and exclusive ghost batches, and if all samples share one pool also noise that is drawn from the
batch or, with a seed, from a law, or a correction towards running statistics. The library runs the same functions in
the same order as the steps, so the results are the same to the last bit. It also updates the running statistics.
"""

import functools

import torch
from torch import Tensor

from ghostnoise.engine.backends.base import (
    NO_NOISE,
    Affine,
    Gradients,
    NoiseTables,
    Normalized,
    Saved,
    folded_weight,
)
from ghostnoise.engine.backends.native import abi
from ghostnoise.engine.backends.native.gate import (
    CPU,
    NotAdmitted,
    addresses,
    empty,
    made_at,
    single_position,
    table,
)
from ghostnoise.engine.backends.native.geometry import Geometry, backward_tensors, forward_tensors
from ghostnoise.engine.backends.native.library import DTYPES, run
from ghostnoise.engine.plan import Correction, Drawn, Noise, Normalizer, Plan, Tables
from ghostnoise.engine.running import Running, Update
from ghostnoise.statistics.chi_square import INTERVALS, root_table
from ghostnoise.statistics.laws import Law, LawDraws
from ghostnoise.statistics.moments import Moments, arithmetic_dtype
from ghostnoise.statistics.samples import Exclusive, GhostBatch

COVERED = (GhostBatch, Exclusive)
NOT_MADE = Moments(empty((0, 1), torch.float64), empty((0, 1), torch.float64))
FLOAT64 = DTYPES[torch.float64]
_pack_forward, _pack_backward, _pack_noise = map(abi.packer, ("ForwardCall", "BackwardCall", "NoiseCall"))
ONE_POOL = Normalizer(GhostBatch(), 0.0)
NO_DRAWS: tuple[float, ...] = (0, 0, 0, 0, 0, 0.0)
NO_CORRECTION: tuple[int, ...] = (0, 0, 0, 0, 0)
NOT_UPDATED: tuple[float, ...] = (0, 0.0, 0, 0, 0, 0, 0.0)
NOT_RUNNING = Running(None, None)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Run all steps of the forward pass; None for plans that are not covered."""
    reference = None
    if plan.reference is not None:
        plan = plan.evaluated(x.device)
        reference = plan.known
    normalizer, noise, _, update, _ = plan
    if type(normalizer.contributors) not in COVERED or not (noise is None or type(noise) is Drawn or _in_law(noise)):
        return None
    running = NOT_RUNNING if update is None else update.running
    alive: list[Tensor | None] = []
    geometry, buffers, at = forward_tensors(x, weight, bias, running, normalizer, alive)
    batch_size, channels, pools, dtype = geometry.batch_size, geometry.channels, geometry.pools, geometry.dtype
    if pools != 1 and (noise is not None or plan.corrects):
        return None
    noisy, drawn = NO_NOISE, NO_DRAWS
    correction, corrects = None, NO_CORRECTION
    if noise is not None:
        noisy = NoiseTables.allocated(noise, (batch_size, channels), dtype, CPU)
        drawn = _draws(noise, geometry, alive)
    if reference is not None and reference.limits is not None:
        correction, corrects = _correction(reference.moments, reference.limits, geometry, alive)
    moments, means = _means(x, geometry)
    updated = NOT_UPDATED
    if update is not None and buffers is not None:
        updated = _update(update, batch_size * geometry.positions, buffers, at[3:])
    # Of the moments of samples and those of pools, only the ones that the backward pass needs are made.
    pooled, pooled_at = NOT_MADE, 0
    if not geometry.exclusive:
        tables = torch.empty(2, pools, channels, dtype=torch.float64, device=CPU)
        pooled, pooled_at = Moments(*tables.unbind()), made_at(tables)
    y = torch.empty_like(x)
    call = _pack_forward(
        geometry.code,
        geometry.at,
        *at[:3],
        normalizer.eps,
        float(normalizer.min_std) ** 2,
        *drawn,
        *means,
        pooled_at,
        *((0, 0) if noise is None else addresses(*noisy)),
        *corrects,
        *updated,
        made_at(y),
    )
    run("fused_forward", call)
    if updated is not NOT_UPDATED:
        torch.autograd.graph.increment_version([one for one in running[:3] if one is not None])
    return Normalized(y, moments, pooled, noisy, correction, reference, updated is not NOT_UPDATED)


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Run all steps of the backward pass; None for plans that are not covered."""
    normalizer, correction = plan.normalizer, saved.correction
    if type(normalizer.contributors) not in COVERED:
        return None
    if correction is not None:
        weight = folded_weight(correction, weight, arithmetic_dtype(x))
    alive: list[Tensor | None] = []
    geometry, means, at = backward_tensors(dy, x, weight, saved, normalizer, alive)
    parameters = torch.empty(2, geometry.channels, dtype=geometry.dtype, device=CPU)
    dx = torch.empty_like(x) if needs_x else None
    call = _pack_backward(
        geometry.code,
        geometry.at,
        *at[:3],
        normalizer.eps,
        float(normalizer.min_std) ** 2,
        means,
        *at[3:],
        made_at(parameters),
        0 if dx is None else made_at(dx),
    )
    run("fused_backward", call)
    made = Gradients(dx, *parameters.unbind())
    return made if correction is None else made.unfolded(correction)


def noise_alone(x: Tensor, noise: Noise) -> Affine | None:
    """Measure x and make the tables of noise alone; None for noise that is not covered."""
    if type(noise) is not Drawn:
        return None
    alive: list[Tensor | None] = []
    geometry, _, at = forward_tensors(x, None, None, NOT_RUNNING, ONE_POOL, alive)
    indices, drawn, *_, eps = _draws(noise, geometry, alive)
    shape, dtype = (geometry.batch_size, geometry.channels), geometry.dtype
    m, k = (empty(shape, dtype) if has else None for has in (noise.shifts, noise.scales))
    run("fused_noise", _pack_noise(geometry.code, geometry.at, at[0], indices, drawn, eps, *addresses(m, k)))
    zero = _zeros(geometry.channels, dtype)
    return Affine(zero if m is None else m, torch.ones_like(zero) if k is None else k, zero)


@functools.lru_cache(maxsize=256)
def _zeros(channels: int, dtype: torch.dtype) -> Tensor:
    """Return a table of zeros (1, C), which nothing writes to."""
    with torch.inference_mode(False):  # later calls may run outside of it
        return torch.zeros((1, channels), dtype=dtype, device=CPU)


def _means(x: Tensor, geometry: Geometry) -> tuple[Moments, tuple[int, int, int]]:
    """Return the moments of samples that are made, and the dtype and the addresses that the library takes for them."""
    exclusive, dtype = geometry.exclusive, geometry.dtype
    if geometry.positions > 1:
        if not exclusive:
            return NOT_MADE, (FLOAT64, 0, 0)
        moments = Moments(*empty((2, geometry.batch_size, geometry.channels), torch.float64).unbind())
        return moments, (FLOAT64, made_at(moments.mean), made_at(moments.var))
    if not exclusive:  # the means are x itself; the library copies them where it needs another dtype or layout
        return NOT_MADE, (DTYPES[dtype], made_at(x) if x.dtype is dtype and x.is_contiguous() else 0, 0)
    moments = single_position(x)
    return moments, (DTYPES[dtype], made_at(moments.mean), 0)


def _draws(noise: Noise, geometry: Geometry, alive: list[Tensor | None]) -> tuple[float, ...]:
    """Return the arguments for noise that is drawn from the batch, or from a law; `alive` then owns their memory."""
    if isinstance(noise, Tables):
        law = SeededLaw(noise, geometry.positions, geometry.dtype)
        alive += law.alive
        return 0, 0, *law.addresses, float(noise.eps)
    assert isinstance(noise, Drawn)
    if noise.indices.ndim != 2 or noise.indices.shape[1] == 0:
        raise NotAdmitted
    indices = table(noise.indices, torch.int64, (geometry.batch_size, noise.indices.shape[1]))
    alive.append(indices)
    return made_at(indices), indices.shape[1], 0, 0, 0, float(noise.eps)


def _correction(
    moments: Moments, limits: Tensor, geometry: Geometry, alive: list[Tensor | None]
) -> tuple[Correction, tuple[int, ...]]:
    """Return r and d, which the library makes, and its arguments for them; `alive` then owns the others' memory."""
    correction = Correction(*empty((2, geometry.channels), geometry.dtype).unbind())
    known = [table(one, torch.float64, (geometry.channels,)) for one in moments]
    known.append(table(limits, torch.float64, (2,)))
    alive += known
    return correction, (*addresses(*known), *addresses(*correction))


def _in_law(noise: Noise) -> bool:
    """Whether noise is drawn from a law for the normalized x, from a seed."""
    return type(noise) is Tables and noise.normalized and not isinstance(noise.draws, LawDraws)


class SeededLaw:
    """The seed and the law of noise as arguments of the library; `alive` owns their memory."""

    def __init__(self, noise: Tables, spatial: int, dtype: torch.dtype) -> None:
        assert isinstance(noise.draws, Tensor)
        self.alive = table(noise.draws, torch.int64, (1,)), *_law_tables(noise.law, spatial, dtype)
        self.addresses = tuple(addresses(*self.alive))


@functools.lru_cache(maxsize=256)
def _law_tables(law: Law, spatial: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers of the C++ struct Law in their order, and its tables."""
    (between, samples), (within, values) = law.degrees(spatial)
    exact, conv = law.dof == "exact", law.law == "conv"
    shares = (conv / values, 1 / samples, exact / spatial, between / samples, within / values)
    tables = empty((2, 4, INTERVALS), dtype).zero_()
    for made, degrees in zip(tables, (between, within), strict=True):
        if degrees:
            made.copy_(torch.from_numpy(root_table(degrees)))
    return torch.tensor([spatial if conv else 0, *shares], dtype=torch.float64, device=CPU), tables


def _update(update: Update, values: int, buffers: int, at: list[int]) -> tuple[float, ...]:
    """Return the arguments for the update of the buffers at these addresses, whose dtype has the code `buffers`."""
    momentum, (ghosts, unbiased) = update.running.momentum, update.population
    if momentum is None and update.running.num_batches_tracked is None:  # an average needs the count
        return NOT_UPDATED
    bessel = values / (values - 1) if unbiased else 1.0
    return 2 if ghosts else 1, bessel, buffers, *at, -1.0 if momentum is None else momentum

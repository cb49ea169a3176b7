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
    Backend,
    Gradients,
    NoiseTables,
    Normalized,
    Prepared,
    Saved,
    State,
)
from ghostnoise.engine.backends.native import abi
from ghostnoise.engine.backends.native.gate import (
    CPU,
    Alike,
    NotAdmitted,
    addresses,
    empty,
    made_at,
    single_position,
    table,
)
from ghostnoise.engine.backends.native.geometry import Geometry, backward_tensors, forward_tensors, layer_tensors
from ghostnoise.engine.backends.native.library import DTYPES, run
from ghostnoise.engine.plan import Correction, Drawn, Limits, LiveReference, Noise, Normalizer, Plan, Reference, Tables
from ghostnoise.engine.running import Running, Update
from ghostnoise.statistics.chi_square import INTERVALS, root_table
from ghostnoise.statistics.laws import Law, LawDraws
from ghostnoise.statistics.moments import Moments
from ghostnoise.statistics.samples import Exclusive, GhostBatch

COVERED = (GhostBatch, Exclusive)
NOT_MADE = Moments(empty((0, 1), torch.float64), empty((0, 1), torch.float64))
FLOAT64 = DTYPES[torch.float64]
_pack_forward, _pack_backward, _pack_noise = map(abi.packer, ("ForwardCall", "BackwardCall", "NoiseCall"))
ONE_POOL = Normalizer(GhostBatch(), 0.0)
NO_DRAWS: tuple[float, ...] = (0, 0, 0, 0, 0, 0.0)
NO_CORRECTION: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
NOT_UPDATED: tuple[tuple[float, ...], float] = (0, 0.0, 0), 0.0
NOWHERE = [0, 0]
NOT_RUNNING = Running(None, None)


class Launch:
    """A forward pass over tensors of one geometry: all arguments of the library that stay the same from call to call.

    It does not refer to tensors of its callers.
    """

    __slots__ = ("factor", "floor", "geometry", "kept", "samples", "update")

    def __init__(self, geometry: Geometry, plan: Plan, buffers: int | None) -> None:
        normalizer, update = plan.normalizer, plan.update
        self.geometry, self.samples = geometry, (geometry.batch_size, geometry.channels)
        self.floor = float(normalizer.eps), float(normalizer.min_std) ** 2
        # Of the moments of samples and those of pools, only the ones that the backward pass needs are made. The means
        # of samples with a single position are x itself.
        self.kept = None if geometry.exclusive and geometry.positions == 1 else (geometry.pools, geometry.channels)
        self.update, self.factor = NOT_UPDATED
        if update is not None and buffers is not None:
            self.update, self.factor = _update(update, geometry.batch_size * geometry.positions, buffers)

    def __call__(
        self, x: Tensor, at: list[int], running: Running, noise: Noise | None, reference: Reference | Limits | None
    ) -> Normalized:
        """Run all steps. `at` has the addresses of x, weight, bias and the buffers, which are 0 for None.

        If the reference is given by limits alone, it is a copy of the running statistics, which are then updated.
        """
        geometry = self.geometry
        alive: list[Tensor | None] = []
        noisy, drawn, noisy_at = NO_NOISE, NO_DRAWS, NOWHERE
        if noise is not None:
            noisy = NoiseTables.allocated(noise, self.samples, geometry.dtype, CPU)
            drawn, noisy_at = _draws(noise, geometry, alive), addresses(*noisy)
        correction, known, corrects = None, None, NO_CORRECTION
        if reference is not None:
            correction, known, corrects = _correction(reference, running, geometry, alive)
        moments = pooled = NOT_MADE
        means, pooled_at = (FLOAT64, 0, 0), NOWHERE
        if self.kept is not None:
            kept = Moments(empty(self.kept, torch.float64), empty(self.kept, torch.float64))
            if geometry.exclusive:
                moments, means = kept, (FLOAT64, made_at(kept.mean), made_at(kept.var))
            else:
                pooled, pooled_at = kept, addresses(*kept)
        if geometry.positions == 1:
            moments, means = _single_means(x, geometry)
        y = torch.empty_like(x)
        call = _pack_forward(
            geometry.code,
            geometry.at,
            *at[:3],
            *self.floor,
            *drawn,
            *means,
            *pooled_at,
            *noisy_at,
            *corrects,
            *self.update,
            *at[3:],
            self.factor,
            made_at(y),
        )
        run("fused_forward", call)
        updated = self.update[0] != 0
        if updated:
            torch.autograd.graph.increment_version([one for one in running[:3] if one is not None])
        return Normalized(y, moments, pooled, noisy, correction, known, updated)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
    """Run all steps of the forward pass; None for plans that are not covered."""
    if type(plan.normalizer.contributors) not in COVERED:
        return None
    running = NOT_RUNNING if plan.update is None else plan.update.running
    alive: list[Tensor | None] = []
    geometry, buffers, at = forward_tensors(x, weight, bias, running, plan.normalizer, alive)
    if not _covers(plan, geometry):
        return None
    launch, live = Launch(geometry, plan, buffers), plan.reference
    if isinstance(live, LiveReference) and launch.update is not NOT_UPDATED[0]:
        return launch(x, at, running, plan.noise, live.schedule)
    return launch(x, at, running, plan.noise, plan.evaluated(CPU).known)


def _covers(plan: Plan, geometry: Geometry) -> bool:
    noise = plan.noise
    if noise is None and not plan.corrects:
        return True
    return geometry.pools == 1 and (noise is None or type(noise) is Drawn or _in_law(noise))


class NativePrepared(Prepared):
    """A forward pass in one call of the library, for tensors with the metadata of the first ones."""

    __slots__ = ("alike", "launch")

    def __init__(self, backend: Backend, x: Tensor, state: State, plan: Plan) -> None:
        super().__init__(backend, plan)
        if type(plan.normalizer.contributors) not in COVERED:
            raise NotAdmitted
        weight, bias, mean, var, count = state
        alive: list[Tensor | None] = []
        geometry, dtype, _ = forward_tensors(x, weight, bias, Running(mean, var, count), plan.normalizer, alive)
        copied = alive and not (alive[0] is weight and alive[1] is bias)
        if copied or dtype is None or not _covers(plan, geometry):
            raise NotAdmitted
        tensors = layer_tensors(x, state)
        self.alike, self.launch = Alike(tensors), Launch(geometry, plan, dtype)
        if self.alike.addresses(tensors) is None:
            raise NotAdmitted

    def admitted(self, x: Tensor, state: State) -> list[int] | None:
        """Return the addresses of x and the state of the layer; None if their metadata differ."""
        return self.alike.addresses(layer_tensors(x, state))

    def forward(self, x: Tensor, state: State, at: list[int], noise: Noise | None) -> Normalized:
        """Run all steps of the forward pass."""
        running = Running(*state[2:])  # the momentum is part of the launch
        return self.launch(x, at, running, noise, self.limits)


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool) -> Gradients | None:
    """Run all steps of the backward pass; None for plans that are not covered."""
    normalizer = plan.normalizer
    if type(normalizer.contributors) not in COVERED:
        return None
    alive: list[Tensor | None] = []
    geometry, means, at = backward_tensors(dy, x, weight, saved, normalizer, alive)
    channels = (geometry.channels,)
    g_weight, g_bias = empty(channels, geometry.dtype), empty(channels, geometry.dtype)
    dx = torch.empty_like(x) if needs_x else None
    call = _pack_backward(
        geometry.code,
        geometry.at,
        *at[:3],
        normalizer.eps,
        float(normalizer.min_std) ** 2,
        means,
        *at[3:],
        *addresses(g_weight, g_bias, dx),
    )
    run("fused_backward", call)
    return Gradients(dx, g_weight, g_bias)


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


def _single_means(x: Tensor, geometry: Geometry) -> tuple[Moments, tuple[int, int, int]]:
    """Return the moments of samples with a single position, and the dtype and the addresses that the library takes."""
    code = DTYPES[geometry.dtype]
    if not geometry.exclusive:  # the library copies x where it needs another dtype or layout
        return NOT_MADE, (code, made_at(x) if x.dtype is geometry.dtype and x.is_contiguous() else 0, 0)
    moments = single_position(x)
    return moments, (code, made_at(moments.mean), 0)


def _draws(noise: Noise, geometry: Geometry, alive: list[Tensor | None]) -> tuple[float, ...]:
    """Return the arguments for noise that is drawn from the batch, or from a law; `alive` then owns their memory."""
    if isinstance(noise, Tables):
        law = SeededLaw(noise, geometry.positions, geometry.dtype)
        alive += law.alive
        return 0, 0, *law.addresses, noise.eps
    assert isinstance(noise, Drawn)
    shape = noise.indices.shape
    if len(shape) != 2 or shape[1] == 0 or shape[0] != geometry.batch_size:
        raise NotAdmitted
    indices = table(noise.indices, torch.int64, shape)
    alive.append(indices)
    return made_at(indices), shape[1], 0, 0, 0, noise.eps


def _correction(
    reference: Reference | Limits, running: Running, geometry: Geometry, alive: list[Tensor | None]
) -> tuple[Correction | None, Reference, tuple[int, ...]]:
    """Return r and d and the reference, which the library makes, and its arguments; `alive` then owns their memory."""
    shape, live = (geometry.channels,), isinstance(reference, Limits)
    if isinstance(reference, Limits):
        mean, var = empty(shape, torch.float64), empty(shape, torch.float64)
        limits = reference.at(running.num_batches_tracked, CPU)
        reference = Reference(Moments(mean, var), limits)
    elif reference.limits is None:
        return None, reference, NO_CORRECTION
    else:
        mean, var = (table(one, torch.float64, shape) for one in reference.moments)
        limits = table(reference.limits, torch.float64, (2,))
    alive += [mean, var, limits]
    correction = Correction(empty(shape, geometry.dtype), empty(shape, geometry.dtype))
    return correction, reference, (live, *addresses(mean, var, limits, *correction))


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


def _update(update: Update, values: int, buffers: int) -> tuple[tuple[float, ...], float]:
    """Return the arguments for the update of buffers whose dtype has this code: before and after their addresses."""
    momentum, (ghosts, unbiased) = update.running.momentum, update.population
    if momentum is None and update.running.num_batches_tracked is None:  # an average needs the count
        return NOT_UPDATED
    bessel = values / (values - 1) if unbiased else 1.0
    return (2 if ghosts else 1, bessel, buffers), -1.0 if momentum is None else momentum

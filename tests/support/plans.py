"""Plans of every kind for the engine, for a batch of 6 samples with 2 channels."""

from dataclasses import dataclass

import torch
from ghostnoise.engine.plan import Drawn, DrawnWithHistory, Noise, Normalizer, Partition, Plan, Reference, Tables
from ghostnoise.statistics.moments import Moments, Stored
from ghostnoise.statistics.samples import Exclusive, ExclusiveMixture, GhostBatch, Mixture, SampleItself

from ghostnoise.laws import Law

BATCH, CHANNELS = 6, 2
EPS, NOISE_EPS = 1e-5, 1e-3
RUNNING = Moments(torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([0.9, 1.7], dtype=torch.float64))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def indices(ghost_size=5):
    return torch.randint(BATCH, (BATCH, ghost_size), generator=seeded())


def with_history(components="both", rows=4, absent=True):
    """Draws from the batch and from `rows` stored samples, of which the oldest is absent, or not drawn at least."""
    mean, var = (torch.rand(rows, CHANNELS, generator=seeded(each)) + 0.5 for each in (3, 4))
    counts = torch.tensor([0.0, *(each + 2.0 for each in range(rows - 1))])
    drawn = torch.randint(BATCH + rows - 1, (BATCH, 5), generator=seeded())
    drawn += drawn >= BATCH  # the oldest is not drawn
    return DrawnWithHistory(NOISE_EPS, components, drawn, Stored(mean, var, counts), weighted=absent)


def partition(ghost_size, components="both"):
    return Partition(NOISE_EPS, components, torch.randperm(BATCH, generator=seeded()), ghost_size)


def tables(law="fc", spatial=6, components="both", normalized=True, dof="paper"):
    drawn_by = Law(5, law, dof)
    draws = drawn_by.draw((BATCH, CHANNELS), spatial, torch.device("cpu"), seeded())
    return Tables(NOISE_EPS, components, drawn_by, draws, normalized)


def seeded_tables(law="fc", components="both", normalized=True, dof="paper"):
    return Tables(NOISE_EPS, components, Law(5, law, dof), torch.tensor([123_456_789_012_345]), normalized)


def limits(r_max=1.1, d_max=0.2):
    """Limits that clip some channels and not others."""
    return torch.tensor([r_max, d_max], dtype=torch.float64)


@dataclass(frozen=True)
class ConstantNoise(Noise):
    """Ghost batches of the normalized x that do not depend on x, as gradcheck needs them."""

    def var(self, batch):
        return batch.unit

    def ghost_moments(self, batch):
        mean, var = (torch.rand(BATCH, CHANNELS, dtype=torch.float64, generator=seeded(each)) + 0.5 for each in (1, 2))
        return Moments(mean * batch.unit.sqrt(), var * batch.unit)


def normalizer(contributors, min_std=0.0):
    return Normalizer(contributors, EPS, min_std)


NORMALIZERS = {
    "bn": Plan(normalizer(GhostBatch())),
    "gbn": Plan(normalizer(GhostBatch(3))),
    "ragged gbn": Plan(normalizer(GhostBatch(4))),
    "xbn": Plan(normalizer(Exclusive(3))),
    "ragged xbn": Plan(normalizer(Exclusive(4))),
    "floored xbn": Plan(normalizer(Exclusive(), 0.9)),
    "self-weighted xbn": Plan(normalizer(ExclusiveMixture(4, 0.2))),
    "instance": Plan(normalizer(SampleItself())),
    "mixture": Plan(normalizer(Mixture(0.2)), None, Reference(RUNNING)),
}
NOISY = {
    "drawn": Plan(normalizer(GhostBatch()), Drawn(NOISE_EPS, "both", indices())),
    "drawn shift": Plan(normalizer(GhostBatch()), Drawn(NOISE_EPS, "shift", indices())),
    "drawn scale": Plan(normalizer(GhostBatch()), Drawn(NOISE_EPS, "scale", indices())),
    "drawn with history": Plan(normalizer(GhostBatch()), with_history()),
    "drawn shift with history": Plan(normalizer(GhostBatch()), with_history("shift")),
    "drawn with full history": Plan(normalizer(GhostBatch()), with_history(absent=False)),
    "partition": Plan(normalizer(GhostBatch()), partition(3)),
    "ragged partition": Plan(normalizer(GhostBatch()), partition(4)),
    "shift of a partition": Plan(normalizer(GhostBatch()), partition(2, "shift")),
    "law fc": Plan(normalizer(GhostBatch()), tables("fc")),
    "law conv": Plan(normalizer(GhostBatch()), tables("conv")),
    "seeded law fc": Plan(normalizer(GhostBatch()), seeded_tables("fc")),
    "seeded law conv": Plan(normalizer(GhostBatch()), seeded_tables("conv", dof="exact")),
}
NOISY_EXCLUSIVE = {
    "drawn after xbn": Plan(normalizer(Exclusive()), Drawn(NOISE_EPS, "both", indices())),
    "drawn shift after xbn": Plan(normalizer(Exclusive()), Drawn(NOISE_EPS, "shift", indices())),
    "drawn scale after xbn": Plan(normalizer(Exclusive(3)), Drawn(NOISE_EPS, "scale", indices())),
    "drawn with history after xbn": Plan(normalizer(Exclusive()), with_history()),
    "drawn after self-weighted xbn": Plan(normalizer(ExclusiveMixture(3, 0.2)), Drawn(NOISE_EPS, "both", indices())),
    "partition after xbn": Plan(normalizer(Exclusive()), partition(2)),
    "law after xbn": Plan(normalizer(Exclusive()), tables("fc")),
    "seeded law after xbn": Plan(normalizer(Exclusive()), seeded_tables("conv")),
}
CORRECTED = {
    "corrected": Plan(normalizer(GhostBatch()), None, Reference(RUNNING, limits())),
    "uncorrected": Plan(normalizer(GhostBatch()), None, Reference(RUNNING, limits(1.0, 0.0))),
}
PLANS = NORMALIZERS | NOISY | NOISY_EXCLUSIVE | CORRECTED


def inputs(dtype=torch.float64, shape=(BATCH, CHANNELS, 3, 2), layout=torch.contiguous_format):
    """Return x, weight and bias, which require gradients."""
    generator = seeded(2)
    x, weight, bias = (torch.randn(each, dtype=torch.float64, generator=generator) for each in (shape, (2,), (2,)))
    x = x.to(dtype).contiguous(memory_format=layout) if len(shape) == 4 else x.to(dtype)
    return x.requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()

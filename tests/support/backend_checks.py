"""Checks that every backend must pass: its operations equal naive float64 formulas."""

from dataclasses import dataclass

import torch
from ghostnoise.engine.backends.aten import ATEN
from ghostnoise.engine.backends.base import NO_NOISE, Affine, Coefficients, NoiseTables
from ghostnoise.engine.plan import Batch, Drawn, Noise, Normalizer, Tables
from ghostnoise.statistics.moments import Moments, arithmetic_dtype
from ghostnoise.statistics.samples import Exclusive, GhostBatch, LinearTerm, ghost_sizes, pool_all, pool_drawn
from hypothesis import strategies as st

from ghostnoise.laws import Law
from support import reference
from support.closeness import assert_close
from support.inputs import LAYOUTS, lay_out

ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 140), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
)
layouts = st.sampled_from([*LAYOUTS, "channel slice"])
upstreams = st.sampled_from([*LAYOUTS, "expanded"])
pool_sizes = st.integers(1, 5)
dtypes = st.sampled_from(ALL_DTYPES)


def values(shape, dtype, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if layout == "channel slice":
        wide = torch.randn(shape[0], 2 * shape[1], *shape[2:], dtype=torch.float64, generator=generator)
        return wide.to(dtype)[:, ::2]
    return lay_out(torch.randn(shape, dtype=torch.float64, generator=generator).add_(0.5).to(dtype), layout)


def tables(x, seed, count, samples_per_pool=1):
    """Return tables (R, C), with one row per pool."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(ghost_sizes(x.shape[0], samples_per_pool))
    made = (torch.randn(rows, x.shape[1], dtype=torch.float64, generator=generator) for _ in range(count))
    return [table.to(arithmetic_dtype(x)) for table in made]


def by_sample(table, batch_size, samples_per_pool):
    """Expand (R, C) to (B, C, 1) in float64, by a loop."""
    return torch.stack([table[min(b // samples_per_pool, len(table) - 1)] for b in range(batch_size)]).double()[
        ..., None
    ]


def check_passes(backend, shape, dtype, layout, upstream, samples_per_pool=1, seed=0):
    """The passes over x equal their formulas."""
    x, dy = values(shape, dtype, layout, seed), values(shape, dtype, upstream, seed + 1)
    strides = torch.empty_like(x).stride()
    exact, exact_dy = reference.fold(x), reference.fold(dy)
    loose = 1e-13 if dtype == torch.float64 else 1e-6

    mean, var = backend.moments(x)
    wanted = exact.mean(2)
    squares = ((exact - wanted[..., None]) ** 2).mean(2)
    torch.testing.assert_close(mean.double(), wanted, rtol=0, atol=loose * exact.abs().max().item())
    torch.testing.assert_close(var, squares, rtol=loose, atol=loose**2)

    center, scale, shift, slope = tables(x, seed + 2, 4, samples_per_pool)
    c64, k64, h64, p64 = (by_sample(table, shape[0], samples_per_pool) for table in (center, scale, shift, slope))
    y = backend.transform(x, Affine(center, scale, shift), samples_per_pool)
    assert_close(y, (k64 * (exact - c64) + h64).view(x.shape), magnitude=(k64 * exact).abs().max().item())
    assert y.stride() == strides

    total, moment = backend.gradient_sums(dy, x, center, samples_per_pool)
    for ours, terms in ((total, exact_dy), (moment, exact_dy * (exact - c64))):
        assert ours.dtype == arithmetic_dtype(x)
        bound = loose * terms.abs().sum(2).max().item()
        torch.testing.assert_close(ours.double(), terms.sum(2), rtol=0, atol=bound)

    (gain,) = tables(x, seed + 3, 1)
    for factor in (None, gain):
        dx = backend.input_gradient(dy, x, scale, factor, LinearTerm(center, slope, shift), samples_per_pool)
        both = k64 if factor is None else k64 * gain.double()[..., None]
        terms = (both * exact_dy, p64 * (exact - c64), h64)
        assert_close(dx, sum(terms).view(x.shape), "gradient", max(term.abs().max().item() for term in terms))
        assert dx.stride() == strides

    for own, exact_own in ((gain, gain.double()[..., None]), (scale[:1], scale[:1].double()[..., None])):
        alone = backend.scale_gradient(dy, own)
        assert_close(alone, (exact_own * exact_dy).view(x.shape), "gradient")
    assert alone.dtype == dtype


def check_draws(backend, rows, drawn, channels, dtype):
    """The moments of drawn samples equal those of a naive loop."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, 3, dtype=torch.float64, generator=generator) + 2
    indices = torch.randint(rows, (rows, drawn), generator=generator)
    around = x.mean((0, 2)).unsqueeze(0)
    mean, var = backend.pool_drawn(Moments(x.mean(2), x.var(2, correction=0)), around, indices, None, dtype)
    assert mean.dtype == var.dtype == dtype
    for k in range(rows):
        wanted = reference.statistics(x[indices[k]])
        assert_close(mean[k], wanted[0] - around[0], magnitude=2)
        assert_close(var[k], wanted[1], magnitude=1)


@dataclass(frozen=True)
class GivenNoise(Noise):
    """Noise from ghost moments that are given."""

    moments: Moments

    def ghost_moments(self, batch):
        return self.moments


def check_tables(backend, dtype, batch_size, channels, samples_per_pool, components, affine, min_std):
    """Every operation on tables equals that of `aten` in float64, given the same numbers."""
    generator = torch.Generator().manual_seed(batch_size)

    def random(*shape, of=dtype):
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(of)

    rows = len(ghost_sizes(batch_size, samples_per_pool))
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}

    def agree(ours, theirs):
        for actual, expected in zip(ours, theirs, strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                torch.testing.assert_close(actual.double(), expected.double(), **close)

    stats = Moments(random(rows, channels, of=torch.float64) + 100, random(rows, channels, of=torch.float64).square())
    weight, bias = (random(channels), random(channels)) if affine else (None, None)
    normalizer, whole_batch = Normalizer(Exclusive(), 1e-5, min_std), Normalizer(GhostBatch(), 1e-5)
    given = backend.coefficients(normalizer, stats, weight, bias, dtype)
    wide = ATEN.coefficients(normalizer, stats, weight, bias, torch.float64)
    agree(given[2:4], wide[2:4])
    assert (given.center.double() - given.rounding.double() - stats.mean).abs().max() < 1e-11
    agree([given.shift], [ATEN.coefficients(normalizer, stats, weight, bias, dtype).shift])

    own = Moments(random(batch_size, channels, of=torch.float64), random(batch_size, channels, of=torch.float64) ** 2)
    whole = pool_all(*own)
    one = backend.coefficients(whole_batch, whole, weight, bias, dtype)
    batch = Batch(own, whole, one.rstd.double().square().reciprocal(), 3, pool_drawn)
    indices, law = torch.randint(batch_size, (batch_size, 4), generator=generator), Law(4, "conv")
    draws = law.draw((batch_size, channels), 3, torch.device("cpu"), generator)
    for noise in (
        Tables(1e-3, components, law, draws, True),
        Tables(1e-3, components, law, draws, False),
        Tables(1e-3, components, law, torch.tensor([2**62 + 7]), True),
        Tables(1e-3, components, Law(1, "fc", "exact"), torch.tensor([8]), False),
        GivenNoise(1e-3, components, Moments(random(batch_size, channels), random(batch_size, channels).square())),
        Drawn(1e-3, components, indices),
    ):
        agree(backend.noise_tables(noise, batch, dtype), ATEN.noise_tables(noise, batch, torch.float64))
    exact = Coefficients(*(table.double() for table in one))
    (m, k), affine_tables = backend.noisy_affine(noise, batch, one, weight, bias)
    wanted, wanted_affine = ATEN.noisy_affine(noise, batch, exact, weight, bias)
    agree((m, k), wanted)
    agree((table.expand(batch_size, -1) for table in affine_tables[1:]), (
        table.expand(batch_size, -1) for table in wanted_affine[1:]))  # fmt: skip

    total, moment = random(batch_size, channels), random(batch_size, channels)
    for noise_tables, stats_of, how, shared in (
        (NO_NOISE, stats, normalizer, samples_per_pool),
        (NoiseTables(m, k), whole, whole_batch, batch_size),
    ):
        given = backend.coefficients(how, stats_of, weight, None, dtype)
        exact = Coefficients(*(table.double() for table in given))
        ours = backend.statistics_gradient(how, given, stats_of.var, weight, total, moment, noise_tables, shared)
        wide = NoiseTables(*(None if table is None else table.double() for table in noise_tables))
        sums = total.double(), moment.double()
        theirs = ATEN.statistics_gradient(how, exact, stats_of.var, weight, *sums, wide, shared)
        agree((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]))

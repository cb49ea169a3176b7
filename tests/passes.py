"""What every backend's passes must give: naive float64 formulas, over shapes, layouts and dtypes."""

import torch
from hypothesis import strategies as st

import reference
from closeness import assert_close
from ghostnoise import ghosts
from ghostnoise.engine.backends import aten
from ghostnoise.ghosts import ghost_sizes
from ghostnoise.methods import Batch, Noise, batch, exclusive, ghost_noise
from ghostnoise.moments import Moments, Standard, arithmetic_dtype
from inputs import LAYOUTS, lay_out

ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 140), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
)
layouts = st.sampled_from([*LAYOUTS, "channel slice"])
upstreams = st.sampled_from([*LAYOUTS, "expanded"])
row_sizes = st.integers(1, 5)
dtypes = st.sampled_from(ALL_DTYPES)


def values(shape, dtype, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if layout == "channel slice":
        wide = torch.randn(shape[0], 2 * shape[1], *shape[2:], dtype=torch.float64, generator=generator)
        return wide.to(dtype)[:, ::2]
    return lay_out(torch.randn(shape, dtype=torch.float64, generator=generator).add_(0.5).to(dtype), layout)


def tables(x, seed, count, each=1):
    """Tables (R, C), of which each row serves `each` samples; the last one those left over too."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(ghost_sizes(x.shape[0], each))
    made = (torch.randn(rows, x.shape[1], dtype=torch.float64, generator=generator) for _ in range(count))
    return [table.to(arithmetic_dtype(x)) for table in made]


def by_sample(table, batch_size, each):
    """(R, C) as (B, C, 1) in float64, by a loop."""
    return torch.stack([table[min(b // each, len(table) - 1)] for b in range(batch_size)]).double()[..., None]


def check_passes(passes, shape, dtype, layout, upstream, each=1, seed=0):
    x, dy = values(shape, dtype, layout, seed), values(shape, dtype, upstream, seed + 1)
    strides = torch.empty_like(x).stride()
    exact, exact_dy = reference.fold(x), reference.fold(dy)
    loose = 1e-13 if dtype == torch.float64 else 1e-6

    mean, var = passes.moments(x)
    wanted = exact.mean(2)
    squares = ((exact - wanted[..., None]) ** 2).mean(2)
    torch.testing.assert_close(mean.double(), wanted, rtol=0, atol=loose * exact.abs().max().item())
    torch.testing.assert_close(var, squares, rtol=loose, atol=loose**2)

    center, scale, shift, slope = tables(x, seed + 2, 4, each)
    c64, k64, h64, p64 = (by_sample(table, shape[0], each) for table in (center, scale, shift, slope))
    y = passes.transform(x, center, scale, shift, each)
    assert_close(y, (k64 * (exact - c64) + h64).view(x.shape), magnitude=(k64 * exact).abs().max().item())
    assert y.stride() == strides

    total, moment = passes.gradient_sums(dy, x, center, each)
    for ours, terms in ((total, exact_dy), (moment, exact_dy * (exact - c64))):
        assert ours.dtype == arithmetic_dtype(x)
        bound = loose * terms.abs().sum(2).max().item()
        torch.testing.assert_close(ours.double(), terms.sum(2), rtol=0, atol=bound)

    (gain,) = tables(x, seed + 3, 1)
    for factor in (None, gain):
        dx = passes.input_gradient(dy, x, scale, center, slope, shift, each, factor)
        both = k64 if factor is None else k64 * gain.double()[..., None]
        terms = (both * exact_dy, p64 * (exact - c64), h64)
        assert_close(dx, sum(terms).view(x.shape), "gradient", max(term.abs().max().item() for term in terms))
        assert dx.stride() == strides

    for own, exact_own in ((gain, gain.double()[..., None]), (scale[:1], scale[:1].double()[..., None])):
        alone = passes.scale_gradient(dy, own)
        assert_close(alone, (exact_own * exact_dy).view(x.shape), "gradient")
    assert alone.dtype == dtype


def check_draws(passes, rows, drawn, channels, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, 3, dtype=torch.float64, generator=generator) + 2
    indices = torch.randint(rows, (rows, drawn), generator=generator)
    around = x.mean((0, 2)).unsqueeze(0)
    mean, var = passes.draws(Moments(x.mean(2), x.var(2, correction=0)), around, indices, dtype)
    assert mean.dtype == var.dtype == dtype
    for k in range(rows):
        wanted = reference.statistics(x[indices[k]])
        assert_close(mean[k], wanted[0] - around[0], magnitude=2)
        assert_close(var[k], wanted[1], magnitude=1)


def check_tables(passes, dtype, batch_size, channels, each, shift, scale, affine, min_std):
    """Every function between the passes equals that of `aten` in float64, given the same numbers."""
    generator = torch.Generator().manual_seed(batch_size)

    def random(*shape, of=dtype):
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(of)

    rows = len(ghost_sizes(batch_size, each))
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}

    def agree(ours, theirs):
        for actual, expected in zip(ours, theirs, strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                torch.testing.assert_close(actual.double(), expected.double(), **close)

    stats = Moments(random(rows, channels, of=torch.float64) + 100, random(rows, channels, of=torch.float64).square())
    weight, bias = (random(channels), random(channels)) if affine else (None, None)
    normalizer = exclusive(1e-5, None, min_std)
    standard = passes.standardize(normalizer, stats, weight, bias, dtype)
    wide = aten.standardize(normalizer, stats, weight, bias, torch.float64)
    agree(standard[2:4], wide[2:4])
    assert (standard.center.double() - standard.lost.double() - stats.mean).abs().max() < 1e-11
    agree([standard.shift], [aten.standardize(normalizer, stats, weight, bias, dtype).shift])

    own = Moments(random(batch_size, channels, of=torch.float64), random(batch_size, channels, of=torch.float64) ** 2)
    whole = aten.everyone(own, None)
    ghost = Moments(random(batch_size, channels), random(batch_size, channels).square())
    one = passes.standardize(batch(1e-5), whole, weight, bias, dtype)
    seen = Batch(own, whole, one.rstd.double().square().reciprocal(), ghosts.draws)
    indices = torch.randint(batch_size, (batch_size, 4), generator=generator)
    for noise in (Noise(lambda _: ghost, 1e-3, shift, scale), ghost_noise(1e-3, shift, scale, indices)):
        agree(passes.inject(noise, seen, dtype), aten.inject(noise, seen, torch.float64))
    exact = Standard(*(table.double() for table in one))
    (m, k), affine_tables = passes.blend(noise, seen, one, weight, bias)
    wanted, wanted_affine = aten.blend(noise, seen, exact, weight, bias)
    agree((m, k), wanted)
    agree((table.expand(batch_size, -1) for table in affine_tables[1:]), (
        table.expand(batch_size, -1) for table in wanted_affine[1:]))  # fmt: skip

    total, moment = random(batch_size, channels), random(batch_size, channels)
    for tables, stats_of, how, many in (
        ((None, None), stats, normalizer, each),
        ((m, k), whole, batch(1e-5), batch_size),
    ):
        given = passes.standardize(how, stats_of, weight, None, dtype)
        exact = Standard(*(table.double() for table in given))
        ours = passes.pull(how, given, stats_of.var, weight, total, moment, tables, many)
        as_double = [None if table is None else table.double() for table in tables]
        theirs = aten.pull(how, exact, stats_of.var, weight, total.double(), moment.double(), as_double, many)
        agree((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]))

"""What every backend's passes must give: naive float64 formulas, over shapes, layouts and dtypes."""

import torch
from hypothesis import strategies as st

import reference
from closeness import assert_close
from ghostnoise.moments import arithmetic_dtype
from inputs import LAYOUTS, lay_out

ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 140), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
)
layouts = st.sampled_from([*LAYOUTS, "channel slice"])
upstreams = st.sampled_from([*LAYOUTS, "expanded"])
dtypes = st.sampled_from(ALL_DTYPES)


def batch(shape, dtype, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if layout == "channel slice":
        wide = torch.randn(shape[0], 2 * shape[1], *shape[2:], dtype=torch.float64, generator=generator)
        return wide.to(dtype)[:, ::2]
    return lay_out(torch.randn(shape, dtype=torch.float64, generator=generator).add_(0.5).to(dtype), layout)


def tables(x, seed, count, shared):
    """Tables (B, C), or the same row for every sample as an expanded view."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if shared else x.shape[0]
    made = (torch.randn(rows, x.shape[1], dtype=torch.float64, generator=generator) for _ in range(count))
    return [table.to(arithmetic_dtype(x)).expand(x.shape[0], -1) for table in made]


def check_passes(passes, shape, dtype, layout, upstream, shared, seed=0):
    x, dy = batch(shape, dtype, layout, seed), batch(shape, dtype, upstream, seed + 1)
    strides = torch.empty_like(x).stride()
    exact, exact_dy = reference.fold(x), reference.fold(dy)
    loose = 1e-13 if dtype == torch.float64 else 1e-6

    mean, var = passes.moments(x)
    wanted = exact.mean(2)
    squares = ((exact - wanted[..., None]) ** 2).mean(2)
    torch.testing.assert_close(mean.double(), wanted, rtol=0, atol=loose * exact.abs().max().item())
    torch.testing.assert_close(var, squares, rtol=loose, atol=loose**2)

    center, scale, shift, slope = tables(x, seed + 2, 4, shared)
    c64, k64, h64, p64 = (table.double()[..., None] for table in (center, scale, shift, slope))
    y = passes.transform(x, center, scale, shift)
    assert_close(y, (k64 * (exact - c64) + h64).view(x.shape), magnitude=(k64 * exact).abs().max().item())
    assert y.stride() == strides

    total, moment = passes.gradient_sums(dy, x, center)
    for ours, terms in ((total, exact_dy), (moment, exact_dy * (exact - c64))):
        assert ours.dtype == arithmetic_dtype(x)
        bound = loose * terms.abs().sum(2).max().item()
        torch.testing.assert_close(ours.double(), terms.sum(2), rtol=0, atol=bound)

    dx = passes.input_gradient(dy, x, scale, center, slope, shift)
    terms = (k64 * exact_dy, p64 * (exact - c64), h64)
    assert_close(dx, sum(terms).view(x.shape), "gradient", max(term.abs().max().item() for term in terms))
    assert dx.stride() == strides

    alone = passes.scale_gradient(dy, scale)
    assert_close(alone, (k64 * exact_dy).view(x.shape), "gradient")
    assert alone.dtype == dtype


def check_draws(passes, rows, drawn, channels, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, 3, dtype=torch.float64, generator=generator) + 2
    indices = torch.randint(rows, (rows, drawn), generator=generator)
    around = x.mean((0, 2)).unsqueeze(0)
    from ghostnoise.moments import Moments

    mean, var = passes.draws(Moments(x.mean(2), x.var(2, correction=0)), around, indices, dtype)
    assert mean.dtype == var.dtype == dtype
    for k in range(rows):
        wanted = reference.statistics(x[indices[k]])
        assert_close(mean[k], wanted[0] - around[0], magnitude=2)
        assert_close(var[k], wanted[1], magnitude=1)

"""The C++ operators against plain PyTorch in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.engine import ops
from ghostnoise.laws import Law, law_tables
from ghostnoise.tables import Moments

HAS_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("ghostnoise::normalize", "CPU")
pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="the C++ library was not built")

EPS, NOISE_EPS = 1e-5, 1e-3
# The largest error as a share of the largest value.
ERROR = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = tuple(ERROR)
LAYOUTS = ("contiguous", "channels_last", "sliced", "stepped", "movedim", "transposed", "swapped", "expanded")


def arithmetic(dtype):
    return torch.promote_types(dtype, torch.float32)


def close(found, wanted, dtype, factor=1.0):
    assert found.shape == wanted.shape
    size = wanted.abs().max().item() if wanted.numel() else 0
    worst = (found.double() - wanted).abs().max().item() if wanted.numel() else 0
    assert worst <= factor * ERROR[dtype] * max(size, 1e-30), (worst, size)


def arranged(x, layout):
    """Return the values of x in another memory layout."""
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    if layout == "sliced":
        return torch.nn.functional.pad(x, [1, 2] * x.ndim)[(slice(1, -2),) * x.ndim]
    if layout == "stepped":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "movedim":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "swapped" and x.ndim > 3:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x.contiguous()


def per_sample(table, x):
    return table[(...,) + (None,) * (x.ndim - 2)]


def ghost_batches(batch_size, ghost_size):
    size = batch_size if ghost_size is None or batch_size < 2 * ghost_size else ghost_size
    starts = [size * g for g in range(batch_size // size)]
    return list(zip(starts, [*starts[1:], batch_size], strict=True))


def moments(x, samples):
    """Return the mean and the biased variance of some samples, (C,)."""
    values = x[samples].transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1, unbiased=False)


def pooled(x, ghost_size, exclusive):
    """Return the statistics that each sample is normalized with, (B, C)."""
    made = [
        moments(x, [b for b in range(start, end) if b != k or not exclusive])
        for start, end in ghost_batches(len(x), ghost_size)
        for k in range(start, end)
    ]
    return [torch.stack(tables) for tables in zip(*made, strict=True)]


def reference(x, weight, bias, plan):
    """Normalize in plain PyTorch; r, d and the noise are constants for the gradient."""
    mean, var = pooled(x, plan.get("ghost_size"), plan.get("exclusive", False))
    std = (var + EPS).clamp_min(plan.get("min_std", 0) ** 2).sqrt()
    normal = (x - per_sample(mean, x)) / per_sample(std, x)
    if "indices" in plan:
        constant = normal.detach()
        own = moments(constant, list(range(len(x))))[1]
        m, s = (torch.stack(t) for t in zip(*(moments(constant, rows) for rows in plan["indices"]), strict=True))
        m = m if plan["shift"] else torch.zeros_like(m)
        k = ((own + NOISE_EPS) / (s + NOISE_EPS)).sqrt() if plan["scale"] else torch.ones_like(s)
        normal = (normal - per_sample(m, x)) * per_sample(k, x)
    if "r_max" in plan:
        reference_std = (plan["reference_var"].double() + EPS).sqrt()
        r = (std.detach()[:1] / reference_std).clamp(1 / plan["r_max"], plan["r_max"])
        d = ((mean.detach()[:1] - plan["reference_mean"].double()) / reference_std).clamp(-plan["d_max"], plan["d_max"])
        normal = normal * per_sample(r, x) + per_sample(d, x)
    for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
        normal = normal if parameter is None else apply(normal, per_sample(parameter[None], x))
    return normal


def normalize(x, weight=None, bias=None, buffers=(None, None, None), momentum=0.1, running="unbiased", **plan):
    given = {
        **dict.fromkeys(("ghost_size", "indices", "seed", "law", "quantiles", "reference_mean", "reference_var")),
        **dict.fromkeys(("reference_count", "r_max")),
        **{"exclusive": False, "min_std": 0.0, "shift": False, "scale": False, "d_max": 0.0},
        **{"warmup_steps": 0, "transition_steps": 0, "eps": EPS, "noise_eps": NOISE_EPS},
        **plan,
    }
    return ops.normalize(x, weight, bias, *buffers, momentum, running, **given)


def normalize_backward(dy, x, weight, saved, needs_x=True, **plan):
    keys = {"ghost_size": None, "exclusive": False, "min_std": 0.0, "shift": False, "scale": False}
    given = {key: plan.get(key, default) for key, default in keys.items()}
    return ops.normalize_backward(dy, x, weight, *saved, eps=EPS, needs_x=needs_x, **given)


def check(x, weight, bias, dy, **plan):
    """Compare the output, and all gradients, with the reference."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    wanted = reference(*wide, plan)
    given = [t for t in wide if t is not None]
    gradients = iter(torch.autograd.grad(wanted, given, dy.double(), allow_unused=True))
    y, *saved = normalize(x, weight, bias, **plan)
    dx, g_weight, g_bias = normalize_backward(dy, x, weight, saved, **plan)
    assert y.dtype == dx.dtype == x.dtype
    assert g_weight.dtype == g_bias.dtype == arithmetic(x.dtype)
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    close(y, wanted.detach(), x.dtype)
    wide_dx = next(gradients)
    scale = max(wide_dx.abs().max().item(), (dy.double().abs().max() * (y.double().std() + 1)).item() * 1e-2)
    assert (dx.double() - wide_dx).abs().max() <= 4 * ERROR[x.dtype] * scale
    for found, parameter in ((g_weight, weight), (g_bias, bias)):
        if parameter is not None:
            wanted_gradient = next(gradients)
            size = dy.double().abs().sum().item() * max(y.double().abs().max().item(), 1) / x.shape[1]
            assert (found.double() - wanted_gradient).abs().max() <= max(ERROR[x.dtype] * 1e-1, 1e-12) * size
    none, *again = normalize_backward(dy, x, weight, saved, needs_x=False, **plan)
    assert none.shape == (0,)
    assert torch.equal(again[0], g_weight)
    assert torch.equal(again[1], g_bias)
    return y, dx


shapes = st.tuples(
    st.integers(2, 21), st.integers(1, 70), st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 17]), max_size=3)
).map(lambda parts: (parts[0], parts[1], *parts[2]))
# About as many values as float64 and the reference's loops take quickly.
small = shapes.filter(lambda shape: torch.Size(shape).numel() <= 20000)
dtypes, layouts = st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**31)


def positions(shape):
    return torch.Size(shape[2:]).numel()


@given(small, dtypes, layouts, layouts, st.booleans(), st.booleans(), st.booleans(), seeds)
def test_the_passes_equal_plain_pytorch(shape, dtype, layout, dy_layout, whole, narrow, expanded, seed):
    torch.manual_seed(seed)
    x, dy = arranged(torch.randn(shape).to(dtype), layout), arranged(torch.randn(shape).to(dtype), dy_layout)
    rows = 1 if whole else shape[0]
    tables = [torch.randn(rows, shape[1], dtype=arithmetic(dtype) if narrow else torch.float64) for _ in range(4)]
    if expanded:
        tables[1] = torch.randn((), dtype=tables[1].dtype).expand(shape[0], shape[1])
        tables[2] = tables[2].t().contiguous().t()
    center, scale, slope, offset = (table.double() for table in tables)
    wide, wide_dy = x.double(), dy.double()

    mean, var = ops.moments(x)
    assert mean.dtype == var.dtype == torch.float64
    flat = wide.flatten(2) if wide.ndim > 2 else wide.unsqueeze(2)
    half = torch.finfo(dtype).bits == 16
    close(mean, flat.mean(2), torch.float32 if half else dtype)
    assert (var - flat.var(2, unbiased=False)).abs().max() <= 1e-5 * wide.square().max()

    y = ops.transform(x, tables[0], tables[1], tables[3])
    assert y.dtype == dtype
    assert y.stride() == torch.empty_like(x).stride()
    close(y, per_sample(scale, x) * (wide - per_sample(center, x)) + per_sample(offset, x), dtype)

    total, moment = ops.gradient_sums(dy, x, tables[0])
    assert total.dtype == moment.dtype == torch.float64
    spatial = tuple(range(2, x.ndim))
    products = wide_dy * (wide - per_sample(center, x))
    for found, terms in ((total, wide_dy), (moment, products)):
        wanted = terms.sum(spatial) if spatial else terms
        bound = 2e-6 if arithmetic(dtype) == torch.float32 else 1e-13
        assert (found - wanted).abs().max() <= bound * (terms.abs().sum(spatial) if spatial else terms.abs()).max()

    dx = ops.input_gradient(dy, x, tables[1], tables[0], tables[2], tables[3])
    assert dx.stride() == torch.empty_like(x).stride()
    linear = per_sample(slope, x) * (wide - per_sample(center, x)) + per_sample(offset, x)
    close(dx, per_sample(scale, x) * wide_dy + linear, dtype)


kinds = st.sampled_from(["bn", "gbn", "xbn", "shift", "scale", "both", "brn"])
parameters = st.sampled_from([None, *DTYPES])


@given(small, dtypes, layouts, layouts, kinds, parameters, parameters, st.integers(4, 9), seeds)
def test_normalizers_equal_plain_pytorch(shape, dtype, layout, dy_layout, kind, weights, biases, size, seed):
    torch.manual_seed(seed)
    batch_size, channels = max(shape[0], size if kind in ("gbn", "xbn") else 2), shape[1]
    shape = (batch_size, *shape[1:])
    # An expanded x has no variance but over positions, and a denominator of a few values would amplify rounding.
    layout = "contiguous" if layout == "expanded" else layout
    x, dy = arranged(torch.randn(shape).to(dtype), layout), arranged(torch.randn(shape).to(dtype), dy_layout)
    weight = None if weights is None else torch.randn(2 * channels).to(weights)[::2]
    bias = None if biases is None else torch.randn(channels).to(biases)
    plan = {"min_std": 0.5}
    if kind in ("gbn", "xbn"):
        plan |= {"ghost_size": size, "exclusive": kind == "xbn"}
    if kind in ("shift", "scale", "both"):
        indices = torch.randint(batch_size, (batch_size, size + (positions(shape) == 1)))
        plan |= {"indices": indices, "shift": kind != "scale", "scale": kind != "shift"}
    if kind == "brn":
        plan |= {"reference_mean": torch.randn(channels), "reference_var": torch.rand(channels) + 0.5}
        plan |= {"r_max": 1.5, "d_max": 0.5, "min_std": 0.0}
    check(x, weight, bias, dy, **plan)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 7), (6, 5, 3, 4), (6, 5, 2, 3, 4), (6, 1, 3, 4), (1, 5, 3, 4)])
@pytest.mark.parametrize("dy_layout", [*LAYOUTS, "scalar"])
def test_any_memory_layout(shape, layout, dy_layout):
    torch.manual_seed(0)
    x = arranged(torch.randn(shape, dtype=torch.float64), "contiguous" if layout == "expanded" else layout)
    dy = torch.randn(shape, dtype=torch.float64)
    dy = dy.flatten()[0].expand(shape) if dy_layout == "scalar" else arranged(dy, dy_layout)
    weight, bias = torch.randn(2, shape[1], dtype=torch.float64)
    check(x, weight, bias, dy)
    if shape[0] > 4:
        check(x, weight, bias, dy, ghost_size=3, exclusive=True, min_std=0.1)
        check(x, weight, bias, dy, indices=torch.randint(6, (6, 4)), shift=True, scale=True)


@pytest.mark.parametrize(("batch_size", "ghost_size"), [(7, 3), (8, 4), (5, 4), (3, 4), (6, 1), (9, 2)])
@pytest.mark.parametrize("spatial", [(), (4, 4), (3,), (8, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ghost_batches_take_the_rest(batch_size, ghost_size, spatial, dtype):
    torch.manual_seed(1)
    x, dy = torch.randn(2, batch_size, 9, *spatial).to(dtype)
    weight, bias = torch.randn(2, 9)
    check(x, weight, bias, dy, ghost_size=ghost_size, min_std=0.3)
    if ghost_size > 1:
        check(x, weight, bias, dy, ghost_size=ghost_size, exclusive=True, min_std=0.3)


@pytest.mark.parametrize("spatial", [(), (2,)])
def test_a_ghost_batch_of_many_samples(spatial):
    torch.manual_seed(1)
    x, dy = torch.randn(2, 300, 3, *spatial)
    check(x, None, None, dy, ghost_size=280)
    check(x, None, None, dy, ghost_size=280, exclusive=True)


PLANS = ({}, {"ghost_size": 4}, {"ghost_size": 4, "exclusive": True}, {"shift": True, "scale": True})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3, 3), (12, 80, 20)])
def test_float32_is_accurate_far_from_zero(plan, shape):
    torch.manual_seed(2)
    x, dy = 1e4 + torch.randn(shape), torch.randn(shape)
    weight, bias = torch.randn(2, shape[1])
    drawn = {"indices": torch.randint(12, (12, 5))} if plan.get("shift") else {}
    check(x, weight, bias, dy, min_std=0.3, **plan, **drawn)
    total, moment = ops.gradient_sums(dy, x, x.double().flatten(2).mean(2) if x.ndim > 2 else 1e4 + 0 * x.double())
    center = x.double().flatten(2).mean(2) if x.ndim > 2 else 1e4 + 0 * x.double()
    products = dy.double() * (x.double() - per_sample(center, x))
    wanted = products.flatten(2).sum(2) if x.ndim > 2 else products
    assert (moment - wanted).abs().max() <= 1e-5 * products.abs().max()
    assert torch.isfinite(total).all()


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 2, 2)])
def test_an_outlier_of_another_ghost_batch_costs_no_digits(exclusive, shape):
    torch.manual_seed(3)
    x = torch.randn(shape)
    x[0] = 1e8
    y, *_ = normalize(x, ghost_size=4, exclusive=exclusive)
    wanted = reference(x[4:].double(), None, None, {"ghost_size": 4, "exclusive": exclusive})
    close(y[4:], wanted, torch.float32)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 2, 2)])
def test_an_exclusive_sample_far_from_the_others(shape):
    torch.manual_seed(4)
    x = torch.randn(shape)
    x[5] += 1e4
    y, *_ = normalize(x, exclusive=True)
    wanted = reference(x.double(), None, None, {"exclusive": True})
    for b in range(8):
        close(y[b : b + 1], wanted[b : b + 1], torch.float32)


def buffers(channels, dtype=torch.float32, step=1):
    return (
        torch.randn(step * channels).to(dtype)[::step],
        (torch.rand(step * channels) + 0.5).to(dtype)[::step],
        torch.tensor(3),
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("spatial", [(), (3, 2)])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_batch_that_is_not_finite_leaves_the_buffers(plan, spatial, value):
    torch.manual_seed(5)
    x = torch.randn(8, 5, *spatial)
    x[2, 1] = value
    drawn = {"indices": torch.randint(8, (8, 3))} if plan.get("shift") else {}
    kept = buffers(5)
    before = [each.clone() for each in kept]
    y, *_ = normalize(x, buffers=kept, **plan, **drawn)
    assert all(torch.equal(now, then) for now, then in zip(kept, before, strict=True))
    assert not torch.isfinite(y[:4, 1]).all()
    assert torch.isfinite(y[:, [0, 2, 3, 4]]).all()
    if plan.get("exclusive"):
        assert torch.isfinite(y[4:]).all()
        assert y[[0, 1, 3], 1].isnan().all()  # the sample itself has finite statistics
        ones = torch.ones(8, 5, *spatial)
        ones[2, 1] = value
        assert not torch.isfinite(normalize(ones, ghost_size=4, exclusive=True)[0][2, 1]).any()


UPDATES = [(plan, towards) for plan in PLANS for towards in ("whole", "unbiased", "ghosts")]


@pytest.mark.parametrize(("plan", "running"), [(p, t) for p, t in UPDATES if t != "ghosts" or not p.get("exclusive")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("spatial", [(), (4, 4)])
def test_running_statistics(running, plan, dtype, momentum, spatial):
    torch.manual_seed(6)
    x = torch.randn(9, 70, *spatial)
    drawn = {"indices": torch.randint(9, (9, 3))} if plan.get("shift") else {}
    mean, var, count = buffers(70, dtype, step=2)
    old = mean.double().clone(), var.double().clone()
    normalize(x, None, None, (mean, var, count), momentum, running, **plan, **drawn)
    assert count == 4
    values = x.double().transpose(0, 1).flatten(1)
    wanted = [values.mean(1), values.var(1, unbiased=running == "unbiased")]
    if running == "ghosts":
        wanted = [table.mean(0) for table in pooled(x.double(), plan.get("ghost_size"), False)]
    factor = 0.25 if momentum is None else momentum
    for now, then, to in zip((mean, var), old, wanted, strict=True):
        assert now.dtype == dtype
        bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-6)
        torch.testing.assert_close(now.double(), then.lerp(to, factor), rtol=bound, atol=bound)


@pytest.mark.parametrize("given", [(0, 1), (0,), (1,), (2,), (0, 2), ()])
def test_each_buffer_may_be_absent(given):
    torch.manual_seed(7)
    x = torch.randn(6, 4, 3)
    every = buffers(4)
    chosen = tuple(each if k in given else None for k, each in enumerate(every))
    before = [each.clone() for each in every]
    normalize(x, buffers=chosen)
    for k, (now, then) in enumerate(zip(every, before, strict=True)):
        assert torch.equal(now, then) == (k not in given)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("count", "warmup", "transition", "progress"), [
    (0, 2, 4, 0.0), (2, 2, 4, 0.0), (3, 2, 4, 0.25), (9, 2, 4, 1.0), (1, 2, 0, 0.0), (2, 2, 0, 1.0), (None, 2, 4, 1.0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_renormalization(live, count, warmup, transition, progress, dtype):
    torch.manual_seed(8)
    x, dy = (2 * torch.randn(2, 6, 5, 3) + 1).to(dtype)
    weight, bias = torch.randn(2, 5)
    mean, var, _ = buffers(5)
    batches = None if count is None else torch.tensor(count)
    limits = {"r_max": 1 + 0.5 * progress, "d_max": 0.4 * progress}
    known = {"reference_mean": mean.clone().double(), "reference_var": var.clone().double()}
    wide = x.double().requires_grad_(), weight.double().requires_grad_(), bias.double().requires_grad_()
    wanted = reference(*wide, {**known, **limits})
    given = {"r_max": 1.5, "d_max": 0.4, "warmup_steps": warmup, "transition_steps": transition}
    if not live:
        given |= {**known, "reference_count": batches}
    y, *saved = normalize(x, weight, bias, (mean, var, batches if live else None), **given)
    close(y, wanted.detach(), dtype)
    assert saved[1].shape == (2, 1, 5)
    assert not torch.equal(mean.double(), known["reference_mean"])  # updated after use
    found = normalize_backward(dy, x, weight, saved)
    for one, other in zip(found, torch.autograd.grad(wanted, wide, dy.double()), strict=True):
        close(one, other, dtype, 4)


@pytest.mark.parametrize("law", [Law(4), Law(4, dof="exact"), Law(4, "conv"), Law(4, "conv", "exact")])
@pytest.mark.parametrize("spatial", [(), (3, 2), (1,)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shift", "scale"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("channels", [3, 90])
def test_noise_from_a_law(law, spatial, dtype, shift, scale, channels):
    torch.manual_seed(9)
    x, dy = torch.randn(2, 16, channels, *spatial).to(dtype)
    seed, count = torch.randint(2**62, (1,)), positions(x.shape)
    numbers, quantiles = law_tables(seed, law, count, arithmetic(dtype))
    plan = {"seed": seed, "law": numbers, "quantiles": quantiles, "shift": shift, "scale": scale}
    y, *saved = normalize(x, **plan)
    wide = x.double()
    mean, var = moments(wide, list(range(16)))
    normal = (wide - per_sample(mean[None], x)) / per_sample((var + EPS).sqrt()[None], x)
    each = [moments(normal, [b]) for b in range(16)]
    own = Moments(*(torch.stack(table) for table in zip(*each, strict=True)), count)
    draws = law.draws_from(seed, (16, channels), count)
    ghost = law.ghost_moments(draws, *law.variances(own, torch.ones(1, channels)), count)
    m = ghost.mean if shift else torch.zeros_like(ghost.mean)
    k = ((1 + NOISE_EPS) / (ghost.var + NOISE_EPS)).sqrt() if scale else torch.ones_like(m)
    close(y, (normal - per_sample(m, x)) * per_sample(k, x), dtype, 20 if dtype is not torch.float64 else 1e6)
    assert saved[1].shape == (shift + scale, 16, channels)
    dx, g_weight, g_bias = normalize_backward(dy, x, None, saved, **plan)
    assert all(torch.isfinite(one).all() for one in (dx, g_weight, g_bias))


@given(small, dtypes, layouts, st.sampled_from([(True, True), (True, False), (False, True)]), seeds)
def test_noise_alone(shape, dtype, layout, components, seed):
    torch.manual_seed(seed)
    shift, scale = components
    x = arranged((3 + torch.randn(shape)).to(dtype), layout)
    indices = torch.randint(shape[0], (shape[0], 3))
    y, factor = ops.ghost_noise(x, indices, 0.1, shift, scale)
    wide = x.double()
    mean, var = moments(wide, list(range(shape[0])))
    m, s = (torch.stack(table) for table in zip(*(moments(wide, rows) for rows in indices), strict=True))
    k = ((var + 0.1) / (s + 0.1)).sqrt() if scale else torch.ones_like(s)
    close(y, (wide - (per_sample(m - mean, x) if shift else 0)) * per_sample(k, x), dtype, 2)
    assert y.stride() == torch.empty_like(x).stride()
    if scale:
        close(factor, k, torch.float32 if dtype is not torch.float64 else dtype, 10)
    else:
        assert factor.shape == (0, shape[1])


def excluding(mean, var, ghost_size):
    """Return the moments of each sample's ghost batch without it, differentiable."""
    made = []
    for start, end in ghost_batches(len(mean), ghost_size):
        for k in range(start, end):
            others = [b for b in range(start, end) if b != k]
            center = mean[others].mean(0)
            made.append((center, (var[others] + (mean[others] - center).square()).mean(0)))
    return [torch.stack(table) for table in zip(*made, strict=True)]


def ghosts(mean, var, ghost_size):
    """Return the moments of each sample's ghost batch, or those of the whole batch (1, C), differentiable."""
    made = []
    for start, end in ghost_batches(len(mean), ghost_size):
        center = mean[start:end].mean(0)
        moments = center, (var[start:end] + (mean[start:end] - center).square()).mean(0)
        made += [moments] * (1 if end - start == len(mean) else end - start)
    return [torch.stack(table) for table in zip(*made, strict=True)]


POOLS = {"ghost_batches": ghosts, "excluding_sample": excluding}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(("batch_size", "ghost_size"), [(7, 3), (9, 9), (9, 50), (4, 2), (300, 300), (12, 4)])
@pytest.mark.parametrize("channels", [1, 5, 130, 600])
@pytest.mark.parametrize("positions", [1, 4])
def test_pools_of_tables(name, batch_size, ghost_size, channels, positions):
    torch.manual_seed(12)
    mean = (1e4 + torch.randn(batch_size, channels, dtype=torch.float64)).requires_grad_()
    var = torch.rand(batch_size, channels, dtype=torch.float64)
    var = var if positions > 1 else var.new_zeros(()).expand_as(var)
    leaf = var.clone().requires_grad_()
    wanted = POOLS[name](mean, leaf, ghost_size)
    found = getattr(torch.ops.ghostnoise, name)(mean, var, ghost_size)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-10)
    gradients = torch.randn(2, *wanted[0].shape, dtype=torch.float64).unbind()
    expected = torch.autograd.grad(wanted, (mean, leaf), gradients)
    backward = getattr(torch.ops.ghostnoise, f"{name}_backward")
    by_mean, by_var = backward(*gradients, mean.detach(), found[0], ghost_size, True)
    torch.testing.assert_close(by_mean, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_var.expand_as(mean), expected[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(backward(*gradients, mean.detach(), found[0], ghost_size, False)[0], by_mean)


@pytest.mark.parametrize("shape", [(1, 3), (9, 1), (40, 600)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("min_std", [0.0, 0.7])
def test_normalizing_scales(shape, weighted, min_std):
    torch.manual_seed(14)
    var = torch.rand(shape, dtype=torch.float64).requires_grad_()
    weight = torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    wanted = 1 / (var + EPS).clamp_min(min_std**2).sqrt() * (weight if weighted else 1)
    found = torch.ops.ghostnoise.normalizing_scale(var, weight, EPS, min_std)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-13, atol=0)
    gradient = torch.randn(shape, dtype=torch.float64)
    expected = torch.autograd.grad(wanted, [var, weight] if weighted else [var], gradient)
    given = torch.ops.ghostnoise.normalizing_scale_backward(gradient, var.detach(), weight, EPS, min_std)
    assert given[1].shape == (shape[1] if weighted else 0,)
    torch.testing.assert_close(given[: len(expected)], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [1, 9, 130])
@pytest.mark.parametrize(("rows", "drawn"), [(6, 1), (3, 300), (40, 7), (0, 2)])
@pytest.mark.parametrize("positions", [1, 4])
def test_tables_of_drawn_samples(channels, rows, drawn, positions):
    torch.manual_seed(13)
    mean = 1e4 + torch.randn(11, channels, dtype=torch.float64)
    var = torch.rand(channels, 11, dtype=torch.float64).t()
    var = var if positions > 1 else var.new_zeros(()).expand_as(var)
    indices = torch.randint(11, (rows, drawn))
    found = torch.ops.ghostnoise.drawn_samples(mean, var, indices)
    center = mean[indices].mean(1)
    wanted = center, (var[indices] + (mean[indices] - center[:, None]).square()).mean(1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-10)
    if rows:
        indices[0, 0] = 11
        with pytest.raises(IndexError, match="indices outside of the batch"):
            torch.ops.ghostnoise.drawn_samples(mean, var, indices)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [(64, 700), (64, 40, 8, 8), (300, 3, 9, 9), (33, 130, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_matter(plan, shape, layout, dtype, threads):
    torch.manual_seed(10)
    x, dy = (arranged(torch.randn(shape).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randn(2, shape[1])
    drawn = {"indices": torch.randint(shape[0], (shape[0], 7))} if plan.get("shift") else {}
    results = []
    for count in (1, 2, 5):
        threads(count)
        kept = torch.zeros(shape[1]), torch.ones(shape[1]), torch.tensor(0)
        y, *saved = normalize(x, weight, bias, kept, **plan, **drawn)
        results.append([y, *saved, *kept, *normalize_backward(dy, x, weight, saved, **plan)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    check(x, weight, bias, dy, **plan, **drawn) if x.numel() < 60000 and dtype is torch.float32 else None


@pytest.mark.parametrize("value", [-1, 6, 2**40])
@pytest.mark.parametrize("shape", [(6, 70), (6, 3), (6, 3, 4)])
def test_indices_outside_of_the_batch_are_an_error(value, shape):
    x, kept = torch.randn(shape), buffers(shape[1])
    before = [each.clone() for each in kept]
    indices = torch.zeros(6, 3, dtype=torch.int64)
    indices[4, 1] = value
    with pytest.raises(IndexError, match="indices outside of the batch"):
        normalize(x, buffers=kept, indices=indices, shift=True, scale=True)
    with pytest.raises(IndexError, match="indices outside of the batch"):
        ops.ghost_noise(x, indices, 1e-3, True, True)
    assert all(torch.equal(now, then) for now, then in zip(kept, before, strict=True))


x, rows = torch.randn(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)
ERRORS = [
    (lambda: normalize(torch.randn(3)), "must have the shape"),
    (lambda: normalize(x.long()), "float32, float64, bfloat16 or float16"),
    (lambda: normalize(x[:0]), "no values"),
    (lambda: normalize(x, torch.randn(4)), "weight of shape"),
    (lambda: normalize(x, None, torch.randn(3, 1)), "bias of shape"),
    (lambda: normalize(x, torch.ones(3, dtype=torch.int64)), "weight must be"),
    (lambda: normalize(x, ghost_size=0), "ghost_size"),
    (lambda: normalize(x, buffers=(torch.zeros(2), None, None)), "running statistic"),
    (lambda: normalize(x, buffers=(torch.zeros(1).expand(3), None, None)), "expanded"),
    (lambda: normalize(x, buffers=(None, None, torch.tensor(0.0))), "int64 scalar"),
    (lambda: normalize(x, running="other"), "towards"),
    (lambda: normalize(x, running="ghosts", exclusive=True), "towards"),
    (lambda: normalize(x, indices=rows), "shift or scale"),
    (lambda: normalize(x, shift=True), "indices or a seed"),
    (lambda: normalize(x, indices=rows, shift=True, ghost_size=2), "one pool"),
    (lambda: normalize(x, indices=rows[:2], shift=True), "indices of shape"),
    (lambda: normalize(x, indices=rows.int(), shift=True), "int64"),
    (lambda: normalize(x, seed=torch.tensor([1]), shift=True), "a law"),
    (lambda: normalize(x, r_max=2.0), "reference statistics"),
    (lambda: normalize(x, r_max=2.0, exclusive=True), "one pool"),
    (lambda: ops.transform(x, rows, rows, rows), "center of shape"),
    (lambda: ops.transform(x, *[torch.zeros(4, 3, dtype=torch.bfloat16)] * 3), "dtype of the arithmetic"),
    (lambda: ops.gradient_sums(x[:2], x, torch.zeros(1, 3)), "dy of shape"),
    (lambda: ops.gradient_sums(x.double(), x, torch.zeros(1, 3)), "dy of shape"),
    (lambda: ops.ghost_noise(x, rows, 1e-3, False, False), "neither shift nor scale"),
    (lambda: normalize_backward(x, x, None, normalize(x)[1:], ghost_size=2), "stats of shape"),
    (lambda: normalize_backward(x, x, None, normalize(x)[1:], shift=True), "extra of shape"),
]


@pytest.mark.parametrize(("call", "words"), ERRORS)
def test_errors_say_what_was_given(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 0, 3), (2, 3, 0), (0, 3, 2, 2)])
def test_the_passes_take_tensors_without_values(shape):
    x = torch.randn(shape)
    table = torch.zeros(1, shape[1])
    assert ops.transform(x, table, table, table).shape == shape
    assert ops.input_gradient(x, x, table, table, table, table).shape == shape
    mean, var = ops.moments(x)
    assert mean.isnan().all()
    assert var.isnan().all()
    for sums in ops.gradient_sums(x, x, table):
        assert torch.equal(sums, torch.zeros(shape[:2], dtype=torch.float64))


def test_inputs_are_left_as_they_are():
    torch.manual_seed(11)
    x, dy = torch.randn(2, 6, 5, 3)
    weight, bias = torch.randn(2, 5)
    given = [x, dy, weight, bias]
    before = [each.clone() for each in given]
    y, *saved = normalize(x, weight, bias, ghost_size=3)
    normalize_backward(dy, x, weight, saved, ghost_size=3)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*given, y, *saved) if tensor.numel()}
    assert len(storages) == len(given) - 2 + len([each for each in (y, *saved) if each.numel()])


def test_memory_does_not_grow():
    """A kernel that loses a handle, an optional or a string loses it in each call."""
    resource = pytest.importorskip("resource")
    x, weight = torch.randn(4, 3), torch.ones(3)
    kept = torch.zeros(3), torch.ones(3), torch.tensor(0)

    def run(times):
        for _ in range(times):
            y, *saved = normalize(x, weight, None, kept, running="unbiased", ghost_size=2, r_max=None)
            normalize_backward(y, x, weight, saved, ghost_size=2)

    run(2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(20000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300  # KB; 32 bytes a call would be 1,250

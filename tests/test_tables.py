"""Pools, maps and noise of tables, against loops over the raw values of samples in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ghostnoise import tables
from ghostnoise.tables import COMPONENTS, Affine, Moments
from support.reference import ghost_batch_of

CHANNELS = 3


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def samples(sizes, seed=0, offset=1.0):
    """Return samples (C, n) with these numbers of values, which need a gradient."""
    drawn = (torch.randn(CHANNELS, n, dtype=torch.float64, generator=seeded(seed + at)) for at, n in enumerate(sizes))
    return [(each * 2 + offset).requires_grad_() for each in drawn]


def statistics(parts):
    """Mean and biased variance of each channel over all values of the samples; 0 if there are none."""
    values = torch.cat(parts, 1)
    if not values.shape[1]:
        return torch.zeros(2, CHANNELS, dtype=torch.float64).unbind()
    mean = values.mean(1)
    return mean, (values - mean[:, None]).square().mean(1)


def moments(parts):
    """Return the moments of samples; `n` is an integer if it is the same for all."""
    sizes = [each.shape[1] for each in parts]
    n = sizes[0] if len(set(sizes)) == 1 else torch.tensor(sizes, dtype=torch.float64)[:, None]
    return Moments(*(torch.stack(table) for table in zip(*(statistics([each]) for each in parts), strict=True)), n)


def check(pooled, parts, members, gradient=True):
    """Each row of `pooled` has the moments of its members' values together, their number and their derivative."""
    expected = [statistics([parts[n] for n in each]) for each in members]
    numbers = [sum(parts[n].shape[1] for n in each) for each in members]
    keep = [row for row, number in enumerate(numbers) if number]
    rows = len(members)
    mean, var = (table.expand(rows, -1)[keep] for table in pooled[:2])
    counts = (pooled.n if isinstance(pooled.n, torch.Tensor) else torch.full((1, 1), pooled.n)).expand(rows, 1)
    wanted = [torch.stack(table)[keep] for table in zip(*expected, strict=True)]
    torch.testing.assert_close(mean, wanted[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(var, wanted[1], rtol=1e-10, atol=1e-11)
    assert counts.flatten().tolist() == numbers
    assert (pooled.var >= 0).all()
    if gradient:
        weights = torch.randn(2, len(keep), CHANNELS, dtype=torch.float64, generator=seeded(5)).unbind()
        pairs = [torch.autograd.grad(each, parts, weights, materialize_grads=True) for each in ([mean, var], wanted)]
        torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-10)


equal = st.tuples(st.integers(1, 14), st.integers(1, 5)).map(lambda both: [both[1]] * both[0])
ragged = st.lists(st.integers(0, 5), min_size=1, max_size=14)
sizes = st.one_of(equal, ragged)
ghost_sizes = st.one_of(st.none(), st.integers(1, 16))
seeds = st.integers(0, 2**31)


@given(sizes, ghost_sizes, seeds)
def test_the_whole_batch_and_ghost_batches(sizes, ghost_size, seed):
    parts = samples(sizes, seed)
    m, every = moments(parts), len(sizes)
    members = [ghost_batch_of(k, every, ghost_size or every) for k in range(every)]
    check(tables.whole_batch(moments(parts)), parts, [list(range(every))], gradient=any(sizes))
    check(tables.ghost_batches(moments(parts), ghost_size), parts, members, gradient=any(sizes))
    rows = [list(row) for row in dict.fromkeys(map(tuple, members))]
    check(tables.ghost_rows(m, ghost_size), parts, rows, gradient=False)
    assert len(tables.ghost_rows(m, ghost_size).mean) == len(rows)


@given(st.one_of(equal, ragged).filter(lambda sizes: len(sizes) > 1), st.one_of(st.none(), st.integers(2, 16)), seeds)
def test_excluding_the_sample(sizes, ghost_size, seed):
    parts, every = samples(sizes, seed), len(sizes)
    members = [[n for n in ghost_batch_of(k, every, ghost_size or every) if n != k] for k in range(every)]
    enough = any(sizes[n] for each in members for n in each)
    check(tables.excluding_sample(moments(parts), ghost_size), parts, members, gradient=enough)


@given(sizes, st.integers(1, 7), st.integers(1, 9), seeds)
def test_drawn_samples(sizes, drawn, rows, seed):
    parts = samples(sizes, seed)
    indices = torch.randint(len(sizes), (rows, drawn), generator=seeded(seed))
    check(tables.drawn_samples(moments(parts), indices), parts, indices.tolist(), gradient=False)


@given(sizes, st.integers(1, 16), seeds)
def test_a_partition(sizes, ghost_size, seed):
    parts, every = samples(sizes, seed), len(sizes)
    order = torch.randperm(every, generator=seeded(seed))
    members = [[order[n].item() for n in ghost_batch_of(k, every, ghost_size)] for k in range(every)]
    check(tables.partition(moments(parts), order, ghost_size), parts, members, gradient=any(sizes))


def test_drawn_samples_have_a_derivative():
    parts = samples([2, 5, 1, 3])
    indices = torch.tensor([[0, 1, 1], [3, 3, 3], [2, 0, 1]])
    check(tables.drawn_samples(moments(parts), indices), parts, indices.tolist())


@given(st.integers(1, 20), st.integers(1, 24))
def test_ghost_sizes(batch_size, ghost_size):
    found = tables.ghost_sizes(batch_size, ghost_size)
    assert sum(found) == batch_size
    assert all(size == ghost_size for size in found[:-1])
    assert min(ghost_size, batch_size) <= found[-1] < 2 * ghost_size


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("spatial", [1, 4])
def test_over_channels(groups, spatial):
    """The statistics of group norm; one group is layer norm, as many as channels instance norm."""
    x = torch.randn(4, 6, spatial, dtype=torch.float64) + torch.arange(6.0)[:, None]
    values = x.reshape(4, groups, -1)
    wanted = [table.repeat_interleave(6 // groups, 1) for table in (values.mean(2), values.var(2, correction=0))]
    m = tables.over_channels(Moments(x.mean(2), x.var(2, correction=0), spatial), groups)
    torch.testing.assert_close(list(m[:2]), wanted)
    assert m.n == spatial * 6 // groups


def test_a_mixture():
    """A population of 3 samples and one more with a quarter of the weight are 4 samples."""
    parts = samples([4] * 4)
    population, one = (
        Moments(*(t[None] for t in statistics(parts[:3]))),
        Moments(*(t[None] for t in statistics(parts[3:]))),
    )
    torch.testing.assert_close(list(tables.mix(population, one, 0.25)[:2]), [t[None] for t in statistics(parts)])


def test_rows_and_their_numbers():
    one, other = moments(samples([4, 4, 4])), moments(samples([2, 2], 7))
    both = one.join(other)
    assert both.n.flatten().tolist() == [4, 4, 4, 2, 2]
    assert torch.equal(both.mean, torch.cat([one.mean, other.mean]))
    assert one.join(one).n == 4
    assert tables.counts(one).tolist() == [[4], [4], [4]]
    assert tables.mean_count(one) == 4
    assert tables.mean_count(moments(samples([3, 0, 6]))) == 4.5
    assert not any(table.requires_grad for table in one.detach()[:2])


# Accuracy.


@pytest.mark.parametrize("outliers", [[4], [4, 7], [0], [8]])
@pytest.mark.parametrize(("shift", "scale"), [(1e12, 1), (0, 1e8), (1e8, 1e6)])
@pytest.mark.parametrize("ghost_size", [None, 3])
def test_excluding_the_sample_does_not_cancel(outliers, shift, scale, ghost_size):
    """In mean, in variance or in both, up to 1e12 standard deviations."""
    parts = [each.detach() for each in samples([4] * 9)]
    for at in outliers:
        parts[at] = parts[at] * scale + shift
    pooled = tables.excluding_sample(moments(parts), ghost_size)
    for k in range(9):
        mean, var = statistics([parts[n] for n in ghost_batch_of(k, 9, ghost_size or 9) if n != k])
        torch.testing.assert_close(pooled.var[k], var, rtol=1e-9, atol=0)
        assert ((pooled.mean[k] - mean).abs() <= 1e-9 * var.sqrt()).all()


def test_an_outlier_does_not_reach_pools_without_it():
    parts = [each.detach() for each in samples([4] * 9)]
    indices = torch.randint(1, 9, (9, 5), generator=seeded(0))
    calm = moments(parts)
    wild = Moments(calm.mean.clone(), calm.var, 4)
    wild.mean[0] += 1e12
    for pool, clean in (
        (lambda m: tables.ghost_batches(m, 3), slice(3, None)),
        (lambda m: tables.excluding_sample(m, 3), slice(3, None)),
        (lambda m: tables.drawn_samples(m, indices), slice(None)),
        (lambda m: tables.partition(m, torch.arange(9), 3), slice(3, None)),
    ):
        for one, other in zip(pool(wild)[:2], pool(calm)[:2], strict=True):
            torch.testing.assert_close(one[clean], other[clean], rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("ghost_size", [2, 3, 4, 9])
def test_a_sample_that_is_not_finite_is_not_a_part_of_its_own_statistics(bad, ghost_size):
    parts = [each.detach() for each in samples([4] * 9)]
    expected = tables.excluding_sample(moments(parts), ghost_size)
    parts[4][1, 2] = bad
    pooled = tables.excluding_sample(moments(parts), ghost_size)
    others = [k for k in ghost_batch_of(4, 9, ghost_size) if k != 4]
    clean = [k for k in range(9) if k not in others]
    for table, wanted in zip(pooled[:2], expected[:2], strict=True):
        torch.testing.assert_close(table[clean], wanted[clean])
        torch.testing.assert_close(table[:, [0, 2]], wanted[:, [0, 2]])
    assert pooled.var[others, 1].isnan().all()


def test_a_constant_batch_has_no_variance():
    constant = Moments(torch.full((6, 2), 0.1, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64), 4)
    indices = torch.randint(6, (6, 3))
    pools = (
        tables.whole_batch,
        tables.excluding_sample,
        lambda m: tables.ghost_batches(m, 4),
        lambda m: tables.drawn_samples(m, indices),
    )
    for pool in pools:
        assert (pool(constant).var >= 0).all()
        assert (pool(constant).var <= 1e-30).all()


class Largest(TorchDispatchMode):
    """Records the largest number of elements that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("weighted", [False, True])
def test_pools_of_drawn_rows_do_not_allocate_every_row(weighted):
    mean, var = torch.randn(2, 64, 100, dtype=torch.float64)
    var, indices = var.square().requires_grad_(), torch.randint(64, (64, 50))
    m = Moments(mean.requires_grad_(), var, torch.randint(1, 5, (64, 1)) if weighted else 4)
    with Largest() as largest:
        pooled = tables.drawn_samples(m, indices)
        if not weighted:
            (pooled.mean + pooled.var).sum().backward()
    assert largest.elements <= max(2 * mean.numel(), indices.numel())


# Maps.


def values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


def applied(affine, x):
    center, scale, shift = (t.unsqueeze(-1) if isinstance(t, torch.Tensor) else t for t in affine)
    return scale * (x - center) + shift


def test_maps_compose():
    x = values(4, CHANNELS, 5)
    one, other = (Affine(*values(3, rows, CHANNELS, seed=rows)) for rows in (4, 1))
    weight, bias = values(2, CHANNELS)
    torch.testing.assert_close(applied(one.before(other), x), applied(other, applied(one, x)))
    torch.testing.assert_close(applied(other.before(one), x), applied(one, applied(other, x)))
    torch.testing.assert_close(applied(one.then(weight, bias), x), applied(one, x) * weight[:, None] + bias[:, None])
    torch.testing.assert_close(applied(one.then(None, bias), x), applied(one, x) + bias[:, None])
    torch.testing.assert_close(applied(one.then(weight, None), x), applied(one, x) * weight[:, None])
    mapped = one.moments(Moments(x.mean(2), x.var(2, correction=0), 5))
    torch.testing.assert_close(mapped.mean, applied(one, x).mean(2))
    torch.testing.assert_close(mapped.var, applied(one, x).var(2, correction=0))
    assert mapped.n == 5


NUMBERS = (0.0, 1.0, -2.5)


@pytest.mark.parametrize("one", [Affine(a, b, c) for a in NUMBERS for b in NUMBERS for c in NUMBERS])
def test_numbers_are_tables_of_one_value(one):
    x, full = values(4, CHANNELS, 5), Affine(*values(3, 4, CHANNELS))
    numbers = Affine(0.5, 1.0, 0.0)
    for each in (one, Affine(*(torch.full((1, CHANNELS), number, dtype=torch.float64) for number in one))):
        y = applied(one, x)
        torch.testing.assert_close(applied(Affine(*each.as_tables(full.center)), x), y)
        torch.testing.assert_close(applied(each.before(full), x), applied(full, y))
        torch.testing.assert_close(applied(full.before(each), x), applied(one, applied(full, x)))
        torch.testing.assert_close(applied(each.before(numbers), x), y - 0.5)
        torch.testing.assert_close(applied(each.then(*full[:2]), x), y * full[0][..., None] + full[1][..., None])
        found = each.moments(Moments(x.mean(2), x.var(2, correction=0), 5))
        torch.testing.assert_close(found.mean, y.mean(2))
        torch.testing.assert_close(found.var, y.var(2, correction=0))


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("rows", [1, 4])
def test_normalization_with_weight_and_bias_is_that_followed_by_them(given, rows):
    def tables_of(seed):
        made = values(rows, CHANNELS, seed=seed), values(rows, CHANNELS, seed=seed).square(), *values(2, CHANNELS)
        return [table.requires_grad_() for table in made]

    def run(mean, var, weight, bias, together):
        parameters = weight if given[0] else None, bias if given[1] else None
        stats = Moments(mean, var, 5)
        if together:
            return tables.normalize(stats, 0.1, 0.8, *parameters).as_tables(mean)
        return tables.normalize(stats, 0.1, 0.8).then(*parameters).as_tables(mean)

    one, other = (run(*tables_of(3), together) for together in (True, False))
    torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(lambda *tables: run(*tables, True)[1:], tables_of(4))
    assert torch.autograd.gradgradcheck(lambda *tables: run(*tables, True)[1], tables_of(5))


def test_normalization():
    stats = Moments(values(4, CHANNELS), torch.tensor([0.0, 0.25, 4.0], dtype=torch.float64).expand(4, 3).contiguous())
    x = values(4, CHANNELS, 5)
    for eps, least in ((1e-5, 0.0), (0.3, 0.0), (0.0, 0.7), (1e-5, 0.7)):
        std = (stats.var + eps).sqrt().clamp_min(least)
        if eps or least:
            wanted = (x - stats.mean[..., None]) / std[..., None]
            torch.testing.assert_close(applied(tables.normalize(stats, eps, least), x), wanted)
    var = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    tables.normalize(Moments(var.detach(), var), 0.0, 0.7).scale.sum().backward()
    assert var.grad == 0  # and not nan, the slope of the root at 0


@pytest.mark.parametrize("components", COMPONENTS)
def test_ghost_noise_is_a_constant_map(components):
    whole, ghost = (Moments(values(rows, CHANNELS), values(rows, CHANNELS).exp()) for rows in (1, 4))
    whole.mean.requires_grad_(), ghost.var.requires_grad_()
    affine, x = tables.ghost_noise(whole, ghost, 0.1, components), values(4, CHANNELS, 5)
    assert not any(table.requires_grad for table in affine.as_tables(ghost.mean))
    y = x if components == "scale" else x - (ghost.mean - whole.mean)[..., None]
    std = ((ghost.var + 0.1) / (whole.var + 0.1)).sqrt()[..., None]
    torch.testing.assert_close(applied(affine, x), (y if components == "shift" else y / std).detach())


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_ghost_batch_without_values_is_the_identity(components):
    m = moments([each.detach() for each in samples([3, 0, 2])])
    ghost = tables.drawn_samples(m, torch.tensor([[1, 1], [0, 1], [2, 0]]))
    affine, x = tables.ghost_noise(tables.whole_batch(m), ghost, components=components), values(3, CHANNELS, 5)
    y = applied(affine, x)
    assert torch.equal(y[0], x[0])
    assert not torch.equal(y[1], x[1])


def test_tables_are_float64_where_the_device_has_it():
    found = {kind: tables.table_dtype(torch.device(kind)) for kind in ("cpu", "cuda", "mps")}
    assert found == {"cpu": torch.float64, "cuda": torch.float64, "mps": torch.float32}


def test_pools_refuse_sizes_that_do_not_exist():
    """A size of 0 is not the whole batch, which is None."""
    m = tables.Moments(torch.randn(6, 4), torch.rand(6, 4), 5)
    for size in (0, -1, 2.5):
        with pytest.raises((ValueError, TypeError), match="ghost_size="):
            tables.ghost_batches(m, size)
    with pytest.raises(ValueError, match="ghost_size=1"):
        tables.excluding_sample(m, 1)
    with pytest.raises(ValueError, match=r"groups=3: must divide the 4 channels"):
        tables.over_channels(m, 3)

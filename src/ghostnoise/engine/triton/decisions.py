"""Triton kernels for the decide step: from tables of moments (B, C) to the transformation of x, and its gradient.

With the pooled statistics mean and rstd, Batch Renormalization's r and d (1 and 0 without it), noise m and k on the
normalized x, weight w and bias b:

    y = w·k·((x - mean)·rstd·r + d - m) + b

r and d are constants, so they are folded into the parameters, w' = w·r and b' = b + w·d, before anything else (they are
not combined with noise). From here on w and b stand for these:

    y = scale·(x - mean) + shift        scale = w·k·rstd,  shift = b - w·k·m

Let a = Σ dy and d = Σ dy·(x - mean) over positions, per sample, and Σ_r the sum over the samples that share a pool r:

    db = Σ a          dw = Σ k·(rstd·d - m·a)        drstd = Σ_r w·k·d        dmean = -Σ_r scale·a

From the last two, the contributing samples determine the gradient of x through the statistics, which is linear in x:
slope·(x - center) + offset. For a pool of n samples around its own mean, with dvar = -drstd·rstd³/2:

    slope = 2·dvar / (n·S)        offset = dmean / (n·S)

A program takes BLOCK_C channels. It walks over all ghost batches, BLOCK_G of them at a time, and over the samples of
these, BLOCK_N at a time; so no program needs a result of another program of the same launch. The kernel for drawn
samples is the exception: a program takes BLOCK_B samples, and pools the whole batch again, which it reads once.

All sums are in float64. Moments are pooled around the moments of one of the samples that are pooled, so that the
variance of the pool bounds how much can cancel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations  # the kernels' annotations name a module that may be missing

from ghostnoise.engine.triton.kernels import jit, tl

__all__ = ["drawn_kernel", "exclusive_gradient_kernel", "exclusive_kernel", "pools_gradient_kernel", "pools_kernel"]

# Samples come as (means, variances, strides over b and c, parts): pointers to tables (B, C); x itself, without
# variances, if it has a single position. If their positions are in K parts, `parts` is (stride over parts, K,
# positions of a part, positions, and the reciprocal of these in two floats). Sums of gradients come in the same form.
# Vectors are (pointer, stride) or None, tables (pointer, strides over b and c) or None. Ghost batches are
# (B, C, G, size, size of the last one).


@jit
def _moments(samples, b, c, inside):
    """The means and variances of samples b and channels c."""
    means, variances, stride_b, stride_c, parts = samples
    at = b * stride_b + c * stride_c
    if parts is None:
        mean = tl.load(means + at, mask=inside, other=0).to(tl.float64)
        var = mean * 0 if variances is None else tl.load(variances + at, mask=inside, other=0)
    else:
        stride_k, K, size, S, high, low = parts
        mean = tl.load(means + at, mask=inside, other=0) * 0
        var = mean
        per_position = tl.zeros([], tl.float64) + high + low
        for k in range(K):
            share = tl.minimum(S - k * size, size) * per_position
            mean += share * tl.load(means + at + k * stride_k, mask=inside, other=0)
        for k in range(K):
            share = tl.minimum(S - k * size, size) * per_position
            gap = tl.load(means + at + k * stride_k, mask=inside, other=0) - mean
            var += share * (tl.load(variances + at + k * stride_k, mask=inside, other=0) + gap * gap)
    return mean, var


@jit
def _sums(sums, b, c, inside):
    """The sums of gradients of samples b and channels c."""
    totals, moments, stride_b, stride_c, parts = sums
    at = b * stride_b + c * stride_c
    total = tl.load(totals + at, mask=inside, other=0).to(tl.float64)
    moment = tl.load(moments + at, mask=inside, other=0).to(tl.float64)
    if parts is not None:
        stride_k, K, _, _, _, _ = parts
        for k in range(1, K):
            total += tl.load(totals + at + k * stride_k, mask=inside, other=0).to(tl.float64)
            moment += tl.load(moments + at + k * stride_k, mask=inside, other=0).to(tl.float64)
    return total, moment


@jit
def _noisy(total, moment, shift, gain, b, c, inside):
    """The sums of gradients after the noise m and k: Σ k·dy, Σ k·dy·(x - center), and Σ k·dy·m."""
    lost = total * 0
    if gain is not None:
        k = tl.load(gain[0] + b * gain[1] + c * gain[2], mask=inside, other=0).to(tl.float64)
        total *= k
        moment *= k
    if shift is not None:
        lost = total * tl.load(shift[0] + b * shift[1] + c * shift[2], mask=inside, other=0).to(tl.float64)
    return total, moment, lost


@jit
def _vector(vector, c, inside, default: tl.constexpr):
    """The entries of a vector, or the default if there is none."""
    entries = tl.zeros(c.shape, tl.float64) + default
    if vector is not None:
        entries = tl.load(vector[0] + c * vector[1], mask=inside, other=0).to(tl.float64)
    return entries


@jit
def _rstd(var, eps, least):
    """The reciprocal standard deviation; `least` is the least variance."""
    var += eps
    return tl.rsqrt(tl.where(var < least, least, var))  # tl.maximum would hide a NaN


@jit
def _not_negative(var):
    return tl.where(var < 0, 0.0, var)


@jit
def _ghost_batches(g, sizes, per_size, per_last):
    """The first samples of ghost batches g, their sizes (0 if they do not exist), and the reciprocals of these."""
    _, _, G, size, last = sizes
    is_last = g == G - 1
    zero = tl.zeros(g.shape, tl.float64)
    share = tl.where(is_last, zero + per_last, zero + per_size)
    return g * size, tl.where(g < G, tl.where(is_last, last, size), 0), share


@jit
def _store_updated(update, mean, var, c, inside, C, momentum):
    """Compute the updated running statistics, which the next launch writes to the buffers if all of them are finite."""
    updated, running_mean, running_var, count = update
    weight = tl.zeros([], tl.float64) + momentum
    if count is not None:  # NaN is the momentum of the cumulative average; a division would spill registers
        root = tl.rsqrt((tl.load(count) + 1).to(tl.float64))
        weight = tl.where(weight == weight, weight, root * root)
    tl.store(updated + c, _towards(running_mean, mean, weight, c, inside), mask=inside)
    tl.store(updated + C + c, _towards(running_var, var, weight, c, inside), mask=inside)


@jit
def _towards(buffer, value, weight, c, inside):
    if buffer is not None:
        before = tl.load(buffer[0] + c * buffer[1], mask=inside, other=0).to(tl.float64)
        value = (1 - weight) * before + weight * value
    return value


@jit
def _correct(correction, mean, rstd, eps, least, c, inside, r_max, d_max):
    """Batch Renormalization's r and d, also stored. Their limits depend on the number of batches."""
    running_mean, running_var, to_r, to_d, _, count, warmup, transition = correction
    if count is not None:
        batches = tl.load(count).to(tl.float64)
        progress = (batches >= warmup).to(tl.float64)
        if transition > 0:
            progress = tl.minimum(tl.maximum((batches - warmup) / transition, 0.0), 1.0)
        r_max = 1 + (r_max - 1) * progress
        d_max = d_max * progress
    running_rstd = _rstd(_vector(running_var, c, inside, 1), eps, least)
    r = running_rstd / rstd
    d = (mean - _vector(running_mean, c, inside, 0)) * running_rstd
    r = tl.where(r < 1 / r_max, 1 / r_max, tl.where(r > r_max, r_max, r)).to(to_r.dtype.element_ty)
    d = tl.where(d < -d_max, -d_max, tl.where(d > d_max, d_max, d)).to(to_d.dtype.element_ty)
    tl.store(to_r + c, r, mask=inside)
    tl.store(to_d + c, d, mask=inside)
    return r.to(tl.float64), d.to(tl.float64)


@jit
def pools_kernel(
    samples, pooled, scale, weight, bias, correction, update,
    per_batch: tl.float64, eps: tl.float64, least: tl.float64, momentum: tl.float64, bessel: tl.float64,
    r_max: tl.float64, d_max: tl.float64, GHOSTS: tl.constexpr,
    sizes, per_size: tl.float64, per_last: tl.float64,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Pool ghost batches, and compute their scale; also the updated running statistics.

    `pooled` are two tables (G, C), mean and variance; `scale` is another. The shift is the bias, unless a `correction`
    computes another one.
    """
    _, C, G, _, last = sizes
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    first = _moments(samples, 0, c, c < C)[0]
    sums = tl.zeros([1, BLOCK_C], tl.float64)
    squares = tl.zeros([1, BLOCK_C], tl.float64)
    for start in range(0, G, BLOCK_G):
        g = (start + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        inside = (g < G) & (c < C)
        begin, n, share = _ghost_batches(g, sizes, per_size, per_last)
        mean, var = _pool(samples, begin, n, share, c, inside, last, BLOCK_G, BLOCK_N, BLOCK_C)
        tl.store(pooled[0] + g * C + c, mean, mask=inside)
        tl.store(pooled[1] + g * C + c, var, mask=inside)
        w = _vector(weight, c, c < C, 1)
        rstd = _rstd(var, eps, least)
        if correction is not None:
            r, d = _correct(correction, mean, rstd, eps, least, c, inside, r_max, d_max)
            tl.store(correction[4] + c, _vector(bias, c, c < C, 0) + w * d, mask=inside)
            w *= r
        tl.store(scale + g * C + c, w * rstd, mask=inside)
        gap = tl.where(inside, mean - first, 0)
        between = 0.0 if GHOSTS else gap * gap
        sums += tl.sum(n * gap, 0, keep_dims=True)
        squares += tl.sum(tl.where(inside, n * (var + between), 0), 0, keep_dims=True)
    if update is not None:
        offset = sums * per_batch
        var = squares * per_batch
        if not GHOSTS:
            var = _not_negative(var - offset * offset) * bessel
        _store_updated(update, first + offset, var, c, c < C, C, momentum)


@jit
def _pool(
    samples, begin, n, share, c, inside, last, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The mean and variance of ghost batches of n samples, around their first samples: [BLOCK_G, BLOCK_C]."""
    first = _moments(samples, begin, c, inside)[0]
    sums = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
    squares = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
    for start in range(0, last, BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N))[None, :, None]
        taken = inside[:, None, :] & (i < n[:, None, :])
        mean, var = _moments(samples, begin[:, None, :] + i, c[:, None, :], taken)
        d = tl.where(taken, mean - first[:, None, :], 0)
        sums += tl.sum(d, 1)
        squares += tl.sum(var + d * d, 1)
    offset = sums * share
    return first + offset, _not_negative(squares * share - offset * offset)


@jit
def _extreme(
    samples, begin, n, share, c, inside, last, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The most extreme sample of each ghost batch; and around another one, the sums of the rest, and its own share."""
    total = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
    for start in range(0, last, BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N))[None, :, None]
        taken = inside[:, None, :] & (i < n[:, None, :])
        mean, var = _moments(samples, begin[:, None, :] + i, c[:, None, :], taken)
        total += tl.sum(tl.where(_finite(mean) & _finite(var), mean, 0), 1)
    average = total * share  # roughly: what is far from it is extreme
    most = tl.full([BLOCK_G, BLOCK_C], -1, tl.float64)
    extreme = tl.zeros([BLOCK_G, BLOCK_C], tl.int64)
    for start in range(0, last, BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N))[None, :, None]
        taken = inside[:, None, :] & (i < n[:, None, :])
        mean, var = _moments(samples, begin[:, None, :] + i, c[:, None, :], taken)
        d = mean - average[:, None, :]
        energy = tl.where(_finite(mean) & _finite(var), var + d * d, float("inf"))
        energy = tl.where(taken, energy, -1)
        highest = tl.max(energy, 1)
        where = tl.min(tl.where(energy == highest[:, None, :], i.to(tl.int64), last), 1)
        extreme = tl.where(highest > most, where, extreme)
        most = tl.maximum(highest, most)
    center = _moments(samples, begin + tl.where(extreme == 0, 1, 0), c, inside & (n > 1))[0]
    sums = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
    squares = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
    for start in range(0, last, BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N))[None, :, None]
        taken = inside[:, None, :] & (i < n[:, None, :]) & (i != extreme[:, None, :])
        mean, var = _moments(samples, begin[:, None, :] + i, c[:, None, :], taken)
        d = tl.where(taken, mean - center[:, None, :], 0)
        sums += tl.sum(d, 1)
        squares += tl.sum(var + d * d, 1)
    mean, var = _moments(samples, begin + extreme, c, inside)
    gap = mean - center
    return extreme, center, sums, squares, gap, var + gap * gap


@jit
def _finite(value):
    return tl.abs(value) < float("inf")


@jit
def _others(samples, begin, n, share, c, taken, i, mean, var, found):
    """The mean and variance of the samples of the ghost batch except sample i, whose moments are given.

    "Total minus self" cancels when the sample itself dominates the total. So the most extreme sample is left out of the
    total and added for every sample except itself. A pool of one sample is that sample.
    """
    extreme, center, sums, squares, gap, square = found
    d = mean - center[:, None, :]
    itself = i == extreme[:, None, :]
    total = tl.where(itself, sums[:, None, :], sums[:, None, :] - d + gap[:, None, :])
    total_square = tl.where(itself, squares[:, None, :], squares[:, None, :] - (var + d * d) + square[:, None, :])
    offset = total * share[:, None, :]
    pooled = _not_negative(total_square * share[:, None, :] - offset * offset)
    pair = taken & (n == 2)[:, None, :]
    other, other_var = _moments(samples, begin[:, None, :] + 1 - i, c[:, None, :], pair)
    return tl.where(pair, other, center[:, None, :] + offset), tl.where(pair, other_var, pooled)


@jit
def exclusive_kernel(
    samples, kept, tables, weight, update,
    per_batch: tl.float64, eps: tl.float64, least: tl.float64, momentum: tl.float64, bessel: tl.float64,
    sizes, per_size: tl.float64, per_last: tl.float64,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Pool, for each sample, the other samples of its ghost batch: `tables` (2, B, C) are the mean and the scale.

    `kept` are the two tables (B, C) of the samples' own moments, for samples in parts.
    """
    B, C, G, _, last = sizes
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    w = _vector(weight, c, c < C, 1)[:, None, :]
    first = _moments(samples, 0, c, c < C)[0]
    sums = tl.zeros([1, BLOCK_C], tl.float64)
    squares = tl.zeros([1, BLOCK_C], tl.float64)
    for start in range(0, G, BLOCK_G):
        g = (start + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        inside = (g < G) & (c < C)
        begin, n, share = _ghost_batches(g, sizes, per_size, per_last)
        found = _extreme(samples, begin, n, share, c, inside, last, BLOCK_G, BLOCK_N, BLOCK_C)
        for chunk in range(0, last, BLOCK_N):
            i = (chunk + tl.arange(0, BLOCK_N))[None, :, None]
            taken = inside[:, None, :] & (i < n[:, None, :])
            b = begin[:, None, :] + i
            own, own_var = _moments(samples, b, c[:, None, :], taken)
            mean, var = _others(samples, begin, n, share, c, taken, i, own, own_var, found)
            at = b * C + c[:, None, :]
            if kept is not None:
                tl.store(kept[0] + at, own, mask=taken)
                tl.store(kept[1] + at, own_var, mask=taken)
            tl.store(tables + at, mean, mask=taken)
            tl.store(tables + B * C + at, w * _rstd(var, eps, least), mask=taken)
        offset = found[1] - first
        total = tl.where(inside, found[2] + found[4], 0)
        # Σ (mean - first)² = Σ (mean - center)² + 2·offset·Σ (mean - center) + n·offset²
        square = tl.where(inside, found[3] + found[5] + offset * (2 * total + n * offset), 0)
        sums += tl.sum(tl.where(inside, total + n * offset, 0), 0, keep_dims=True)
        squares += tl.sum(square, 0, keep_dims=True)
    if update is not None:
        offset = sums * per_batch
        var = _not_negative(squares * per_batch - offset * offset) * bessel
        _store_updated(update, first + offset, var, c, c < C, C, momentum)


@jit
def drawn_kernel(
    samples, indices, pooled, noise, scale, shift, weight, bias, update,
    noise_eps: tl.float64, eps: tl.float64, least: tl.float64, momentum: tl.float64, bessel: tl.float64,
    sizes, per_batch: tl.float64, per_draw: tl.float64,
    NORMALIZED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Pool the whole batch, and for each sample the samples that are drawn for it: the noise m and k (B, C).

    If NORMALIZED, the noise is that of the normalized x; `scale` (1, C), k and `shift` (B, C) then transform x. The
    shift is the bias if there is no m.
    """
    B, C, N = sizes
    blocks = tl.cdiv(C, BLOCK_C)
    c = (tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    leads = tl.program_id(0) < blocks
    mean, var = _whole(samples, B, per_batch, c, c < C, BLOCK_R, BLOCK_C)
    rstd = tl.full([1, BLOCK_C], 1, tl.float64)
    unit = rstd
    if NORMALIZED:
        rstd = _rstd(var, eps, least)
        unit = tl.where(var + eps < least, least, var + eps)

    b = (tl.program_id(0) // blocks * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    inside = (b < B) & (c < C)
    ghost_mean, ghost_var = _drawn(samples, indices, b, c, inside, B, N, per_draw, BLOCK_B, BLOCK_C)
    margin = noise_eps * unit
    at = b * C + c
    to_m, to_k = noise
    moved = tl.zeros([BLOCK_B, BLOCK_C], tl.float64)
    if to_m is not None:
        m = ((ghost_mean - mean) * rstd).to(to_m.dtype.element_ty)
        moved -= m.to(tl.float64)
        tl.store(to_m + at, m, mask=inside)
    if to_k is not None:
        gain = tl.sqrt((var + margin).to(ACC) / (ghost_var + margin).to(ACC))
        moved *= gain.to(tl.float64)
        tl.store(to_k + at, gain, mask=inside)
    if NORMALIZED:
        w = _vector(weight, c, c < C, 1)
        if shift is not None:
            tl.store(shift + at, moved * w + _vector(bias, c, c < C, 0), mask=inside)
        tl.store(scale + c, w * rstd, mask=leads & (c < C))
        tl.store(pooled[0] + c, mean, mask=leads & (c < C))
        tl.store(pooled[1] + c, var, mask=leads & (c < C))
    if update is not None:
        _store_updated(update, mean, var * bessel, c, leads & (c < C), C, momentum)


@jit
def _whole(samples, B, per_batch, c, inside, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The mean and variance of the whole batch, around its first sample: [1, BLOCK_C]."""
    first = _moments(samples, 0, c, inside)[0]
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float64)
    squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float64)
    for start in range(0, B, BLOCK_R):
        b = (start + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        taken = (b < B) & inside
        mean, var = _moments(samples, b, c, taken)
        d = tl.where(taken, mean - first, 0)
        sums += d
        squares += var + d * d
    offset = tl.sum(sums, 0, keep_dims=True) * per_batch
    return first + offset, _not_negative(tl.sum(squares, 0, keep_dims=True) * per_batch - offset * offset)


@jit
def _drawn(samples, indices, b, c, inside, B, N, per_draw, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr):
    """The mean and variance of the samples that are drawn for samples b, around the first one: [BLOCK_B, BLOCK_C].

    Indices were not checked. A sample for which one was drawn that does not exist gets NaN, and nothing is read there.
    """
    pointer, stride_b, stride_n = indices
    at = pointer + b * stride_b
    drawn = tl.load(at, mask=b < B, other=0).to(tl.int64)
    first = _moments(samples, drawn, c, inside & (drawn >= 0) & (drawn < B))[0]
    sums = tl.zeros([BLOCK_B, BLOCK_C], tl.float64)
    squares = tl.zeros([BLOCK_B, BLOCK_C], tl.float64)
    for n in tl.range(0, N, loop_unroll_factor=4):  # several reads are under way at a time
        drawn = tl.load(at + n * stride_n, mask=b < B, other=0).to(tl.int64)
        exists = (drawn >= 0) & (drawn < B)
        mean, var = _moments(samples, drawn, c, inside & exists)
        d = tl.where(exists, mean - first, float("nan"))
        sums += d
        squares += var + d * d
    offset = sums * per_draw
    return first + offset, _not_negative(squares * per_draw - offset * offset)


@jit
def _store_gradients(g_weight, g_bias, total, products, correction, c, inside):
    """Store the gradients of weight and bias, given those of the folded weight and of the bias."""
    if correction is not None:
        r = tl.load(correction[0] + c, mask=inside, other=0).to(tl.float64)
        products = r * products + tl.load(correction[1] + c, mask=inside, other=0).to(tl.float64) * total
    tl.store(g_weight + c, products.to(g_weight.dtype.element_ty), mask=inside)
    tl.store(g_bias + c, total.to(g_bias.dtype.element_ty), mask=inside)


@jit
def pools_gradient_kernel(
    sums, variances, noise, weight, correction, g_weight, g_bias, tables,
    per_position: tl.float64, eps: tl.float64, least: tl.float64,
    sizes, per_size: tl.float64, per_last: tl.float64,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weight and bias, and `tables` (3, G, C): scale, slope and offset of that of x."""
    _, C, G, _, last = sizes
    shift, gain = noise
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    w = _vector(weight, c, c < C, 1)
    if correction is not None:
        w *= tl.load(correction[0] + c, mask=c < C, other=0).to(tl.float64)
    all_total = tl.zeros([1, BLOCK_C], tl.float64)
    all_products = tl.zeros([1, BLOCK_C], tl.float64)
    for start in range(0, G, BLOCK_G):
        g = (start + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        inside = (g < G) & (c < C)
        begin, n, share = _ghost_batches(g, sizes, per_size, per_last)
        a = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
        d = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
        for chunk in range(0, last, BLOCK_N):
            i = (chunk + tl.arange(0, BLOCK_N))[None, :, None]
            taken = inside[:, None, :] & (i < n[:, None, :])
            b = begin[:, None, :] + i
            total, moment = _sums(sums, b, c[:, None, :], taken)
            all_total += tl.sum(tl.sum(total, 1), 0, keep_dims=True)
            total, moment, lost = _noisy(total, moment, shift, gain, b, c[:, None, :], taken)
            a += tl.sum(total, 1)
            d += tl.sum(moment, 1)
            all_products -= tl.sum(tl.sum(lost, 1), 0, keep_dims=True)
        var = tl.load(variances[0] + g * variances[1] + c * variances[2], mask=inside, other=1)
        rstd = _rstd(var, eps, least)
        all_products += tl.sum(rstd * d, 0, keep_dims=True)
        if tables is not None:
            g_var = tl.where(var + eps < least, 0, -0.5 * w * d * rstd * rstd * rstd)
            tl.store(tables + g * C + c, w * rstd, mask=inside)
            tl.store(tables + (G + g) * C + c, 2 * g_var * (share * per_position), mask=inside)
            tl.store(tables + (2 * G + g) * C + c, -w * rstd * a * (share * per_position), mask=inside)
    _store_gradients(g_weight, g_bias, all_total, all_products, correction, c, c < C)


@jit
def _exclusive_gradient(sums, samples, begin, n, share, c, taken, i, w, found, eps, least):
    """The mean of sample i, its sums, and the gradients of the mean and the variance that it is normalized with."""
    b = begin[:, None, :] + i
    own, own_var = _moments(samples, b, c[:, None, :], taken)
    mean, var = _others(samples, begin, n, share, c, taken, i, own, own_var, found)
    a, d = _sums(sums, b, c[:, None, :], taken)
    d += (own - mean) * a  # the sums are around the mean of the sample itself
    rstd = _rstd(var, eps, least)
    g_var = tl.where(var + eps < least, 0, -0.5 * w * d * rstd * rstd * rstd)
    g_mean = -w * rstd * a
    return own, mean, rstd, a, rstd * d, tl.where(taken, g_mean, 0), tl.where(taken, g_var, 0)


@jit
def exclusive_gradient_kernel(
    sums, samples, weight, g_weight, g_bias, tables,
    per_position: tl.float64, eps: tl.float64, least: tl.float64,
    sizes, per_size: tl.float64, per_last: tl.float64,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute what `pools_gradient_kernel` computes, with `tables` (3, B, C).

    The transpose of W, with the gradients g of the pooled statistics, summed over the other samples j:

        slope  = 2/S · Σ g_var_j / (n - 1)
        offset = 1/S · Σ (g_mean_j - 2·g_var_j·(mean_j - center)) / (n - 1) + slope·(own mean - center)
    """
    B, C, G, _, last = sizes
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    w = _vector(weight, c, c < C, 1)[:, None, :]
    all_total = tl.zeros([1, BLOCK_C], tl.float64)
    all_products = tl.zeros([1, BLOCK_C], tl.float64)
    for start in range(0, G, BLOCK_G):
        g = (start + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        inside = (g < G) & (c < C)
        begin, n, share = _ghost_batches(g, sizes, per_size, per_last)
        found = _extreme(samples, begin, n, share, c, inside, last, BLOCK_G, BLOCK_N, BLOCK_C)
        center = found[1][:, None, :]
        of_means = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
        of_variances = tl.zeros([BLOCK_G, BLOCK_C], tl.float64)
        for chunk in range(0, last, BLOCK_N):
            i = (chunk + tl.arange(0, BLOCK_N))[None, :, None]
            taken = inside[:, None, :] & (i < n[:, None, :])
            _own, mean, _rstd_i, total, product, g_mean, g_var = _exclusive_gradient(
                sums, samples, begin, n, share, c, taken, i, w, found, eps, least
            )
            all_total += tl.sum(tl.sum(total, 1), 0, keep_dims=True)
            all_products += tl.sum(tl.sum(tl.where(taken, product, 0), 1), 0, keep_dims=True)
            of_means += tl.sum(g_mean - tl.where(taken, 2 * g_var * (mean - center), 0), 1)
            of_variances += tl.sum(g_var, 1)
        if tables is not None:
            each = share[:, None, :] * per_position
            for chunk in range(0, last, BLOCK_N):
                i = (chunk + tl.arange(0, BLOCK_N))[None, :, None]
                taken = inside[:, None, :] & (i < n[:, None, :])
                own, mean, rstd, _total, _product, g_mean, g_var = _exclusive_gradient(
                    sums, samples, begin, n, share, c, taken, i, w, found, eps, least
                )
                g_mean -= tl.where(taken, 2 * g_var * (mean - center), 0)
                slope = 2 * (of_variances[:, None, :] - g_var) * each
                offset = (of_means[:, None, :] - g_mean) * each
                offset += slope * (own - center)
                at = (begin[:, None, :] + i) * C + c[:, None, :]
                tl.store(tables + at, w * rstd, mask=taken)
                tl.store(tables + B * C + at, slope, mask=taken)
                tl.store(tables + 2 * B * C + at, offset, mask=taken)
    _store_gradients(g_weight, g_bias, all_total, all_products, None, c, c < C)

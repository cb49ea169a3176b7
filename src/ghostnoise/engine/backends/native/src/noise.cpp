// Noise from the moments of ghost batches: pooled from drawn samples, given as tables, or drawn from a law.

#include "drawn.h"
#include "exports.h"
#include "law.h"

#include <cmath>

namespace {

// Where the moments of K ghost batches come from: rows of N indices of B samples, a law, or tables (K, C), which may be
// null.
template <class M, class D> struct Source {
    const M *mean;
    const double *var;
    i64 B, N;
    const i64 *indices;
    const double *around;
    const D *ghost_mean, *ghost_var;
    Law<D> law;
};

// By what the draws of a law are multiplied in each channel, given the channel's variance: the standard deviation of
// the mean, and the means of both parts of the variance, one table after another with `step` entries each.
template <class M, class D>
void law_scales(i64 threads, i64 C, const Source<M, D> &source, const double *channel_var, i64 step, D *to) {
    const double *n = source.law.numbers;
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide) {
        double within[CHUNK] = {}, between[CHUNK] = {};
        if (n[Law<D>::SPATIAL] != 0) {
            const Block<M> x = {source.mean + c0, source.var ? source.var + c0 : nullptr, source.B, C};
            const double share = 1 / double(x.n), inner = n[Law<D>::SPATIAL] > 1 ? n[Law<D>::SPATIAL] - 1 : 1;
            for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const double d = x.m(k, c) - source.around[c0 + c];
                    between[c] += d * d;
                    within[c] += x.v(k, c);
                }
            for (i64 c = 0; c < wide; ++c) {
                const double inside = within[c] * share / inner, value = between[c] * share - inside;
                within[c] = n[Law<D>::SPATIAL] * inside;
                between[c] = value < 0 ? 0 : value;
            }
        } else {
            for (i64 c = 0; c < wide; ++c)
                between[c] = channel_var[c0 + c];
        }
        for (i64 c = 0; c < wide; ++c) {
            const i64 at = c0 + c;
            to[at] = D(std::sqrt(within[c] * n[Law<D>::MEAN_WITHIN] + between[c] * n[Law<D>::MEAN_BETWEEN]));
            to[step + at] = D((between[c] + within[c] * n[Law<D>::AROUND]) * n[Law<D>::BETWEEN]);
            to[2 * step + at] = D(within[c] * n[Law<D>::WITHIN]);
        }
    });
}

// Runs use(k, first channel, channels, mean, variance) over K ghost batches that are drawn from a law.
template <i64 WIDE, class M, class D, class Use>
int for_law(i64 threads, i64 K, i64 C, const Source<M, D> &source, const double *channel_var, Use use) {
    const i64 step = (C + WIDE - 1) / WIDE * WIDE;
    const Scratch<D> scales(3 * step);
    if (!scales.at)
        return OUT_OF_MEMORY;
    D *scale = scales.at;
    std::memset(scale, 0, sizeof(D) * 3 * step);
    law_scales(threads, C, source, channel_var, step, scale);
    const Law<D> law = source.law;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (i64 k = 0; k < K; ++k)
        for (i64 c0 = 0; c0 < C; c0 += WIDE) {
            D mean[WIDE], var[WIDE], within[WIDE] = {};
            law.template draw<WIDE>(k, c0, mean, var, within);
#pragma omp simd
            for (i64 c = 0; c < WIDE; ++c) {
                mean[c] *= scale[c0 + c];
                var[c] = var[c] * scale[step + c0 + c] + within[c] * scale[2 * step + c0 + c];
            }
            use(k, c0, C - c0 < WIDE ? C - c0 : WIDE, mean, var);
        }
    return OK;
}

// Runs use(k, first channel, channels, mean, variance) over all K ghost batches, by tiles of P packs of channels.
template <i64 P, class M, class D, class Use>
int for_ghosts(i64 threads, i64 K, i64 C, const Source<M, D> &source, Use use) {
    constexpr i64 WIDE = DRAWN<D, P>;
    const i64 tiles = (C + WIDE - 1) / WIDE, many = threads < tiles ? threads : tiles;
    if (!source.indices) {
        for_columns<WIDE>(1, C, many, [=](i64, i64 c0, i64 wide) {
            const auto row = [=](const D *table, i64 k) { return table ? table + k * C + c0 : nullptr; };
            for (i64 k = 0; k < K; ++k)
                use(k, c0, wide, row(source.ghost_mean, k), row(source.ghost_var, k));
        });
        return OK;
    }
    if (!in_range(source.indices, K * source.N, source.B))
        return INDEX_OUT_OF_RANGE;
    const i64 size = Copied<D, P>::size(source.B, source.var);
    const Scratch<D> copies(many * size);
    if (!copies.at)
        return OUT_OF_MEMORY;
    for_columns<WIDE>(1, C, many, [=, &copies](i64, i64 c0, i64 wide) {
        const Block<M> samples = {source.mean + c0, source.var ? source.var + c0 : nullptr, source.B, C};
        const Copied<D, P> x(samples, source.around + c0, wide, copies.at + thread_index() * size);
        with_flag(source.var, [&](auto with_var) {
            D mean[WIDE], var[WIDE];
            for (i64 k = 0; k < K; ++k) {
                pool_drawn<decltype(with_var)::value>(x, source.indices + k * source.N, source.N, mean, var);
                if (wide == WIDE)
                    use(k, c0, std::integral_constant<i64, WIDE>(), mean, var);
                else
                    use(k, c0, wide, mean, var);
            }
        });
    });
    return OK;
}

// The same with tiles that fit the number of channels.
template <class M, class D, class Use> int for_ghosts(i64 threads, i64 K, i64 C, const Source<M, D> &source, Use use) {
    if (C <= Pack<D>::LANES)
        return for_ghosts<1>(threads, K, C, source, use);
    if (C <= 2 * Pack<D>::LANES)
        return for_ghosts<2>(threads, K, C, source, use);
    return for_ghosts<PACKS>(threads, K, C, source, use);
}

// The tables that noise makes: its own shift m and scale k, and unless null what is then applied to x. Where samples
// have a single position, so that x are their means, y may be made at once.
template <class A> struct Made {
    A *m, *k, *scale, *shift, *y;
};

template <class M, class A>
int noise(i64 threads, i64 K, i64 C, const Source<M, A> &source, bool shifts, bool scales, const double *pool_var,
          const double *margin, const A *coefficients, const A *weight, const A *bias, Made<A> to) {
    enum { ABOVE, BELOW, ROWS };  // the scale is ABOVE / sqrt(var + BELOW)
    const Scratch<A> scratch((ROWS + NoisyAffine<A>::ROWS) * C);
    if (!scratch.at)
        return OUT_OF_MEMORY;
    A *rows = scratch.at;
    for (i64 c = 0; c < C; ++c) {
        rows[ABOVE * C + c] = A(std::sqrt(pool_var[c] + margin[c]));
        rows[BELOW * C + c] = A(margin[c]);
    }
    const NoisyAffine<A> affine(rows + ROWS * C, C);
    const Coefficients<A> pool(const_cast<A *>(coefficients), coefficients ? C : 0);
    if (coefficients)
        affine.fill(pool, weight, bias, C);
    const A *rstd = pool.rstd;
    int status = OK;
    const auto run = [=, &source, &status](auto with_shift, auto with_scale, auto normalizes, auto applies,
                                           auto transforms) {
        const auto use = [=, &source](i64 row, i64 c0, auto wide, const A *mean, const A *var) {
            const i64 at = row * C + c0, ahead = at + rows_ahead(row, K) * C;
            for (i64 c = 0; c < wide; c += LINE / i64(sizeof(A))) {
                if constexpr (decltype(with_shift)::value)
                    GN_WILL_WRITE(to.m + ahead + c);
                if constexpr (decltype(with_scale)::value)
                    GN_WILL_WRITE(to.k + ahead + c);
                if constexpr (decltype(transforms)::value) {
                    GN_WILL_WRITE(to.y + ahead + c);
                    GN_WILL_READ(source.mean + ahead + c);
                }
            }
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                A k = 1, m = decltype(with_shift)::value ? mean[c] : A(0);
                if constexpr (decltype(with_scale)::value)
                    to.k[at + c] = k = rows[ABOVE * C + c0 + c] / std::sqrt(var[c] + rows[BELOW * C + c0 + c]);
                if constexpr (decltype(normalizes)::value)
                    m *= rstd[c0 + c];
                if constexpr (decltype(applies)::value) {
                    to.scale[at + c] = affine.scale(c0 + c, k);
                    to.shift[at + c] = affine.shift(c0 + c, m, k);
                }
                if constexpr (decltype(transforms)::value)
                    to.y[at + c] = affine.scale(c0 + c, k) * (A(source.mean[at + c]) - affine.center[c0 + c]) +
                                   affine.shift(c0 + c, m, k);
                if constexpr (decltype(with_shift)::value)
                    to.m[at + c] = m;
            }
        };
        if (!source.law.seed)
            status = for_ghosts(threads, K, C, source, use);
        else if (C <= Pack<A>::LANES)
            status = for_law<Pack<A>::LANES>(threads, K, C, source, pool_var, use);
        else
            status = for_law<DRAWN<A>>(threads, K, C, source, pool_var, use);
    };
    with_flag(shifts, [&](auto shift) {
        with_flag(scales, [&](auto scale) {
            const std::true_type yes;
            const std::false_type no;
            if (to.y)
                run(shift, scale, yes, no, yes);
            else if (to.scale)
                run(shift, scale, yes, yes, no);
            else
                with_flag(coefficients, [&](auto normalizes) { run(shift, scale, normalizes, no, no); });
        });
    });
    return status;
}

}  // namespace

// clang-format off
#define GN_MEANS_AND_TABLES(...)                                                                                       \
    switch (2 * means + dtype) {                                                                                       \
        case 0: { using M = float; using A = float; __VA_ARGS__ }                                                      \
        case 1: { using M = float; using A = double; __VA_ARGS__ }                                                     \
        case 2: { using M = double; using A = float; __VA_ARGS__ }                                                     \
        case 3: { using M = double; using A = double; __VA_ARGS__ }                                                    \
        default: return UNKNOWN_DTYPE;                                                                                 \
    }
// clang-format on

GN_EXPORT(pool_drawn)
(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var, const i64 *indices,
 const double *around, void *to_mean, void *to_var) {
    GN_MEANS_AND_TABLES(
        const Source<M, A> source = {in<M>(mean), var, B, N, indices, around, nullptr, nullptr, {}};
        return for_ghosts(threads, K, C, source, [=](i64 k, i64 c0, i64 wide, const A *pooled, const A *pooled_var) {
            std::memcpy(out<A>(to_mean) + k * C + c0, pooled, sizeof(A) * wide);
            std::memcpy(out<A>(to_var) + k * C + c0, pooled_var, sizeof(A) * wide);
        }););
}

GN_EXPORT(noise_tables)
(i64 means, i64 dtype, i64 threads, i64 B, i64 C, i64 K, i64 N, const void *mean, const double *var, const i64 *indices,
 const double *around, const void *ghost_mean, const void *ghost_var, const i64 *seed, const double *law,
 const void *quantiles, i64 shifts, i64 scales, const double *pool_var, const double *margin, const void *coefficients,
 const void *weight, const void *bias, void *to_m, void *to_k, void *to_scale, void *to_shift, void *to_y) {
    GN_MEANS_AND_TABLES(
        const Source<M, A> source = {in<M>(mean),
                                     var,
                                     B,
                                     N,
                                     indices,
                                     around,
                                     in<A>(ghost_mean),
                                     in<A>(ghost_var),
                                     {seed, law, in<A>(quantiles)}};
        const Made<A> to = {out<A>(to_m), out<A>(to_k), out<A>(to_scale), out<A>(to_shift), out<A>(to_y)};
        return noise<M, A>(threads, K, C, source, shifts, scales, pool_var, margin, in<A>(coefficients), in<A>(weight),
                           in<A>(bias), to););
}

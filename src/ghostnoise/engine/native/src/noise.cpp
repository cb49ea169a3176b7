// Noise from the moments of ghost batches: pooled from drawn samples, or drawn from a law.

#include "drawn.h"
#include "law.h"

#include <cmath>

namespace ghostnoise::GN_ISA {
namespace {

// Where the moments of K ghost batches come from: K rows of N indices of B samples, or a law.
template <class M, class D> struct Source {
    const M *mean;
    const double *var;
    i64 B, K, N;
    const i64 *indices;
    const double *around;
    Law<D> law;
};

// By what the draws of a law are multiplied in each channel, given the channel's variance: the standard deviation of
// the mean, and the means of both parts of the variance, one table after another with `step` entries each.
template <class M, class D>
void law_scales(i64 threads, i64 C, const Source<M, D> &source, const double *channel_var, i64 step, D *to) {
    const double *n = source.law.numbers;
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide, i64) {
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
Status for_law(i64 threads, i64 C, const Source<M, D> &source, const double *channel_var, Use use) {
    const i64 step = (C + WIDE - 1) / WIDE * WIDE;
    const Scratch<D> scales(3 * step);
    if (!scales.at)
        return Status::OUT_OF_MEMORY;
    D *scale = scales.at;
    std::memset(scale, 0, sizeof(D) * 3 * step);
    law_scales(threads, C, source, channel_var, step, scale);
    const Law<D> law = source.law;
    in_parallel(threads, source.K, [=](i64 begin, i64 end, i64) {
        for (i64 k = begin; k < end; ++k)
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
    });
    return Status::OK;
}

// Runs use(k, first channel, channels, mean, variance) over K ghost batches of drawn samples, by tiles of P packs of
// channels.
template <i64 P, class M, class D, class Use>
Status for_drawn(i64 threads, i64 C, const Source<M, D> &source, Use use) {
    constexpr i64 WIDE = DRAWN<D, P>;
    const i64 tiles = (C + WIDE - 1) / WIDE, many = threads < tiles ? threads : tiles;
    const i64 size = Copied<D, P>::size(source.B, source.var);
    const Scratch<D> copies(many * size);
    if (!copies.at)
        return Status::OUT_OF_MEMORY;
    for_columns<WIDE>(1, C, many, [=, &copies](i64, i64 c0, i64 wide, i64 share) {
        const Block<M> samples = {source.mean + c0, source.var ? source.var + c0 : nullptr, source.B, C};
        const Copied<D, P> x(samples, source.around + c0, wide, copies.at + share * size);
        with_flag(source.var, [&](auto with_var) {
            D mean[WIDE], var[WIDE];
            for (i64 k = 0; k < source.K; ++k) {
                pool_drawn<decltype(with_var)::value>(x, source.indices + k * source.N, source.N, mean, var);
                use(k, c0, wide, mean, var);
            }
        });
    });
    return Status::OK;
}

// The same with tiles that fit the number of channels.
template <class M, class D, class Use> Status for_drawn(i64 threads, i64 C, const Source<M, D> &source, Use use) {
    if (!in_range(source.indices, source.K * source.N, source.B))
        return Status::INDEX_OUT_OF_RANGE;
    if (C <= Pack<D>::LANES)
        return for_drawn<1>(threads, C, source, use);
    if (C <= 2 * Pack<D>::LANES)
        return for_drawn<2>(threads, C, source, use);
    return for_drawn<PACKS>(threads, C, source, use);
}

template <class M, class A> Status noise(const NoiseTables &n) {
    const i64 C = n.C, B = n.B;
    const Scratch<A> scratch(2 * C);  // the scale is above / sqrt(var + below)
    if (!scratch.at)
        return Status::OUT_OF_MEMORY;
    A *above = scratch.at, *below = above + C, *to_m = out<A>(n.m), *to_k = out<A>(n.k), *y = out<A>(n.y);
    for (i64 c = 0; c < C; ++c) {
        above[c] = A(std::sqrt(n.pool_var[c] + n.margin[c]));
        below[c] = A(n.margin[c]);
    }
    const A *unit = in<A>(n.unit);
    const M *x = in<M>(n.samples.mean);
    const NoisyAffine<A> affine(out<A>(const_cast<void *>(n.affine)), n.affine ? C : 0);
    const auto use = [=](i64 b, i64 c0, i64 wide, const A *mean, const A *var) {
        const i64 at = b * C + c0, ahead = at + rows_ahead(b, B) * C;
        for (i64 c = 0; c < wide; c += LINE / i64(sizeof(A))) {
            if (to_m)
                GN_WILL_WRITE(to_m + ahead + c);
            if (to_k)
                GN_WILL_WRITE(to_k + ahead + c);
            if (y) {
                GN_WILL_WRITE(y + ahead + c);
                GN_WILL_READ(x + ahead + c);
            }
        }
        A m[DRAWN<A>], k[DRAWN<A>];
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            k[c] = above[c0 + c] / std::sqrt(var[c] + below[c0 + c]);
            m[c] = mean[c] * unit[c0 + c];
        }
        if (to_k)
            std::memcpy(to_k + at, k, sizeof(A) * wide);
        if (to_m)
            std::memcpy(to_m + at, m, sizeof(A) * wide);
        if (!y)
            return;
        for (i64 c = 0; !to_k && c < wide; ++c)
            k[c] = 1;
        for (i64 c = 0; !to_m && c < wide; ++c)
            m[c] = 0;
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            y[at + c] = affine.scale(c0 + c, k[c]) * (A(x[at + c]) - affine.center[c0 + c]) +
                        affine.shift(c0 + c, m[c], k[c]);
    };
    const Source<M, A> source = {x,
                                 n.samples.var,
                                 B,
                                 B,
                                 n.source.N,
                                 n.source.indices,
                                 n.around,
                                 {n.source.seed, n.source.law, in<A>(n.source.quantiles)}};
    if (n.source.indices)
        return for_drawn(n.threads, C, source, use);
    if (C <= Pack<A>::LANES)
        return for_law<Pack<A>::LANES>(n.threads, C, source, n.pool_var, use);
    return for_law<DRAWN<A>>(n.threads, C, source, n.pool_var, use);
}

}  // namespace

Status pool_drawn(i64 threads, i64 B, i64 C, i64 K, i64 N, const double *mean, const double *var, const i64 *indices,
                  double *to_mean, double *to_var) {
    const Scratch<double> zero(C);
    if (!zero.at)
        return Status::OUT_OF_MEMORY;
    std::memset(zero.at, 0, sizeof(double) * C);
    const Source<double, double> source = {mean, var, B, K, N, indices, zero.at, {}};
    return for_drawn(threads, C, source, [=](i64 k, i64 c0, i64 wide, const double *drawn, const double *drawn_var) {
        std::memcpy(to_mean + k * C + c0, drawn, sizeof(double) * wide);
        std::memcpy(to_var + k * C + c0, drawn_var, sizeof(double) * wide);
    });
}

Status noise_tables(const NoiseTables &n) {
    if (n.wide_arithmetic)
        return noise<double, double>(n);
    return n.samples.wide ? noise<double, float>(n) : noise<float, float>(n);
}

}  // namespace ghostnoise::GN_ISA

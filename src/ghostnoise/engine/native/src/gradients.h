// From the sums over the positions of samples to the gradients of weight, bias and the statistics of pools.

#pragma once

#include "tables.h"

namespace ghostnoise::GN_ISA {

constexpr i64 SHORT_SUM = 16;  // samples that are summed in the arithmetic of x before their sum is added in double

// For some samples, the sums of k * a, k * d, a and k * m * a.
template <class A> using PartialSums = A[4][CHUNK];

// Noise of the samples, its shift m and its scale k (B, C); null where there is none.
template <class A> struct SampleNoise {
    const A *m, *k;

    SampleNoise from(i64 at) const { return {m ? m + at : nullptr, k ? k + at : nullptr}; }
};

// The sums a = sum(dy) and d = sum(dy * (x - center)) of the samples, as tables (B, C).
template <class A> struct SumTables {
    const A *a, *d;
    i64 C;

    void add(i64 b, i64 end, i64 c0, i64 wide, const A *, SampleNoise<A> noise, PartialSums<A> &sums) const {
        for (; b < end; ++b) {
            const A *total = a + b * C + c0, *moment = d + b * C + c0;
            const auto [m, k] = noise.from(b * C + c0);
            with_flag(k, [&, m = m, k = k](auto scales) {
                with_flag(m, [&](auto shifts) {
#pragma omp simd
                    for (i64 c = 0; c < wide; ++c) {
                        const A scale = decltype(scales)::value ? k[c] : A(1), scaled = scale * total[c];
                        sums[0][c] += scaled;
                        sums[1][c] += scale * moment[c];
                        sums[2][c] += total[c];
                        if constexpr (decltype(shifts)::value)
                            sums[3][c] += scaled * m[c];
                    }
                });
            });
        }
    }
};

// The same sums of samples with a single position, from dy and x. Packs of channels are summed in registers.
template <class T, class A> struct SingleSums {
    const T *dy;
    i64 dy_b;
    const T *x;
    i64 x_b, C;

    void add(i64 from, i64 to, i64 c0, i64 wide, const A *center, SampleNoise<A> noise, PartialSums<A> &sums) const {
        constexpr i64 LANES = Pack<A>::LANES;
        for (i64 c = 0; c < wide; c += LANES) {
            const SampleNoise<A> own = noise.from(c0 + c);
            with_flag(own.k, [&](auto scales) {
                with_flag(own.m, [&](auto shifts) {
                    if (c + LANES <= wide)
                        add_pack(from, to, c0 + c, std::integral_constant<i64, LANES>(), center + c, own, scales,
                                 shifts, sums, c);
                    else
                        add_pack(from, to, c0 + c, wide - c, center + c, own, scales, shifts, sums, c);
                });
            });
        }
    }

    template <class Count, class Scales, class Shifts>
    void add_pack(i64 from, i64 to, i64 at, Count count, const A *center, SampleNoise<A> noise, Scales, Shifts,
                  PartialSums<A> &sums, i64 c) const {
        const Pack<A> middle = values<A>(center, count, A(0));
        Pack<A> made[4] = {};
#pragma GCC unroll 4
        for (i64 b = from; b < to; ++b) {
            const Pack<A> a = values<A>(dy + b * dy_b + at, count, A(0));
            Pack<A> d = values<A>(x + b * x_b + at, count, A(0)), scaled = a;
            d.lanes = a.lanes * (d.lanes - middle.lanes);
            rounded(d);
            made[2].lanes += a.lanes;
            if constexpr (Scales::value) {
                const Pack<A> k = values<A>(noise.k + b * C, count, A(0));
                scaled.lanes = k.lanes * a.lanes;
                made[1].lanes += k.lanes * d.lanes;
            } else {
                made[1].lanes += d.lanes;
            }
            if constexpr (Scales::value || Shifts::value)
                made[0].lanes += scaled.lanes;
            if constexpr (Shifts::value)
                made[3].lanes += scaled.lanes * values<A>(noise.m + b * C, count, A(0)).lanes;
        }
        if constexpr (!Scales::value && !Shifts::value)
            made[0] = made[2];
        for (i64 k = 0; k < 4; ++k)
            std::memcpy(sums[k] + c, &made[k], VECTOR);
    }
};

// `sums` are SumTables or SingleSums.
template <class A, class Sums>
void statistics_gradient(i64 threads, i64 B, i64 C, i64 R, i64 per_pool, Sums sums, SampleNoise<A> noise,
                         const A *tables, const double *var, Floor floor, A *to_weight, A *to_bias, A *to_mean,
                         A *to_var, double *carried) {
    const Coefficients<A> pools(const_cast<A *>(tables), R * C);
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide, i64) {
        double g_weight[CHUNK] = {}, g_bias[CHUNK] = {};
        for (i64 c = 0; carried && c < wide; ++c) {
            g_weight[c] = carried[c0 + c];
            g_bias[c] = carried[C + c0 + c];
        }
        const auto finish_pool = [&](i64 r, const auto *sum, const auto *product) {
            const i64 at = r * C + c0;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const PoolGradient<A> made(pools.of(at + c), var[at + c], floor, double(sum[c]), double(product[c]));
                g_weight[c] += made.weight;
                to_mean[at + c] = made.mean;
                to_var[at + c] = made.var;
            }
        };
        for (i64 r = 0; r < R; ++r) {
            if constexpr (std::is_same_v<Sums, SumTables<A>>) {
                if (R == B && !noise.m && !noise.k) {  // each sample has a pool of its own
                    const A *a = sums.a + r * C + c0;
                    finish_pool(r, a, sums.d + r * C + c0);
                    for (i64 c = 0; c < wide; ++c)
                        g_bias[c] += double(a[c]);
                    continue;
                }
            }
            double sum[CHUNK] = {}, product[CHUNK] = {};
            const i64 end = r == R - 1 ? B : (r + 1) * per_pool;
            for (i64 b = r * per_pool; b < end;) {
                alignas(64) PartialSums<A> part = {};
                const i64 stop = end - b < SHORT_SUM ? end : b + SHORT_SUM;
                sums.add(b, stop, c0, wide, pools.center + r * C + c0, noise, part);
                b = stop;
                for (i64 c = 0; c < wide; ++c) {
                    sum[c] += double(part[0][c]);
                    product[c] += double(part[1][c]);
                    g_bias[c] += double(part[2][c]);
                    g_weight[c] -= double(part[3][c]);
                }
            }
            finish_pool(r, sum, product);
        }
        for (i64 c = 0; c < wide; ++c) {
            to_weight[c0 + c] = A(g_weight[c]);
            to_bias[c0 + c] = A(g_bias[c]);
        }
        for (i64 c = 0; carried && c < wide; ++c) {
            carried[c0 + c] = g_weight[c];
            carried[C + c0 + c] = g_bias[c];
        }
    });
}

}  // namespace ghostnoise::GN_ISA

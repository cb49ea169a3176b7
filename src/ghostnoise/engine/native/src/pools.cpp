// Pools of the samples' moments: consecutive ghost batches, and ghost batches without the sample itself.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work is split into tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "pools.h"

namespace ghostnoise::GN_ISA {
namespace {

template <class M>
void pools(bool exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const M *mean, const double *var,
          double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide, i64) {
        const Block<M> x = block(mean, var, starts, g, C, c);
        const i64 at = (exclusive ? starts[g] : g) * C + c;
        with_flag(var, [&](auto with_var) {
            constexpr bool WITH_VAR = decltype(with_var)::value;
            if (exclusive)
                exclusive_tile<WITH_VAR>(x, wide, to_mean + at, to_var + at);
            else
                inclusive_tile<WITH_VAR>(x, wide, to_mean + at, to_var + at);
        });
    });
}

}  // namespace

void pool(bool exclusive, i64 threads, i64 G, const i64 *starts, i64 C, Samples samples, double *mean, double *var) {
    if (samples.wide)
        pools(exclusive, threads, G, starts, C, in<double>(samples.mean), samples.var, mean, var);
    else
        pools(exclusive, threads, G, starts, C, in<float>(samples.mean), samples.var, mean, var);
}

void ghost_batches(i64 threads, i64 G, const i64 *starts, i64 C, const double *mean, const double *var,
                   double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide, i64) {
        const Block<double> x = block(mean, var, starts, g, C, c);
        const i64 at = starts[g] * C + c;
        if (var)
            inclusive_tile<true>(x, wide, to_mean + at, to_var + at);
        else
            inclusive_tile<false>(x, wide, to_mean + at, to_var + at);
        for (i64 k = 1; G > 1 && k < x.n; ++k) {
            std::memcpy(to_mean + at + k * C, to_mean + at, sizeof(double) * wide);
            std::memcpy(to_var + at + k * C, to_var + at, sizeof(double) * wide);
        }
    });
}

void ghost_batches_backward(i64 threads, i64 G, const i64 *starts, i64 C, const double *g_mean, const double *g_var,
                            const double *mean, const double *pooled, double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c0, i64 wide, i64) {
        const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0, rows = G > 1 ? n : 1;
        double means[CHUNK] = {}, vars[CHUNK] = {};
        for (i64 k = 0; k < rows; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                means[c] += g_mean[first + k * C + c];
                vars[c] += g_var[first + k * C + c];
            }
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            means[c] /= double(n);
            vars[c] /= double(n);
        }
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                to_mean[first + k * C + c] = means[c] + 2 * vars[c] * (mean[first + k * C + c] - pooled[first + c]);
        for (i64 k = 0; to_var && k < rows; ++k)
            std::memcpy(to_var + first + k * C, vars, sizeof(double) * wide);
    });
}

void excluding_sample(i64 threads, i64 G, const i64 *starts, i64 C, const double *mean, const double *var,
                      double *to_mean, double *to_var) {
    pools(true, threads, G, starts, C, mean, var, to_mean, to_var);
}

void excluding_sample_backward(i64 threads, i64 G, const i64 *starts, i64 C, const double *g_mean, const double *g_var,
                               const double *mean, const double *pooled, double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c0, i64 wide, i64) {
        const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0;
        const double share = 1.0 / double(n - 1);
        double middle[CHUNK] = {}, vars[CHUNK] = {}, means[CHUNK] = {};
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                middle[c] += mean[first + k * C + c];
        for (i64 c = 0; c < wide; ++c)
            middle[c] /= double(n);
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                vars[c] += g_var[at];
                means[c] += through_mean(g_mean[at], g_var[at], pooled[at] - middle[c]);
            }
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                const double own = (vars[c] - g_var[at]) * share;
                const double rest = means[c] - through_mean(g_mean[at], g_var[at], pooled[at] - middle[c]);
                to_mean[at] = rest * share + 2 * (mean[at] - middle[c]) * own;
                if (to_var)
                    to_var[at] = own;
            }
    });
}

void normalizing_scale(i64 threads, i64 R, i64 C, const double *var, const double *weight, double eps, double least,
                       double *to) {
    const Floor floor = {eps, least};
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide, i64) {
        for (i64 at = c0; at < R * C; at += C)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                to[at + c] = (weight ? weight[c0 + c] : 1.0) / std::sqrt(floor.of(var[at + c]));
    });
}

void normalizing_scale_backward(i64 threads, i64 R, i64 C, const double *gradient, const double *var,
                                const double *weight, double eps, double least, double *to_var, double *to_weight) {
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide, i64) {
        double sums[CHUNK] = {};
        for (i64 at = c0; at < R * C; at += C)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const double value = var[at + c] + eps, rstd = 1 / std::sqrt(value < least ? least : value);
                const double slope = -0.5 * gradient[at + c] * rstd * rstd * rstd * (weight ? weight[c0 + c] : 1.0);
                sums[c] += gradient[at + c] * rstd;
                to_var[at + c] = value < least ? 0.0 : slope;
            }
        if (to_weight)
            std::memcpy(to_weight + c0, sums, sizeof(double) * wide);
    });
}

}  // namespace ghostnoise::GN_ISA

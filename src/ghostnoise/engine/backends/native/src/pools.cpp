// Pools of the samples' moments: consecutive ghost batches, and ghost batches without the sample itself.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work is split into tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "exclusive.h"
#include "exports.h"

namespace {

// Runs add(first sample, samples) over a few samples at a time, whose sums of a channel stay in a register.
template <class Add> void for_few_samples(i64 n, Add add) {
    constexpr i64 FEW = 8;
    i64 k = 0;
    for (; k + FEW <= n; k += FEW)
        add(k, std::integral_constant<i64, FEW>());
    for (; k < n; ++k)
        add(k, std::integral_constant<i64, 1>());
}

// The moments of a ghost batch (1, C).
template <bool WITH_VAR, class M> void inclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    double center[CHUNK] = {}, square[CHUNK] = {};
    for_few_samples(x.n, [&](i64 k, auto few) {
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            double sum = center[c];
            for (i64 i = 0; i < few; ++i)
                sum += x.m(k + i, c);
            center[c] = sum;
        }
    });
    for (i64 c = 0; c < wide; ++c)
        center[c] /= double(x.n);
    for_few_samples(x.n, [&](i64 k, auto few) {
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            double sum = square[c];
            for (i64 i = 0; i < few; ++i) {
                const double d = x.m(k + i, c) - center[c];
                sum += WITH_VAR ? x.var[(k + i) * x.stride + c] + d * d : d * d;
            }
            square[c] = sum;
        }
    });
    for (i64 c = 0; c < wide; ++c) {
        mean[c] = center[c];
        var[c] = square[c] / double(x.n);
    }
}

template <class M>
void pool(i64 exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const M *mean, const double *var,
          double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide) {
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

GN_EXPORT(pool)
(i64 means, i64 exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean, const double *var,
 double *to_mean, double *to_var) {
    if (means != 0 && means != 1)
        return UNKNOWN_DTYPE;
    if (means == 0)
        pool(exclusive, threads, G, starts, C, in<float>(mean), var, to_mean, to_var);
    else
        pool(exclusive, threads, G, starts, C, in<double>(mean), var, to_mean, to_var);
    return OK;
}

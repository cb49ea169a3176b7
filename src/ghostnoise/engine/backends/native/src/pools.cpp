// Pools of the samples' moments: consecutive ghost batches, and ghost batches without the sample itself.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work is split into tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "exports.h"

#include <cmath>

namespace {

// The moments of a ghost batch (1, C).
template <class M> void inclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    double center[CHUNK] = {}, square[CHUNK] = {};
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            center[c] += x.m(k, c);
    for (i64 c = 0; c < wide; ++c)
        center[c] /= double(x.n);
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double d = x.m(k, c) - center[c];
            square[c] += x.v(k, c) + d * d;
        }
    for (i64 c = 0; c < wide; ++c) {
        mean[c] = center[c];
        var[c] = square[c] / double(x.n);
    }
}

// For each sample, the moments of its ghost batch without it (n, C). The most extreme sample is left out of the sums
// and added back for all samples but itself, so that what is subtracted is never larger than what remains. A sample
// that is not finite is the most extreme one: then its own statistics are those of finite samples alone.
template <bool WITH_VAR, class M> void exclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    const auto own_var = [&x](i64 k, i64 c) { return WITH_VAR ? x.var[k * x.stride + c] : 0.0; };
    if (x.n == 2) {  // a pool of one sample may be far from any center: copy its moments
        for (i64 k = 0; k < 2; ++k)
            for (i64 c = 0; c < wide; ++c) {
                mean[k * x.stride + c] = x.m(1 - k, c);
                var[k * x.stride + c] = own_var(1 - k, c);
            }
        return;
    }
    double center[CHUNK] = {}, most[CHUNK], sum[CHUNK] = {}, square[CHUNK] = {}, extreme_d[CHUNK],
           extreme_energy[CHUNK];
    i64 extreme[CHUNK] = {};
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double value = x.m(k, c);
            center[c] += value - value == 0 ? value : 0;  // finite values only
        }
    for (i64 c = 0; c < wide; ++c) {
        center[c] /= double(x.n);
        most[c] = -1;
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double d = x.m(k, c) - center[c], energy = own_var(k, c) + d * d;
            const bool more = !(energy <= most[c]);  // true if the energy is NaN; then none exceeds it
            most[c] = more ? (energy == energy ? energy : HUGE_VAL) : most[c];
            extreme[c] = more ? k : extreme[c];
        }
    const double n = double(x.n - 1);
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            sum[c] += k == extreme[c] ? 0 : x.m(k, c);
    for (i64 c = 0; c < wide; ++c) {
        center[c] = sum[c] / n;
        sum[c] = 0;
        extreme_d[c] = x.m(extreme[c], c) - center[c];
        extreme_energy[c] = own_var(extreme[c], c) + extreme_d[c] * extreme_d[c];
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool included = k != extreme[c];
            const double d = x.m(k, c) - center[c];
            sum[c] += included ? d : 0;
            square[c] += included ? own_var(k, c) + d * d : 0;
        }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool itself = k == extreme[c];
            const double d = x.m(k, c) - center[c], energy = own_var(k, c) + d * d;
            const double total = itself ? sum[c] : sum[c] - d + extreme_d[c];
            const double squares = itself ? square[c] : square[c] - energy + extreme_energy[c];
            const double shift = total / n, value = squares / n - shift * shift;
            mean[k * x.stride + c] = center[c] + shift;
            var[k * x.stride + c] = value < 0 ? 0 : value;
        }
}

template <class M>
void pool(i64 exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const M *mean, const double *var,
          double *to_mean, double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide) {
        const Block<M> x = block(mean, var, starts, g, C, c);
        const i64 at = (exclusive ? starts[g] : g) * C + c;
        if (exclusive)
            with_flag(var, [&](auto with_var) {
                exclusive_tile<decltype(with_var)::value>(x, wide, to_mean + at, to_var + at);
            });
        else
            inclusive_tile(x, wide, to_mean + at, to_var + at);
    });
}

}  // namespace

GN_EXPORT(pool)(i64 means, i64 exclusive, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean,
                const double *var, double *to_mean, double *to_var) {
    if (means != 0 && means != 1)
        return UNKNOWN_DTYPE;
    if (means == 0)
        pool(exclusive, threads, G, starts, C, in<float>(mean), var, to_mean, to_var);
    else
        pool(exclusive, threads, G, starts, C, in<double>(mean), var, to_mean, to_var);
    return OK;
}

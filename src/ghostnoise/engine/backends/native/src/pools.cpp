// Pools of the samples' moments: consecutive ghost batches, and ghost batches without the sample itself.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work is split into tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "exclusive.h"
#include "exports.h"

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

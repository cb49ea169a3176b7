// Pools of per-sample moments: who counts in whose statistics (ghostnoise/ghosts.py), in single passes over the tables.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work goes by tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "exports.h"

namespace {

// everyone: the moments of each ghost batch (G, C).
template <class M> void everyone_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
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

// others: for each sample, the moments of the others in its ghost batch (B, C). The most extreme sample is kept out of
// the totals, and added for everyone but itself: what is then subtracted is never larger than what stays.
template <bool WITH_VAR, class M> void others_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    const auto own_var = [&x](i64 k, i64 c) { return WITH_VAR ? x.var[k * x.stride + c] : 0.0; };
    if (x.n == 2) {  // the other one's own moments: a pool of one sample may be far from any offset
        for (i64 k = 0; k < 2; ++k)
            for (i64 c = 0; c < wide; ++c) {
                mean[k * x.stride + c] = x.m(1 - k, c);
                var[k * x.stride + c] = own_var(1 - k, c);
            }
        return;
    }
    double center[CHUNK] = {}, most[CHUNK], sum[CHUNK] = {}, square[CHUNK] = {}, own[CHUNK], own_square[CHUNK];
    i64 extreme[CHUNK] = {};
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            center[c] += x.m(k, c);
    for (i64 c = 0; c < wide; ++c) {
        center[c] /= double(x.n);
        most[c] = -1;
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const double d = x.m(k, c) - center[c], energy = own_var(k, c) + d * d;
            const bool more = !(energy <= most[c]);  // not a number counts as most extreme
            most[c] = more ? energy : most[c];
            extreme[c] = more ? k : extreme[c];
        }
    const double others = double(x.n - 1);
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            sum[c] += k == extreme[c] ? 0 : x.m(k, c);
    for (i64 c = 0; c < wide; ++c) {
        center[c] = sum[c] / others;
        sum[c] = 0;
        own[c] = x.m(extreme[c], c) - center[c];
        own_square[c] = own_var(extreme[c], c) + own[c] * own[c];
    }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool counts = k != extreme[c];
            const double d = x.m(k, c) - center[c];
            sum[c] += counts ? d : 0;
            square[c] += counts ? own_var(k, c) + d * d : 0;
        }
    for (i64 k = 0; k < x.n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const bool itself = k == extreme[c];
            const double d = x.m(k, c) - center[c], energy = own_var(k, c) + d * d;
            const double total = itself ? sum[c] : sum[c] - d + own[c];
            const double squares = itself ? square[c] : square[c] - energy + own_square[c];
            const double shift = total / others, value = squares / others - shift * shift;
            mean[k * x.stride + c] = center[c] + shift;
            var[k * x.stride + c] = value < 0 ? 0 : value;
        }
}

template <class M>
void pool(i64 others, i64 threads, i64 G, const i64 *starts, i64 C, const M *mean, const double *var, double *to_mean,
          double *to_var) {
    for_columns(G, C, threads, [=](i64 g, i64 c, i64 wide) {
        const Block<M> x = block(mean, var, starts, g, C, c);
        const i64 at = (others ? starts[g] : g) * C + c;
        if (others)
            with_flag(var, [&](auto with_var) {
                others_tile<decltype(with_var)::value>(x, wide, to_mean + at, to_var + at);
            });
        else
            everyone_tile(x, wide, to_mean + at, to_var + at);
    });
}

} // namespace

// `starts` are the first rows of G ghost batches, and the end.
GN_EXPORT(pool)(i64 means, i64 others, i64 threads, i64 G, const i64 *starts, i64 C, const void *mean,
                const double *var, double *to_mean, double *to_var) {
    if (means == 0)
        pool(others, threads, G, starts, C, static_cast<const float *>(mean), var, to_mean, to_var);
    else
        pool(others, threads, G, starts, C, static_cast<const double *>(mean), var, to_mean, to_var);
    return means > 1;
}

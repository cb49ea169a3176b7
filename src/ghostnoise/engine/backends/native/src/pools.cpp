// Pools of the samples' moments: consecutive ghost batches, and ghost batches without the sample itself.
//
// Means are (B, C) in float or double, variances in double, or absent where samples have a single position. Sums are
// in double. Work is split into tiles of channels, whose rows of a ghost batch fit a core's cache.

#include "exports.h"
#include "pools.h"

namespace {

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

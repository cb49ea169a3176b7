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

}  // namespace ghostnoise::GN_ISA

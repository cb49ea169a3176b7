// The small tables between the passes: from statistics to coefficients, and from the gradient of the statistics to the
// linear terms of the input gradient. Tables are in the arithmetic of x, statistics and sums in double.

#pragma once

#include "tables.h"

namespace ghostnoise::GN_ISA {

template <class A>
void coefficients(i64 threads, i64 R, i64 C, const double *mean, const double *var, Floor floor, const A *weight,
                  const A *bias, Coefficients<A> to) {
    in_parallel(threads, R, [=](i64 begin, i64 end, i64) {
        for (i64 r = begin; r < end; ++r) {
            const i64 at = r * C;
#pragma omp simd
            for (i64 c = 0; c < C; ++c) {
                const Coefficient<A> made(mean[at + c], var[at + c], floor, weight ? weight[c] : A(1),
                                          bias ? bias[c] : A(0));
                to.center[at + c] = made.center;
                to.rounding[at + c] = made.rounding;
                to.rstd[at + c] = made.rstd;
                to.factor[at + c] = made.factor;
                to.shift[at + c] = made.shift;
            }
        }
    });
}

// Around the sample's own mean, since it may be far from those of the other samples.
template <class M, class A>
void exclusive_linear_term(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const M *mean, const double *pooled,
                           const A *g_mean, const A *g_var, A *center, A *slope, A *offset) {
    for_columns(G, C, threads, [=](i64 g, i64 c0, i64 wide, i64) {
        const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0;
        double middle[CHUNK] = {}, vars[CHUNK] = {}, means[CHUNK] = {};
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                middle[c] += double(mean[first + k * C + c]);
        for (i64 c = 0; c < wide; ++c)
            middle[c] /= double(n);
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                vars[c] += double(g_var[at]);
                means[c] += through_mean(g_mean[at], g_var[at], pooled[at] - middle[c]);
            }
        const double share = 1.0 / double(n - 1);
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                const double own = double(mean[at]), own_var = (vars[c] - double(g_var[at])) * share;
                const double rest = means[c] - through_mean(g_mean[at], g_var[at], pooled[at] - middle[c]);
                const double own_mean = rest * share + 2 * (own - middle[c]) * own_var;
                const double steep = 2 * own_var / double(S);
                center[at] = A(own);
                slope[at] = A(steep);
                offset[at] = A(own_mean / double(S) + steep * (double(A(own)) - own));
            }
    });
}

// Around the mean of the ghost batch, to which each of its n * S values contributes alike.
template <class A>
void linear_term(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean, const A *g_mean,
                 const A *g_var, A *center, A *slope, A *offset) {
    in_parallel(threads, G, [=](i64 begin, i64 end, i64) {
        for (i64 g = begin; g < end; ++g) {
            const double share = 1.0 / double((starts[g + 1] - starts[g]) * S);
#pragma omp simd
            for (i64 at = g * C; at < (g + 1) * C; ++at) {
                const double steep = 2 * double(g_var[at]) * share, rounded = double(A(mean[at]));
                center[at] = A(mean[at]);
                slope[at] = A(steep);
                offset[at] = A(double(g_mean[at]) * share + steep * (rounded - mean[at]));
            }
        }
    });
}

}  // namespace ghostnoise::GN_ISA

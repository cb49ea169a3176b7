// The small tables between the passes: from statistics to coefficients, the gradient of the statistics, the linear
// terms of the input gradient, and running statistics. Tables are in the arithmetic of x, statistics and sums in
// double.

#include "exports.h"
#include "gradients.h"

#include <cmath>

namespace {

template <class A>
void coefficients(i64 threads, i64 R, i64 C, const double *mean, const double *var, Floor floor, const A *weight,
                  const A *bias, Coefficients<A> to) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (i64 r = 0; r < R; ++r) {
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
}

// Around the sample's own mean, since it may be far from those of the other samples.
template <class M, class A>
void exclusive_linear_term(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const M *mean, const double *pooled,
                           const A *g_mean, const A *g_var, A *center, A *slope, A *offset) {
    for_columns(G, C, threads, [=](i64 g, i64 c0, i64 wide) {
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
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (i64 g = 0; g < G; ++g) {
        const double share = 1.0 / double((starts[g + 1] - starts[g]) * S);
#pragma omp simd
        for (i64 at = g * C; at < (g + 1) * C; ++at) {
            const double steep = 2 * double(g_var[at]) * share, rounded = double(A(mean[at]));
            center[at] = A(mean[at]);
            slope[at] = A(steep);
            offset[at] = A(double(g_mean[at]) * share + steep * (rounded - mean[at]));
        }
    }
}

// from + factor * (to - from), exactly `from` or `to` where the factor is 0 or 1, as torch.lerp computes it.
template <class A> A interpolate(A from, double to, double factor) {
    const A end = A(to), gap = end - from, weight = A(factor);
    return factor < 0.5 ? from + weight * gap : end - gap * (A(1) - weight);
}

template <class A>
void update_running(i64 C, A *mean, A *var, i64 *count, const double *to_mean, const double *to_var, double factor) {
    if (factor < 0)
        factor = 1.0 / double(*count + 1);
    double sum = 0;
    for (i64 c = 0; c < C; ++c) {  // 0 if all values are finite, else NaN
        sum += mean ? 0 * double(interpolate(mean[c], to_mean[c], factor)) : var ? 0 : 0 * to_mean[c];
        sum += var ? 0 * double(interpolate(var[c], to_var[c], factor)) : mean ? 0 : 0 * to_var[c];
    }
    if (sum != 0)
        return;
    for (i64 c = 0; mean && c < C; ++c)
        mean[c] = interpolate(mean[c], to_mean[c], factor);
    for (i64 c = 0; var && c < C; ++c)
        var[c] = interpolate(var[c], to_var[c], factor);
    if (count)
        ++*count;
}

}  // namespace

// clang-format off
#define GN_TABLES(call)                                                                                                \
    switch (dtype) {                                                                                                   \
        case 0: { using A = float; call; return OK; }                                                                  \
        case 1: { using A = double; call; return OK; }                                                                 \
        default: return UNKNOWN_DTYPE;                                                                                 \
    }
// clang-format on

GN_EXPORT(coefficients)
(i64 dtype, i64 threads, i64 R, i64 C, const double *mean, const double *var, double eps, double least,
 const void *weight, const void *bias, void *to) {
    GN_TABLES(coefficients<A>(threads, R, C, mean, var, {eps, least}, in<A>(weight), in<A>(bias),
                              Coefficients<A>(out<A>(to), R * C)));
}

GN_EXPORT(statistics_gradient)
(i64 dtype, i64 threads, i64 B, i64 C, i64 R, i64 per_pool, const void *total, const void *moment, const void *m,
 const void *k, const void *coefficients, const double *var, double eps, double least, void *to_weight, void *to_bias,
 void *to_mean, void *to_var, double *carried) {
    GN_TABLES(statistics_gradient<A>(threads, B, C, R, per_pool, SumTables<A>{in<A>(total), in<A>(moment), C},
                                     {in<A>(m), in<A>(k)}, in<A>(coefficients), var, {eps, least}, out<A>(to_weight),
                                     out<A>(to_bias), out<A>(to_mean), out<A>(to_var), carried));
}

GN_EXPORT(linear_term)
(i64 dtype, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean, const void *g_mean,
 const void *g_var, void *center, void *slope, void *offset) {
    GN_TABLES(linear_term(threads, G, starts, C, S, mean, in<A>(g_mean), in<A>(g_var), out<A>(center), out<A>(slope),
                          out<A>(offset)));
}

GN_EXPORT(exclusive_linear_term)
(i64 dtype, i64 means, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const void *mean, const double *pooled,
 const void *g_mean, const void *g_var, void *center, void *slope, void *offset) {
    GN_TABLES(if (means == 0) exclusive_linear_term(threads, G, starts, C, S, in<float>(mean), pooled, in<A>(g_mean),
                                                    in<A>(g_var), out<A>(center), out<A>(slope), out<A>(offset));
              else exclusive_linear_term(threads, G, starts, C, S, in<double>(mean), pooled, in<A>(g_mean),
                                         in<A>(g_var), out<A>(center), out<A>(slope), out<A>(offset)));
}

GN_EXPORT(update_running)
(i64 dtype, i64 C, void *mean, void *var, i64 *count, const double *to_mean, const double *to_var, double factor) {
    GN_TABLES(update_running<A>(C, out<A>(mean), out<A>(var), count, to_mean, to_var, factor));
}

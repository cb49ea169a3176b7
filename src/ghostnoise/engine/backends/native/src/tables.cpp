// The small tables between the passes (engine/backends/aten.py): from statistics to what is applied to x, the gradient of both,
// and running statistics. Tables are in the arithmetic of x, statistics in double; sums are in double.

#include "exports.h"

#include <cmath>

namespace {

struct Floor {  // of the variance that is divided by
    double eps, least;

    double of(double var) const {
        const double value = var + eps;
        return value < least ? least : value;
    }
};

template <class A>
void standardize(i64 threads, i64 R, i64 C, const double *mean, const double *var, Floor floor, const A *weight,
                 const A *bias, Standard<A> to) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (i64 r = 0; r < R; ++r) {
        const i64 at = r * C;
#pragma omp simd
        for (i64 c = 0; c < C; ++c) {
            const A center = A(mean[at + c]), lost = A(double(center) - mean[at + c]);
            const A rstd = A(1.0 / std::sqrt(floor.of(var[at + c]))), factor = weight ? rstd * weight[c] : rstd;
            to.center[at + c] = center;
            to.lost[at + c] = lost;
            to.rstd[at + c] = rstd;
            to.factor[at + c] = factor;
            to.shift[at + c] = bias ? factor * lost + bias[c] : factor * lost;
        }
    }
}

constexpr i64 SHORT = 16;  // samples that are summed in the arithmetic of x before it goes on in double

// Adds to Σ k·a, Σ k·d, Σ a and Σ k·m·a.
template <class A>
void noisy(i64 wide, const A *a, const A *d, const A *m, const A *k, A (&sums)[4][CHUNK]) {
    with_flag(k, [&](auto scales) {
        with_flag(m, [&](auto shifts) {
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const A scale = decltype(scales)::value ? k[c] : A(1), total = scale * a[c];
                sums[0][c] += total;
                sums[1][c] += scale * d[c];
                sums[2][c] += a[c];
                if constexpr (decltype(shifts)::value)
                    sums[3][c] += total * m[c];
            }
        });
    });
}

// pull: from the sums a = Σ dy and d = Σ dy·(x - center) of samples (B, C) to the gradients of weight, bias, and of the
// statistics (R, C), of which each row serves `each` samples, the last one those left over too. `m` and `k` are noise.
// `carried`, if any, are the sums (2, C) for weight and bias of the samples before these, and then with these.
template <class A>
void pull(i64 threads, i64 B, i64 C, i64 R, i64 each, const A *a, const A *d, const A *m, const A *k,
          const A *standard, const double *var, Floor floor, const A *weight, A *to_weight, A *to_bias, A *to_mean,
          A *to_var, double *carried) {
    const Standard<A> stats(const_cast<A *>(standard), R * C);
    for_columns(1, C, threads, [=](i64, i64 c0, i64 wide) {
        double g_weight[CHUNK] = {}, g_bias[CHUNK] = {};
        for (i64 c = 0; carried && c < wide; ++c) {
            g_weight[c] = carried[c0 + c];
            g_bias[c] = carried[C + c0 + c];
        }
        const auto settle = [&](i64 r, const auto *sum, const auto *product) {
            const i64 at = r * C + c0;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const double total = double(sum[c]), rstd = double(stats.rstd[at + c]);
                const double whole = double(product[c]) + double(stats.lost[at + c]) * total;
                const double factor = double(stats.factor[at + c]);
                g_weight[c] += rstd * whole;
                to_mean[at + c] = A(-factor * total);
                to_var[at + c] = var[at + c] + floor.eps >= floor.least ? A(-0.5 * rstd * rstd * factor * whole) : A(0);
            }
        };
        for (i64 r = 0; r < R; ++r) {
            if (R == B && !m && !k) {  // a row of its own for each sample
                settle(r, a + r * C + c0, d + r * C + c0);
                for (i64 c = 0; c < wide; ++c)
                    g_bias[c] += double(a[r * C + c0 + c]);
                continue;
            }
            double sum[CHUNK] = {}, product[CHUNK] = {};
            const i64 end = r == R - 1 ? B : (r + 1) * each;
            for (i64 b = r * each; b < end;) {
                A part[4][CHUNK] = {};
                const i64 stop = end - b < SHORT ? end : b + SHORT;
                for (; b < stop; ++b) {
                    const i64 at = b * C + c0;
                    noisy(wide, a + at, d + at, m ? m + at : nullptr, k ? k + at : nullptr, part);
                }
                for (i64 c = 0; c < wide; ++c) {
                    sum[c] += double(part[0][c]);
                    product[c] += double(part[1][c]);
                    g_bias[c] += double(part[2][c]);
                    g_weight[c] -= double(part[3][c]);
                }
            }
            settle(r, sum, product);
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

// others_ramp: the gradient of x through the statistics of the others in its ghost batch, as slope·(x - center) + offset.
template <class M, class A>
void others_ramp(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const M *mean, const double *pooled,
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
        const auto through_mean = [=, &middle](i64 at, i64 c) {
            return double(g_mean[at]) - 2 * double(g_var[at]) * (pooled[at] - middle[c]);
        };
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                vars[c] += double(g_var[at]);
                means[c] += through_mean(at, c);
            }
        const double share = 1.0 / double(n - 1);
        for (i64 k = 0; k < n; ++k)
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const i64 at = first + k * C + c;
                const double own = double(mean[at]), own_var = (vars[c] - double(g_var[at])) * share;
                const double own_mean = (means[c] - through_mean(at, c)) * share + 2 * (own - middle[c]) * own_var;
                const double steep = 2 * own_var / double(S);
                center[at] = A(own);
                slope[at] = A(steep);
                offset[at] = A(own_mean / double(S) + steep * (double(A(own)) - own));
            }
    });
}

// everyone_ramp: the gradient of x through the statistics of its ghost batch, as slope·(x - center) + offset. Each of its
// n·S values has the same share.
template <class A>
void everyone_ramp(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean, const A *g_mean,
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

// follow: moves running buffers towards statistics, unless they are not finite. Any of the three may be absent.
template <class A> A moved(A from, double to, double factor) {  // from and to themselves where the factor is 0 or 1
    const A end = A(to), gap = end - from, weight = A(factor);
    return factor < 0.5 ? from + weight * gap : end - gap * (A(1) - weight);
}

template <class A>
void follow(i64 C, A *mean, A *var, i64 *count, const double *to_mean, const double *to_var, double factor) {
    if (factor < 0)
        factor = 1.0 / double(*count + 1);
    double sum = 0;
    for (i64 c = 0; c < C; ++c) {  // 0 times what is finite, else not a number
        sum += mean ? 0 * double(moved(mean[c], to_mean[c], factor)) : var ? 0 : 0 * to_mean[c];
        sum += var ? 0 * double(moved(var[c], to_var[c], factor)) : mean ? 0 : 0 * to_var[c];
    }
    if (sum != 0)
        return;
    for (i64 c = 0; mean && c < C; ++c)
        mean[c] = moved(mean[c], to_mean[c], factor);
    for (i64 c = 0; var && c < C; ++c)
        var[c] = moved(var[c], to_var[c], factor);
    if (count)
        ++*count;
}

template <class A> const A *in(const void *table) { return static_cast<const A *>(table); }
template <class A> A *out(void *table) { return static_cast<A *>(table); }

} // namespace

// The C ABI, as exports.h says it. Tables may be null where they are said to be absent.

#define GN_TABLES(call)                                                                                                \
    switch (dtype) {                                                                                                   \
        case 0: { using A = float; call; return 0; }                                                                   \
        case 1: { using A = double; call; return 0; }                                                                  \
        default: return 1;                                                                                             \
    }

GN_EXPORT(standardize)(i64 dtype, i64 threads, i64 R, i64 C, const double *mean, const double *var, double eps,
                       double least, const void *weight, const void *bias, void *to) {
    GN_TABLES(standardize<A>(threads, R, C, mean, var, {eps, least}, in<A>(weight), in<A>(bias),
                             Standard<A>(out<A>(to), R * C)))
}

GN_EXPORT(pull)(i64 dtype, i64 threads, i64 B, i64 C, i64 R, i64 each, const void *total, const void *moment,
                const void *m, const void *k, const void *standard, const double *var, double eps, double least,
                const void *weight, void *to_weight, void *to_bias, void *to_mean, void *to_var, double *carried) {
    GN_TABLES(pull<A>(threads, B, C, R, each, in<A>(total), in<A>(moment), in<A>(m), in<A>(k), in<A>(standard), var,
                      {eps, least}, in<A>(weight), out<A>(to_weight), out<A>(to_bias), out<A>(to_mean), out<A>(to_var),
                      carried))
}

GN_EXPORT(everyone_ramp)(i64 dtype, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *mean,
                         const void *g_mean, const void *g_var, void *center, void *slope, void *offset) {
    GN_TABLES(everyone_ramp(threads, G, starts, C, S, mean, in<A>(g_mean), in<A>(g_var), out<A>(center), out<A>(slope),
                            out<A>(offset)))
}

GN_EXPORT(others_ramp)(i64 dtype, i64 means, i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const void *mean,
                       const double *pooled, const void *g_mean, const void *g_var, void *center, void *slope,
                       void *offset) {
    GN_TABLES(if (means == 0) others_ramp(threads, G, starts, C, S, in<float>(mean), pooled, in<A>(g_mean),
                                          in<A>(g_var), out<A>(center), out<A>(slope), out<A>(offset));
              else others_ramp(threads, G, starts, C, S, in<double>(mean), pooled, in<A>(g_mean), in<A>(g_var),
                               out<A>(center), out<A>(slope), out<A>(offset)))
}

GN_EXPORT(follow)(i64 dtype, i64 C, void *mean, void *var, i64 *count, const double *to_mean, const double *to_var,
                  double factor) {
    GN_TABLES(follow<A>(C, out<A>(mean), out<A>(var), count, to_mean, to_var, factor))
}

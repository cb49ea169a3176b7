// Both directions of exclusive statistics for samples with a single position, such as features (B, C).
//
// The tables are then as large as x, and columns of them are spread over memory. A tile of channels of a ghost batch is
// copied to consecutive memory that fits a core's cache, and all steps run on it: no table is written. The expressions
// are those of the steps (pools.cpp, coefficients.cpp), so that both round alike.

#pragma once

#include "exclusive.h"

namespace {

constexpr i64 TILE_CHANNELS = 64, TILE_SAMPLES = 256;  // the most of a tile

inline i64 largest(i64 G, const i64 *starts) {
    i64 found = 0;
    for (i64 g = 0; g < G; ++g)
        found = starts[g + 1] - starts[g] > found ? starts[g + 1] - starts[g] : found;
    return found;
}

// Memory of each thread: tables of a tile in the arithmetic of x, then in double.
template <class A> struct TileMemory {
    i64 size, tables, doubles;
    Scratch<A> at;
    Scratch<double> wide;

    TileMemory(i64 threads, i64 samples, i64 tables, i64 doubles)
        : size(samples * TILE_CHANNELS), tables(tables), doubles(doubles), at(threads * tables * size),
          wide(threads * doubles * size) {}
    bool failed() const { return !at.at || !wide.at; }
    A *table(i64 k) const { return at.at + (thread_index() * tables + k) * size; }
    double *wide_table(i64 k) const { return wide.at + (thread_index() * doubles + k) * size; }
};

template <class T, class A> void copy_tile(const T *from, i64 step, i64 n, i64 wide, A *to) {
    for (i64 k = 0; k < n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            to[k * TILE_CHANNELS + c] = load(from[k * step + c]);
}

template <class T, class A>
bool exclusive_forward(i64 threads, i64 G, const i64 *starts, i64 C, const T *x, i64 x_b, const A *weight,
                       const A *bias, Floor floor, T *y, i64 y_b) {
    const TileMemory<A> memory(threads, largest(G, starts), 1, 2);
    if (memory.failed())
        return false;
    for_columns<TILE_CHANNELS>(G, C, threads, [=, &memory](i64 g, i64 c0, i64 wide) {
        A *own = memory.table(0);
        double *mean = memory.wide_table(0), *var = memory.wide_table(1);
        const i64 n = starts[g + 1] - starts[g];
        copy_tile(x + starts[g] * x_b + c0, x_b, n, wide, own);
        exclusive_tile<false>(Block<A>{own, nullptr, n, TILE_CHANNELS}, wide, mean, var);
        A weights[TILE_CHANNELS], biases[TILE_CHANNELS];
        for (i64 c = 0; c < wide; ++c) {
            weights[c] = weight ? weight[c0 + c] : A(1);
            biases[c] = bias ? bias[c0 + c] : A(0);
        }
        for (i64 k = 0; k < n; ++k) {
            T *to = y + (starts[g] + k) * y_b + c0;
            const i64 row = k * TILE_CHANNELS;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const Coefficient<A> pool(mean[row + c], var[row + c], floor, weights[c], biases[c]);
                store(to[c], pool.factor * (own[row + c] - pool.center) + pool.shift);
            }
        }
    });
    return true;
}

template <class T, class A>
bool exclusive_backward(i64 threads, i64 G, const i64 *starts, i64 C, const T *dy, i64 dy_b, const T *x, i64 x_b,
                        const A *weight, Floor floor, A *to_weight, A *to_bias, T *dx, i64 dx_b) {
    const TileMemory<A> memory(threads, largest(G, starts), 5, 2);
    if (memory.failed())
        return false;
    for_columns<TILE_CHANNELS>(1, C, threads, [=, &memory](i64, i64 c0, i64 wide) {
        A *own = memory.table(0), *gradient = memory.table(1), *factor = memory.table(2);
        A *g_mean = memory.table(3), *g_var = memory.table(4);
        double *mean = memory.wide_table(0), *var = memory.wide_table(1);
        double g_weight[TILE_CHANNELS] = {}, g_bias[TILE_CHANNELS] = {};
        A weights[TILE_CHANNELS];
        for (i64 c = 0; c < wide; ++c)
            weights[c] = weight ? weight[c0 + c] : A(1);
        for (i64 g = 0; g < G; ++g) {
            const i64 n = starts[g + 1] - starts[g];
            copy_tile(x + starts[g] * x_b + c0, x_b, n, wide, own);
            copy_tile(dy + starts[g] * dy_b + c0, dy_b, n, wide, gradient);
            exclusive_tile<false>(Block<A>{own, nullptr, n, TILE_CHANNELS}, wide, mean, var);
            double middle[TILE_CHANNELS] = {}, vars[TILE_CHANNELS] = {}, means[TILE_CHANNELS] = {};
            for (i64 k = 0; k < n; ++k)
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const i64 at = k * TILE_CHANNELS + c;
                    const Coefficient<A> pool(mean[at], var[at], floor, weights[c], A(0));
                    const A product = gradient[at] * (own[at] - pool.center);
                    const PoolGradient<A> made(pool, var[at], floor, double(gradient[at]), double(product));
                    g_weight[c] += made.weight;
                    g_bias[c] += double(gradient[at]);
                    factor[at] = pool.factor;
                    g_mean[at] = made.mean;
                    g_var[at] = made.var;
                    middle[c] += double(own[at]);
                }
            if (!dx)
                continue;
            for (i64 c = 0; c < wide; ++c)
                middle[c] /= double(n);
            for (i64 k = 0; k < n; ++k)
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const i64 at = k * TILE_CHANNELS + c;
                    vars[c] += double(g_var[at]);
                    means[c] += through_mean(g_mean[at], g_var[at], mean[at] - middle[c]);
                }
            const double share = 1.0 / double(n - 1);
            for (i64 k = 0; k < n; ++k) {
                T *to = dx + (starts[g] + k) * dx_b + c0;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const i64 at = k * TILE_CHANNELS + c;
                    const double rest = means[c] - through_mean(g_mean[at], g_var[at], mean[at] - middle[c]);
                    const double own_var = (vars[c] - double(g_var[at])) * share;
                    const A offset = A(rest * share + 2 * (double(own[at]) - middle[c]) * own_var);
                    store(to[c], factor[at] * gradient[at] + offset);
                }
            }
        }
        for (i64 c = 0; c < wide; ++c) {
            to_weight[c0 + c] = A(g_weight[c]);
            to_bias[c0 + c] = A(g_bias[c]);
        }
    });
    return true;
}

}  // namespace

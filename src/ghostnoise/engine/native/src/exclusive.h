// Exclusive statistics of samples with several positions: all tables between two passes over x.
//
// Each sample has a pool of its own, so every table has a row for each sample. A tile of channels of a ghost batch is
// copied to consecutive memory that fits a core's cache, and all steps between two passes run on it; only what the next
// pass reads is written to tables (B, C). Rows of these are often a power of two apart, and would displace each other
// from the first cache. The expressions are those of the steps (pools.h and coefficients.h), so that both round
// alike.

#pragma once

#include "single_position.h"

namespace ghostnoise::GN_ISA {

constexpr i64 EXCLUSIVE_WORK = 8;  // of an entry of these tables, in elements that are only copied

// What the forward pass applies to x, from the moments of the samples.
template <class A>
Status exclusive_affine(i64 threads, i64 G, const i64 *starts, i64 C, const double *means, const double *vars,
                        Floor floor, const A *weight, const A *bias, A *center, A *factor, A *shift) {
    const TileMemory<A> memory(threads, largest(G, starts), 0, 4);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(G, C, threads, [=, &memory](i64 g, i64 c0, i64 wide, i64 share) {
        double *own_mean = memory.wide_table(share, 0), *own_var = memory.wide_table(share, 1);
        double *mean = memory.wide_table(share, 2), *var = memory.wide_table(share, 3);
        const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0;
        copy_tile(means + first, C, n, wide, own_mean);
        copy_tile(vars + first, C, n, wide, own_var);
        exclusive_tile<true>(Block<double>{own_mean, own_var, n, TILE_CHANNELS}, wide, mean, var);
        A weights[TILE_CHANNELS], biases[TILE_CHANNELS];
        copy_parameter(weight, c0, wide, A(1), weights);
        copy_parameter(bias, c0, wide, A(0), biases);
        for (i64 k = 0; k < n; ++k) {
            const i64 row = k * TILE_CHANNELS, at = first + k * C;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c) {
                const Coefficient<A> pool(mean[row + c], var[row + c], floor, weights[c], biases[c]);
                center[at + c] = pool.center;
                factor[at + c] = pool.factor;
                shift[at + c] = pool.shift;
            }
        }
    });
    return Status::OK;
}

// The statistics of the pools of some ghost batches, tile by tile; they are made before a pass over x and dy, and
// needed again after it.
struct PooledTiles {
    i64 samples, tiles;
    Scratch<double> at;

    PooledTiles(i64 samples, i64 C)
        : samples(samples), tiles((C + TILE_CHANNELS - 1) / TILE_CHANNELS), at(2 * samples * tiles * TILE_CHANNELS) {}
    double *mean(i64 start, i64 c0) const { return at.at + (c0 * samples + start * TILE_CHANNELS) * 2; }
    double *var(i64 start, i64 n, i64 c0) const { return mean(start, c0) + n * TILE_CHANNELS; }
};

// The centers (B, C) of the sums over dy and x.
template <class A>
Status exclusive_centers(i64 threads, i64 G, const i64 *starts, i64 C, const double *means, const double *vars,
                         const PooledTiles &pooled, A *center) {
    const TileMemory<A> memory(threads, largest(G, starts), 0, 2);
    if (memory.failed() || !pooled.at.at)
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(1, C, threads, [=, &memory, &pooled](i64, i64 c0, i64 wide, i64 share) {
        double *own_mean = memory.wide_table(share, 0), *own_var = memory.wide_table(share, 1);
        for (i64 g = 0; g < G; ++g) {
            const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0;
            double *mean = pooled.mean(starts[g], c0), *var = pooled.var(starts[g], n, c0);
            copy_tile(means + first, C, n, wide, own_mean);
            copy_tile(vars + first, C, n, wide, own_var);
            exclusive_tile<true>(Block<double>{own_mean, own_var, n, TILE_CHANNELS}, wide, mean, var);
            for (i64 k = 0; k < n; ++k)
#pragma omp simd
                for (i64 c = 0; c < wide; ++c)
                    center[first + k * C + c] = A(mean[k * TILE_CHANNELS + c]);
        }
    });
    return Status::OK;
}

// The linear terms of the input gradient around the samples' own means, with S positions, and the factors of dy, from
// the sums `total` and `moment` (B, C). `carried` has the sums (2, C) for weight and bias over the samples before
// these, and then also over these. Without `slope`, only the gradients of weight and bias are made.
template <class A>
Status exclusive_terms(i64 threads, i64 G, const i64 *starts, i64 C, i64 S, const double *means,
                       const PooledTiles &pooled, Floor floor, const A *weight, const A *total, const A *moment,
                       A *to_weight, A *to_bias, double *carried, A *factor, A *center, A *slope, A *offset) {
    const TileMemory<A> memory(threads, largest(G, starts), 2, 1);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(1, C, threads, [=, &memory, &pooled](i64, i64 c0, i64 wide, i64 share) {
        A *g_mean = memory.table(share, 0), *g_var = memory.table(share, 1);
        double *own = memory.wide_table(share, 0), *g_weight = carried + c0, *g_bias = carried + C + c0;
        A weights[TILE_CHANNELS];
        copy_parameter(weight, c0, wide, A(1), weights);
        for (i64 g = 0; g < G; ++g) {
            const i64 n = starts[g + 1] - starts[g], first = starts[g] * C + c0;
            const double *mean = pooled.mean(starts[g], c0), *var = pooled.var(starts[g], n, c0);
            double middle[TILE_CHANNELS] = {}, sum_var[TILE_CHANNELS] = {}, sum_mean[TILE_CHANNELS] = {};
            if (slope)
                copy_tile(means + first, C, n, wide, own);
            for (i64 k = 0; k < n; ++k) {
                const i64 row = k * TILE_CHANNELS, at = first + k * C;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const Coefficient<A> pool(mean[row + c], var[row + c], floor, weights[c], A(0));
                    const PoolGradient<A> made(pool, var[row + c], floor, double(total[at + c]),
                                               double(moment[at + c]));
                    g_weight[c] += made.weight;
                    g_bias[c] += double(total[at + c]);
                    factor[at + c] = pool.factor;
                    g_mean[row + c] = made.mean;
                    g_var[row + c] = made.var;
                }
            }
            if (!slope)
                continue;
            for (i64 k = 0; k < n; ++k)
#pragma omp simd
                for (i64 c = 0; c < wide; ++c)
                    middle[c] += own[k * TILE_CHANNELS + c];
            for (i64 c = 0; c < wide; ++c)
                middle[c] /= double(n);
            exclusive_sums(n, wide, mean, middle, g_mean, g_var, sum_var, sum_mean);
            const double part = 1.0 / double(n - 1);
            for (i64 k = 0; k < n; ++k) {
                const i64 row = k * TILE_CHANNELS, at = first + k * C;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const OwnGradient<A> made(sum_mean[c], sum_var[c], g_mean[row + c], g_var[row + c], mean[row + c],
                                              own[row + c], middle[c], part);
                    const double steep = 2 * made.var / double(S);
                    center[at + c] = A(own[row + c]);
                    slope[at + c] = A(steep);
                    offset[at + c] = A(made.mean / double(S) + steep * (double(A(own[row + c])) - own[row + c]));
                }
            }
        }
        for (i64 c = 0; c < wide; ++c) {
            to_weight[c0 + c] = A(g_weight[c]);
            to_bias[c0 + c] = A(g_bias[c]);
        }
    });
    return Status::OK;
}

}  // namespace ghostnoise::GN_ISA

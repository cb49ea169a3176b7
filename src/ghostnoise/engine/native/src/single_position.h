// Samples with a single position, such as features (B, C): the forward pass with noise from drawn samples or in half
// precision, and both directions of exclusive statistics.
//
// The tables are then as large as x, and columns of them are spread over memory. A tile of channels of a ghost batch is
// copied to consecutive memory that fits a core's cache, and all steps run on it: x is read once, and no table is
// written but the noise, which the backward pass needs. The expressions are those of the steps (pools.h,
// coefficients.h, noise.cpp and the passes), so that both round alike.

#pragma once

#include "drawn.h"
#include "pools.h"

namespace ghostnoise::GN_ISA {

constexpr i64 TILE_CHANNELS = 64;
// The most samples of a tile; exclusive statistics need more tables.
constexpr i64 TILE_SAMPLES = 2048, EXCLUSIVE_SAMPLES = 256;

inline i64 largest(i64 G, const i64 *starts) {
    i64 found = 0;
    for (i64 g = 0; g < G; ++g)
        found = starts[g + 1] - starts[g] > found ? starts[g + 1] - starts[g] : found;
    return found;
}

// Memory of each share of the threads: tables of a tile in the arithmetic of x, then in double.
template <class A> struct TileMemory {
    i64 size, tables, doubles;
    Scratch<A> at;
    Scratch<double> wide;

    TileMemory(i64 threads, i64 samples, i64 tables, i64 doubles)
        : size(samples * TILE_CHANNELS), tables(tables), doubles(doubles), at(threads * tables * size),
          wide(threads * doubles * size) {}
    bool failed() const { return !at.at || !wide.at; }
    A *table(i64 share, i64 k) const { return at.at + (share * tables + k) * size; }
    double *wide_table(i64 share, i64 k) const { return wide.at + (share * doubles + k) * size; }
};

using FullTile = std::integral_constant<i64, TILE_CHANNELS>;

// Requests a row of a tile.
template <class T, class Count> void will_read(const T *row, Count wide) {
    for (i64 c = 0; c < wide; c += LINE / i64(sizeof(T)))
        GN_WILL_READ(row + c);
}

template <class T, class Count> void will_write(T *row, Count wide) {
    for (i64 c = 0; c < wide; c += LINE / i64(sizeof(T)))
        GN_WILL_WRITE(row + c);
}

template <class T, class A, class Count> void copy_rows(const T *from, i64 step, i64 n, Count wide, A *to) {
    for (i64 k = 0; k < n; ++k) {
        const T *row = from + k * step;
        will_read(row + rows_ahead(k, n) * step, wide);
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            to[k * TILE_CHANNELS + c] = load(row[c]);
    }
}

template <class T, class A> void copy_tile(const T *from, i64 step, i64 n, i64 wide, A *to) {
    if (wide == TILE_CHANNELS)
        copy_rows(from, step, n, FullTile(), to);
    else
        copy_rows(from, step, n, wide, to);
}

// A pool's coefficients, and what follows from them, for the channels of a tile.
template <class A> struct TileCoefficients {
    alignas(64) A memory[(Coefficients<A>::TABLES + NoisyAffine<A>::ROWS) * TILE_CHANNELS] = {};
    Coefficients<A> pool{memory, TILE_CHANNELS};
    NoisyAffine<A> affine{memory + Coefficients<A>::TABLES * TILE_CHANNELS, TILE_CHANNELS};

    // `weight` and `bias` are null, or those of the first channel.
    TileCoefficients(const double *mean, const double *var, Floor floor, const A *weight, const A *bias, i64 wide) {
        for (i64 c = 0; c < wide; ++c) {
            const Coefficient<A> made(mean[c], var[c], floor, weight ? weight[c] : A(1), bias ? bias[c] : A(0));
            pool.center[c] = made.center;
            pool.rounding[c] = made.rounding;
            pool.rstd[c] = made.rstd;
            pool.factor[c] = made.factor;
            pool.shift[c] = made.shift;
        }
        affine.fill(pool, weight, bias, wide);
    }
};

// Noise from N drawn samples (B, N), and the tables of its shift m and scale k (B, C), which may be null.
template <class A> struct DrawnNoise {
    const i64 *indices;
    i64 N;
    double eps;
    A *m, *k;
};

// Writes y and the noise of DRAWN channels from c0 on, which are those from `at` on of the tile `own` of n samples.
template <class T, class A, class Count>
void noisy_tile(const DrawnNoise<A> &noise, const A *own, i64 n, Count wide, i64 at, i64 C, const double *mean,
                const double *var, const TileCoefficients<A> &coefficients, A *memory, T *y, i64 y_b) {
    const Copied<A> samples(Block<A>{own + at, nullptr, n, TILE_CHANNELS}, mean + at, wide, memory);
    const Coefficients<A> pool(coefficients.pool.center + at, TILE_CHANNELS);
    const NoisyAffine<A> affine(coefficients.affine.center + at, TILE_CHANNELS);
    A above[DRAWN<A>], below[DRAWN<A>];
    for (i64 c = 0; c < wide; ++c) {
        const double margin = noise_margin(noise.eps, pool.rstd[c]);
        above[c] = A(std::sqrt(var[at + c] + margin));
        below[c] = A(margin);
    }
    for (i64 b = 0; b < n; ++b) {
        const i64 row = b * C + at, ahead = rows_ahead(b, n);
        T *to = y + b * y_b + at;
        will_write(to + ahead * y_b, wide);
        if (noise.m)
            will_write(noise.m + row + ahead * C, wide);
        if (noise.k)
            will_write(noise.k + row + ahead * C, wide);
        A ghost_mean[DRAWN<A>], ghost_var[DRAWN<A>], m[DRAWN<A>] = {}, k[DRAWN<A>];
        pool_drawn<false>(samples, noise.indices + b * noise.N, noise.N, ghost_mean, ghost_var);
        for (i64 c = 0; c < wide; ++c)
            k[c] = 1;
        if (noise.k) {
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                noise.k[row + c] = k[c] = above[c] / std::sqrt(ghost_var[c] + below[c]);
        }
        if (noise.m) {
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                noise.m[row + c] = m[c] = ghost_mean[c] * pool.rstd[c];
        }
        const A *x = own + b * TILE_CHANNELS + at;
#pragma omp simd
        for (i64 c = 0; c < wide; ++c)
            store(to[c], affine.scale(c, k[c]) * (x[c] - affine.center[c]) + affine.shift(c, m[c], k[c]));
    }
}

// The forward pass with noise; the mean and variance of the batch (C,) are written to `means` and `vars`.
template <class T, class A>
Status noisy_forward(i64 threads, i64 B, i64 C, const T *x, i64 x_b, const A *weight, const A *bias, Floor floor,
                     const DrawnNoise<A> &noise, double *means, double *vars, T *y, i64 y_b) {
    const TileMemory<A> memory(threads, B, 2, 0);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    if (!in_range(noise.indices, B * noise.N, B))
        return Status::INDEX_OUT_OF_RANGE;
    for_columns<TILE_CHANNELS>(1, C, threads, [=, &memory](i64, i64 c0, i64 wide, i64 share) {
        A *own = memory.table(share, 0);
        double *mean = means + c0, *var = vars + c0;
        copy_tile(x + c0, x_b, B, wide, own);
        inclusive_tile<false>(Block<A>{own, nullptr, B, TILE_CHANNELS}, wide, mean, var);
        const TileCoefficients<A> made(mean, var, floor, offset(weight, c0), offset(bias, c0), wide);
        const DrawnNoise<A> here = {noise.indices, noise.N, noise.eps, offset(noise.m, c0), offset(noise.k, c0)};
        for (i64 at = 0; at < wide; at += DRAWN<A>) {
            const auto run = [&](auto count) {
                noisy_tile(here, own, B, count, at, C, mean, var, made, memory.table(share, 1), y + c0, y_b);
            };
            if (wide - at >= DRAWN<A>)
                run(std::integral_constant<i64, DRAWN<A>>());
            else
                run(wide - at);
        }
    });
    return Status::OK;
}

// The forward pass of ghost batches without noise, whose moments (G, C) are written to `means` and `vars`. It is for
// half precision: the steps would first copy all of x to a table in float, and take less time where x has that type
// already.
template <class T, class A>
Status inclusive_forward(i64 threads, i64 G, const i64 *starts, i64 C, const T *x, i64 x_b, const A *weight,
                         const A *bias, Floor floor, double *means, double *vars, T *y, i64 y_b) {
    const TileMemory<A> memory(threads, largest(G, starts), 1, 0);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(G, C, threads, [=, &memory](i64 g, i64 c0, i64 wide, i64 share) {
        A *own = memory.table(share, 0);
        const i64 n = starts[g + 1] - starts[g];
        double *mean = means + g * C + c0, *var = vars + g * C + c0;
        copy_tile(x + starts[g] * x_b + c0, x_b, n, wide, own);
        inclusive_tile<false>(Block<A>{own, nullptr, n, TILE_CHANNELS}, wide, mean, var);
        const TileCoefficients<A> made(mean, var, floor, offset(weight, c0), offset(bias, c0), wide);
        const auto run = [&](auto count) {
            for (i64 k = 0; k < n; ++k) {
                T *to = y + (starts[g] + k) * y_b + c0;
                const A *row = own + k * TILE_CHANNELS;
                will_write(to + rows_ahead(k, n) * y_b, count);
#pragma omp simd
                for (i64 c = 0; c < count; ++c)
                    store(to[c], made.pool.factor[c] * (row[c] - made.pool.center[c]) + made.pool.shift[c]);
            }
        };
        if (wide == TILE_CHANNELS)
            run(FullTile());
        else
            run(wide);
    });
    return Status::OK;
}

// Weight or bias of the channels of a tile, or a constant.
template <class A> void copy_parameter(const A *from, i64 c0, i64 wide, A absent, A *to) {
    for (i64 c = 0; c < wide; ++c)
        to[c] = from ? from[c0 + c] : absent;
}

// The sums over a tile of n samples of the gradients through the variance, and through the mean around `middle`.
template <class A>
void exclusive_sums(i64 n, i64 wide, const double *mean, const double *middle, const A *g_mean, const A *g_var,
                    double *vars, double *means) {
    for (i64 k = 0; k < n; ++k)
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            const i64 at = k * TILE_CHANNELS + c;
            vars[c] += double(g_var[at]);
            means[c] += through_mean(g_mean[at], g_var[at], mean[at] - middle[c]);
        }
}

// The gradients of a sample's own mean and variance, which the statistics of all other samples depend on.
template <class A> struct OwnGradient {
    double mean, var;

    OwnGradient(double sum_mean, double sum_var, A g_mean, A g_var, double pooled, double own, double middle,
                double share)
        : var((sum_var - double(g_var)) * share) {
        const double rest = sum_mean - through_mean(g_mean, g_var, pooled - middle);
        mean = rest * share + 2 * (own - middle) * var;
    }
};

template <class T, class A>
Status exclusive_forward(i64 threads, i64 G, const i64 *starts, i64 C, const T *x, i64 x_b, const A *weight,
                         const A *bias, Floor floor, T *y, i64 y_b) {
    const TileMemory<A> memory(threads, largest(G, starts), 1, 2);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(G, C, threads, [=, &memory](i64 g, i64 c0, i64 wide, i64 share) {
        A *own = memory.table(share, 0);
        double *mean = memory.wide_table(share, 0), *var = memory.wide_table(share, 1);
        const i64 n = starts[g + 1] - starts[g];
        copy_tile(x + starts[g] * x_b + c0, x_b, n, wide, own);
        exclusive_tile<false>(Block<A>{own, nullptr, n, TILE_CHANNELS}, wide, mean, var);
        A weights[TILE_CHANNELS], biases[TILE_CHANNELS];
        copy_parameter(weight, c0, wide, A(1), weights);
        copy_parameter(bias, c0, wide, A(0), biases);
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
    return Status::OK;
}

template <class T, class A>
Status exclusive_backward(i64 threads, i64 G, const i64 *starts, i64 C, const T *dy, i64 dy_b, const T *x, i64 x_b,
                          const A *weight, Floor floor, A *to_weight, A *to_bias, T *dx, i64 dx_b) {
    const TileMemory<A> memory(threads, largest(G, starts), 5, 2);
    if (memory.failed())
        return Status::OUT_OF_MEMORY;
    for_columns<TILE_CHANNELS>(1, C, threads, [=, &memory](i64, i64 c0, i64 wide, i64 share) {
        A *own = memory.table(share, 0), *gradient = memory.table(share, 1), *factor = memory.table(share, 2);
        A *g_mean = memory.table(share, 3), *g_var = memory.table(share, 4);
        double *mean = memory.wide_table(share, 0), *var = memory.wide_table(share, 1);
        double g_weight[TILE_CHANNELS] = {}, g_bias[TILE_CHANNELS] = {};
        A weights[TILE_CHANNELS];
        copy_parameter(weight, c0, wide, A(1), weights);
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
            exclusive_sums(n, wide, mean, middle, g_mean, g_var, vars, means);
            const double part = 1.0 / double(n - 1);
            for (i64 k = 0; k < n; ++k) {
                T *to = dx + (starts[g] + k) * dx_b + c0;
#pragma omp simd
                for (i64 c = 0; c < wide; ++c) {
                    const i64 at = k * TILE_CHANNELS + c;
                    const OwnGradient<A> made(means[c], vars[c], g_mean[at], g_var[at], mean[at], double(own[at]),
                                              middle[c], part);
                    store(to[c], factor[at] * gradient[at] + A(made.mean));
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

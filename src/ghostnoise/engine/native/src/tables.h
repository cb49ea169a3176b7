// Tables of channels: rows shared by samples, the moments of ghost batches, per-pool coefficients, and scratch memory.

#pragma once

#include "threads.h"
#include "vectors.h"

#include <cmath>
#include <cstdlib>

namespace ghostnoise::GN_ISA {

// Scratch memory that is allocated before a parallel region; `at` is null if the allocation failed. No std::vector: the
// linker would merge its code across the copies for different instruction sets, and it throws.
template <class A> struct Scratch {
    A *at;

    explicit Scratch(i64 count) : at(static_cast<A *>(std::malloc(std::size_t(count > 0 ? count : 1) * sizeof(A)))) {}
    ~Scratch() { std::free(at); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
};

template <class T> T *offset(T *at, i64 by) { return at ? at + by : at; }

// A table (R, C) of which each row serves `per_row` consecutive samples, and the last row also those left over.
template <class A> struct Rows {
    const A *at;
    i64 per_row, last, C;

    const A *of(i64 b) const {
        const i64 row = b / per_row;
        return at + (row < last ? row : last) * C;
    }
};

// The moments of the n samples of a ghost batch, from one channel on.
template <class M> struct Block {
    const M *mean;
    const double *var;  // null: all zero
    i64 n, stride;

    double m(i64 row, i64 c) const { return double(mean[row * stride + c]); }
    double v(i64 row, i64 c) const { return var ? var[row * stride + c] : 0.0; }
};

template <class M> Block<M> block(const M *mean, const double *var, const i64 *starts, i64 g, i64 C, i64 c) {
    const i64 at = starts[g] * C + c;
    return {mean + at, var ? var + at : nullptr, starts[g + 1] - starts[g], C};
}

// The most channels of a tile, whose sums stay in a core's first cache; rows are read in pieces of this length.
constexpr i64 CHUNK = 256;

// Runs tile(g, first channel, channels, share of the threads) over G groups of rows and tiles of channels, which are
// narrower than WIDE where there would be fewer than threads.
template <i64 WIDE = CHUNK, class Tile> void for_columns(i64 G, i64 C, i64 threads, Tile tile) {
    const i64 part = (C + threads - 1) / threads, lines = (part + 63) / 64 * 64, step = lines < WIDE ? lines : WIDE;
    const i64 tiles = (C + step - 1) / step;
    in_parallel(threads, tiles * G, [=](i64 begin, i64 end, i64 share) {
        for (i64 unit = begin; unit < end; ++unit) {
            const i64 c = unit / G * step;
            tile(unit % G, c, C - c < step ? C - c : step, share);
        }
    });
}

// How far ahead of a row of a tile its memory is requested (GN_WILL_READ): a few rows, but none after the last.
inline i64 rows_ahead(i64 row, i64 rows) {
    constexpr i64 AHEAD = 4;
    return rows - row > AHEAD ? AHEAD : 0;
}

// Calls run with true or false as a constant.
template <class Run> void with_flag(bool flag, Run run) {
    if (flag)
        run(std::true_type());
    else
        run(std::false_type());
}

// The denominator of a normalizer: max(var + eps, least).
struct Floor {
    double eps, least;

    double of(double var) const {
        const double value = var + eps;
        return value < least ? least : value;
    }
};

// The coefficients of pools (R, C), one table after another, in the arithmetic of x:
// center = the rounded mean, rounding = center - mean, rstd, factor = rstd * weight, shift = factor * rounding + bias.
// Without weight or bias they are 1 or 0, which changes nothing.
template <class A> struct Coefficient {
    A center, rounding, rstd, factor, shift;

    Coefficient(A center, A rounding, A rstd, A factor, A shift)
        : center(center), rounding(rounding), rstd(rstd), factor(factor), shift(shift) {}
    Coefficient(double mean, double var, Floor floor, A weight, A bias)
        : center(A(mean)), rounding(A(double(center) - mean)), rstd(A(1) / std::sqrt(A(floor.of(var)))),
          factor(rstd * weight), shift(factor * rounding + bias) {}
};

template <class A> struct Coefficients {
    static constexpr i64 TABLES = 5;
    A *center, *rounding, *rstd, *factor, *shift;

    Coefficients(A *at, i64 size)
        : center(at), rounding(at + size), rstd(at + 2 * size), factor(at + 3 * size), shift(at + 4 * size) {}

    Coefficient<A> of(i64 at) const { return {center[at], rounding[at], rstd[at], factor[at], shift[at]}; }
};

// The gradients of a pool's statistics, and its part of that of the weight, from the sums of dy and of
// dy * (x - center) over its samples.
template <class A> struct PoolGradient {
    double weight;
    A mean, var;

    PoolGradient(const Coefficient<A> &pool, double pool_var, Floor floor, double total, double product) {
        const double rstd = double(pool.rstd), factor = double(pool.factor);
        const double moment = product + double(pool.rounding) * total;  // around the mean
        weight = rstd * moment;
        mean = A(-factor * total);
        var = pool_var + floor.eps >= floor.least ? A(-0.5 * rstd * rstd * factor * moment) : A(0);
    }
};

// The gradient of a sample's mean through a pool that it contributes to, times the number of contributing samples,
// given the pool's gradients and its mean relative to that of the ghost batch.
template <class A> double through_mean(A g_mean, A g_var, double mean) {
    return double(g_mean) - 2 * double(g_var) * mean;
}

// What is added to both variances of the scale of noise: eps, in units of the variance that normalization maps to 1.
template <class A> double noise_margin(double eps, A rstd) { return double(A(eps) * (A(1) / (rstd * rstd))); }

// What is applied to x where all samples share a pool and each has noise (shift m, scale k) of its own:
// y = k * factor * (x - center) + bias - weight * k * (m - rest), with rest = rstd * rounding.
// Every function that applies noise uses these expressions, so that all of them round alike.
template <class A> struct NoisyAffine {
    static constexpr i64 ROWS = 5;
    A *center, *factor, *rest, *weight, *bias;

    NoisyAffine(A *at, i64 C) : center(at), factor(at + C), rest(at + 2 * C), weight(at + 3 * C), bias(at + 4 * C) {}

    void fill(const Coefficients<A> &pool, const A *given_weight, const A *given_bias, i64 C) const {
        for (i64 c = 0; c < C; ++c) {
            center[c] = pool.center[c];
            factor[c] = pool.factor[c];
            rest[c] = pool.rstd[c] * pool.rounding[c];
            weight[c] = given_weight ? given_weight[c] : A(1);
            bias[c] = given_bias ? given_bias[c] : A(0);
        }
    }
    A scale(i64 c, A k) const { return k * factor[c]; }
    A shift(i64 c, A m, A k) const { return bias[c] - weight[c] * k * (m - rest[c]); }
};

template <class A> const A *in(const void *table) { return static_cast<const A *>(table); }
template <class A> A *out(void *table) { return static_cast<A *>(table); }

}  // namespace ghostnoise::GN_ISA

// Draws from the law of ghost batches: a function of a seed, the sample and the channel, so that they depend neither on
// the number of threads nor on the order of the work. ghostnoise/laws.py has the same in PyTorch (Law.draws_from).

#pragma once

#include "vectors.h"

#include <cmath>

namespace ghostnoise::GN_ISA {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Philox 4x32 with 10 rounds (Salmon et al., 2011), for the counter (first, second, 0, 0).
GN_INLINE void philox(u64 seed, u32 first, u32 second, u32 (&word)[4]) {
    u32 a = first, b = second, c = 0, d = 0, low = u32(seed), high = u32(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const u64 x = u64(a) * 0xD2511F53u, y = u64(c) * 0xCD9E8D57u;
        a = u32(y >> 32) ^ b ^ low;
        b = u32(y);
        c = u32(x >> 32) ^ d ^ high;
        d = u32(x);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    word[0] = a;
    word[1] = b;
    word[2] = c;
    word[3] = d;
}

GN_INLINE u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
GN_INLINE float of_bits(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

GN_INLINE double log_of(double u) { return std::log(u); }

// The logarithm of a float in (0, 1], to 2 units in the last place: loops over it are vectorized.
GN_INLINE float log_of(float u) {
    const u32 from = bits_of(u) - 0x3f3504f3u;  // sqrt(1/2)
    const float exponent = float(std::int32_t(from) >> 23), m = of_bits((from & 0x7fffffu) + 0x3f3504f3u) - 1;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float square = m * m;
    return exponent * 0.693147180559945f + (m + (m * square * p - 0.5f * square));
}

template <class D> struct Two {
    D first, second;
};

GN_INLINE Two<double> cos_sin_pi(double s) {
    constexpr double PI = 3.14159265358979323846;
    return {std::cos(PI * s), std::sin(PI * s)};
}

// The cosine and sine of pi * s, for s in [-1, 1].
GN_INLINE Two<float> cos_sin_pi(float s) {
    const std::int32_t quarter = (std::int32_t(4 * s + 5) >> 1) - 2;  // the nearest multiple of 1/2
    const float r = s - 0.5f * float(quarter), square = r * r;        // r in [-1/4, 1/4]
    float p = 8.2145886e-2f;
    p = p * square - 5.9926453e-1f;
    p = p * square + 2.5501640f;
    p = p * square - 5.1677128f;
    p = (p * square + 3.1415927f) * r;
    float q = 2.3533063e-1f;
    q = q * square - 1.3352627f;
    q = q * square + 4.0587121f;
    q = q * square - 4.9348022f;
    q = q * square + 1;
    const u32 odd = 0u - u32(quarter & 1), sine = bits_of(p), cosine = bits_of(q), swapped = (sine ^ cosine) & odd;
    const u32 cosine_sign = u32((quarter + 1) & 2) << 30, sine_sign = u32(quarter & 2) << 30;
    return {of_bits(cosine ^ swapped ^ cosine_sign), of_bits(sine ^ swapped ^ sine_sign)};
}

// Two independent standard normal numbers (Box and Muller). The uniform numbers are rounded to float, the rest is in D.
template <class D> GN_INLINE Two<D> normals(u32 first, u32 second) {
    const float u = float(std::int32_t(first >> 1)) * 0x1p-31f + 0x1p-32f, s = float(std::int32_t(second)) * 0x1p-31f;
    const D radius = std::sqrt(D(-2) * log_of(D(u)));
    const Two<D> on_circle = cos_sin_pi(D(s));
    return {radius * on_circle.first, radius * on_circle.second};
}

// A chi-square number divided by its mean, from a normal one: a piecewise cubic of the cube root of the quantile, with
// the coefficients of all intervals of one power after those of another (ghostnoise/chi_square.py).
constexpr i64 INTERVALS = 224, POWERS = 4;
constexpr int PER_UNIT = 16, LOWEST = -7;

template <class D> GN_INLINE D chi_square(const D *table, D z) {
    const D t = (z - D(LOWEST)) * D(PER_UNIT);
    const std::int32_t i = std::int32_t(t);
    const D f = t - D(i);
    const D *first = table + INTERVALS, *second = first + INTERVALS, *third = second + INTERVALS;
    const D root = ((third[i] * f + second[i]) * f + first[i]) * f + table[i];
    return root * root * root;
}

// What the law of ghost batches needs besides the moments of the samples; `law_tables` makes it (ghostnoise/laws.py).
// With a channel's variances I within and B between samples, the mean of a ghost batch has the variance I * MEAN_WITHIN
// + B * MEAN_BETWEEN; its variance is the sum of two chi-square numbers, of which each has the mean 1, times (B + I *
// AROUND) * BETWEEN and I * WITHIN. Without SPATIAL, the law is that of fully connected layers: I = 0.
template <class D> struct Law {
    enum { SPATIAL, MEAN_WITHIN, MEAN_BETWEEN, AROUND, BETWEEN, WITHIN };
    const i64 *seed;  // null: there is no law
    const double *numbers;
    const D *tables;  // of `chi_square` between samples, then within them

    bool within() const { return numbers[WITHIN] != 0; }

    // The moments of W ghost batches of a sample, from the channel c on, if the channels' variances are 1.
    template <i64 W> void draw(i64 sample, i64 c, D *normal, D *between, D *within) const {
        u32 words[4][W];
#pragma omp simd
        for (i64 l = 0; l < W; ++l) {
            u32 word[4];
            philox(u64(*seed), u32(sample), u32(c + l), word);
            for (int k = 0; k < 4; ++k)
                words[k][l] = word[k];
        }
        D z[W];
#pragma omp simd
        for (i64 l = 0; l < W; ++l) {
            const Two<D> made = normals<D>(words[0][l], words[1][l]);
            normal[l] = made.first;
            z[l] = made.second;
        }
#pragma omp simd
        for (i64 l = 0; l < W; ++l)
            between[l] = chi_square(tables, z[l]);
        if (!this->within())
            return;
#pragma omp simd
        for (i64 l = 0; l < W; ++l)
            z[l] = normals<D>(words[2][l], words[3][l]).first;
#pragma omp simd
        for (i64 l = 0; l < W; ++l)
            within[l] = chi_square(tables + POWERS * INTERVALS, z[l]);
    }
};

}  // namespace ghostnoise::GN_ISA

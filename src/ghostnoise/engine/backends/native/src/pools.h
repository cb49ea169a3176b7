// Pools of a tile of channels: a ghost batch, and a ghost batch without the sample itself.

#pragma once

#include "tables.h"

#include <cmath>

namespace {

// Runs add(first sample, samples) over a few samples at a time, whose sums of a channel stay in a register.
template <class Add> void for_few_samples(i64 n, Add add) {
    constexpr i64 FEW = 8;
    i64 k = 0;
    for (; k + FEW <= n; k += FEW)
        add(k, std::integral_constant<i64, FEW>());
    for (; k < n; ++k)
        add(k, std::integral_constant<i64, 1>());
}

// The moments of a ghost batch (1, C).
template <bool WITH_VAR, class M> void inclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    double center[CHUNK] = {}, square[CHUNK] = {};
    for_few_samples(x.n, [&](i64 k, auto few) {
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            double sum = center[c];
            for (i64 i = 0; i < few; ++i)
                sum += x.m(k + i, c);
            center[c] = sum;
        }
    });
    for (i64 c = 0; c < wide; ++c)
        center[c] /= double(x.n);
    for_few_samples(x.n, [&](i64 k, auto few) {
#pragma omp simd
        for (i64 c = 0; c < wide; ++c) {
            double sum = square[c];
            for (i64 i = 0; i < few; ++i) {
                const double d = x.m(k + i, c) - center[c];
                sum += WITH_VAR ? x.var[(k + i) * x.stride + c] + d * d : d * d;
            }
            square[c] = sum;
        }
    });
    for (i64 c = 0; c < wide; ++c) {
        mean[c] = center[c];
        var[c] = square[c] / double(x.n);
    }
}

// A sample close to the others: the median of three, or a finite one of them.
inline double typical(double a, double b, double e) {
    const auto finite = [](double value) { return value - value == 0; };
    const double low = a < b ? a : b, high = a < b ? b : a, middle = e < low ? low : e > high ? high : e;
    return finite(middle) ? middle : finite(low) ? low : finite(high) ? high : 0;
}

// Values of one channel, or of a pack of channels.
struct Single {
    double lanes;
    template <class M> void load_from(const M *from) { lanes = double(*from); }
};

template <class V, class M> auto values(const M *from) {
    V read;
    read.load_from(from);
    return read.lanes;
}

// For each sample, the moments of its ghost batch without it (n, C), in the channel c, or in a pack of channels from c
// on. Sums are relative to a typical sample. The most extreme sample so far is kept out of them, and added back for all
// samples but itself, so that what is subtracted is never larger than what remains. A sample that is not finite is the
// most extreme one: then its own statistics are those of finite samples alone.
template <class V, bool WITH_VAR, class M>
void exclusive_channels(const Block<M> &x, i64 c, double *mean, double *var) {
    constexpr i64 COUNT = sizeof(V) / sizeof(double);
    double typicals[COUNT];
    for (i64 l = 0; l < COUNT; ++l)
        typicals[l] = typical(x.m(0, c + l), x.m(x.n / 2, c + l), x.m(x.n - 1, c + l));
    using L = decltype(V::lanes);
    const L center = values<V>(typicals), zero = {};
    const auto squared = [&](i64 k, L d) {
        if constexpr (WITH_VAR)
            return d * d + values<V>(x.var + k * x.stride + c);
        else
            return d * d;
    };
    L sum = zero, square = zero, most = zero - 1, extreme = zero, extreme_d = zero, extreme_energy = zero;
    for (i64 k = 0; k < x.n; ++k) {
        const L d = values<V>(x.mean + k * x.stride + c) - center, energy = squared(k, d);
        const auto less = energy <= most;  // false if the energy is NaN; then none exceeds it
        sum += less ? d : extreme_d;
        square += less ? energy : extreme_energy;
        extreme = less ? extreme : zero + double(k);
        extreme_d = less ? extreme_d : d;
        extreme_energy = less ? extreme_energy : energy;
        const L known = energy == energy ? energy : zero + HUGE_VAL;
        most = less ? most : known;
    }
    const double share = 1 / double(x.n - 1);
    for (i64 k = 0; k < x.n; ++k) {
        const L d = values<V>(x.mean + k * x.stride + c) - center, energy = squared(k, d);
        const auto itself = extreme == zero + double(k);
        const L shift = (itself ? sum : sum - d + extreme_d) * share;
        const L value = (itself ? square : square - energy + extreme_energy) * share - shift * shift;
        const L made[2] = {center + shift, value < 0 ? zero : value};
        std::memcpy(mean + k * x.stride + c, &made[0], sizeof(L));
        std::memcpy(var + k * x.stride + c, &made[1], sizeof(L));
    }
}

template <bool WITH_VAR, class M> void exclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    if (x.n == 2) {  // a pool of one sample may be far from any center: copy its moments
        for (i64 k = 0; k < 2; ++k)
            for (i64 c = 0; c < wide; ++c) {
                mean[k * x.stride + c] = x.m(1 - k, c);
                var[k * x.stride + c] = x.v(1 - k, c);
            }
        return;
    }
    i64 c = 0;
#if defined(GN_VECTOR_TYPES)
    for (; c + Pack<double>::LANES <= wide; c += Pack<double>::LANES)
        exclusive_channels<Pack<double>, WITH_VAR>(x, c, mean, var);
#endif
    for (; c < wide; ++c)
        exclusive_channels<Single, WITH_VAR>(x, c, mean, var);
}

}  // namespace

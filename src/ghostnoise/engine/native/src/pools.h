// Pools of a tile of channels: a ghost batch, and a ghost batch without the sample itself.

#pragma once

#include "tables.h"

#include <cmath>

namespace ghostnoise::GN_ISA {

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
template <class M> M typical(M a, M b, M e) {
    const auto finite = [](M value) { return value - value == 0; };
    const M low = a < b ? a : b, high = a < b ? b : a, middle = e < low ? low : e > high ? high : e;
    return finite(middle) ? middle : finite(low) ? low : finite(high) ? high : M(0);
}

// Values of one channel, or of a pack of channels.
template <class D> struct Single {
    D lanes;
    template <class M> void load_from(const M *from) { lanes = D(*from); }
};

template <class V, class M> auto values(const M *from) {
    V read;
    read.load_from(from);
    return read.lanes;
}

// For each sample, the moments of its ghost batch without it (n, C), in the channel c, or in a pack of channels from c
// on. Sums are relative to a typical sample. The most extreme sample so far is kept out of them, and added back for all
// samples but itself, so that what is subtracted is never larger than what remains. A sample that is not finite is the
// most extreme one: then its own statistics are those of finite samples alone. D is the arithmetic of V.
template <class V, class D, bool WITH_VAR, class M>
void exclusive_channels(const Block<M> &x, i64 c, double *mean, double *var) {
    constexpr i64 COUNT = sizeof(V) / sizeof(D);
    alignas(V) D typicals[COUNT], shifts[COUNT], squares[COUNT];
    for (i64 l = 0; l < COUNT; ++l) {
        const M *own = x.mean + c + l;
        typicals[l] = D(typical(own[0], own[x.n / 2 * x.stride], own[(x.n - 1) * x.stride]));
    }
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
        extreme = less ? extreme : zero + D(k);
        extreme_d = less ? extreme_d : d;
        extreme_energy = less ? extreme_energy : energy;
        const L known = energy == energy ? energy : zero + D(HUGE_VAL);
        most = less ? most : known;
    }
    const D share = 1 / D(x.n - 1);
    for (i64 k = 0; k < x.n; ++k) {
        const L d = values<V>(x.mean + k * x.stride + c) - center, energy = squared(k, d);
        const auto itself = extreme == zero + D(k);
        const L shift = (itself ? sum : sum - d + extreme_d) * share;
        const L value = (itself ? square : square - energy + extreme_energy) * share - shift * shift;
        const L made = value < 0 ? zero : value;
        std::memcpy(shifts, &shift, sizeof(L));
        std::memcpy(squares, &made, sizeof(L));
        double *to_mean = mean + k * x.stride + c, *to_var = var + k * x.stride + c;
#pragma omp simd
        for (i64 l = 0; l < COUNT; ++l) {
            to_mean[l] = double(typicals[l]) + double(shifts[l]);
            to_var[l] = double(squares[l]);
        }
    }
}

template <class D, bool WITH_VAR, class M>
void exclusive_packs(const Block<M> &x, i64 wide, double *mean, double *var) {
    i64 c = 0;
#if defined(GN_VECTOR_TYPES)
    for (; c + Pack<D>::LANES <= wide; c += Pack<D>::LANES)
        exclusive_channels<Pack<D>, D, WITH_VAR>(x, c, mean, var);
#endif
    for (; c < wide; ++c)
        exclusive_channels<Single<D>, D, WITH_VAR>(x, c, mean, var);
}

// The arithmetic of exclusive pools: that of the means if there are few samples without variances, else double.
template <bool WITH_VAR, class M> void exclusive_tile(const Block<M> &x, i64 wide, double *mean, double *var) {
    if (x.n == 2) {  // a pool of one sample may be far from any center: copy its moments
        for (i64 k = 0; k < 2; ++k)
            for (i64 c = 0; c < wide; ++c) {
                mean[k * x.stride + c] = x.m(1 - k, c);
                var[k * x.stride + c] = x.v(1 - k, c);
            }
        return;
    }
    constexpr i64 FEW = 256;
    if (!WITH_VAR && x.n <= FEW)
        exclusive_packs<M, WITH_VAR>(x, wide, mean, var);
    else
        exclusive_packs<double, WITH_VAR>(x, wide, mean, var);
}

}  // namespace ghostnoise::GN_ISA

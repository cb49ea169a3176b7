// Pools of drawn samples: the moments of ghost batches for a tile of channels.

#pragma once

#include "tables.h"

namespace ghostnoise::GN_ISA {

constexpr i64 PACKS = 4;    // of channels in a tile: each needs three registers of 16 or more
constexpr i64 BLOCK = 256;  // draws that are summed before their sum is added to the total, which bounds rounding

// Channels of a tile: few, so that the samples' moments fit a core's first caches.
template <class D, i64 P = PACKS> constexpr i64 DRAWN = P * Pack<D>::LANES;

// The moments of samples, copied for a tile of channels. D is the type that they are read in. They are relative to the
// median of three samples, a reference that a few outliers cannot move, so that float is enough for them. A tile of
// fewer than PACKS packs is for inputs with few channels.
template <class D, i64 P = PACKS> struct Copied {
    static constexpr i64 WIDE = DRAWN<D, P>;

    i64 step;  // of a row: means, then variances if there are any
    D *rows;
    D offset[WIDE];  // the reference, relative to `around`

    // Elements of the memory that `rows` needs.
    static i64 size(i64 samples, bool with_var) { return samples * (with_var ? 2 * WIDE : WIDE); }

    template <class M>
    Copied(const Block<M> &x, const double *around, i64 wide, D *memory)
        : step(x.var ? 2 * WIDE : WIDE), rows(memory), offset() {
        M reference[WIDE] = {};
        for (i64 c = 0; c < wide; ++c) {
            const M a = x.mean[c], b = x.mean[x.n / 2 * x.stride + c], e = x.mean[(x.n - 1) * x.stride + c];
            const M low = a < b ? a : b, high = a < b ? b : a;
            reference[c] = e < low ? low : e > high ? high : e;
            offset[c] = D(double(reference[c]) - around[c]);
        }
        if (wide == WIDE)
            copy(x, reference, std::integral_constant<i64, WIDE>());
        else
            copy(x, reference, wide);
    }

    template <class M, class Count> void copy(const Block<M> &x, const M *reference, Count wide) {
        for (i64 k = 0; k < x.n; ++k) {
            D *to = rows + k * step;
            const M *mean = x.mean + k * x.stride;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                to[c] = D(mean[c] - reference[c]);
            for (i64 c = wide; c < WIDE; ++c)
                to[c] = 0;
            if (!x.var)
                continue;
            const double *var = x.var + k * x.stride;
#pragma omp simd
            for (i64 c = 0; c < wide; ++c)
                to[WIDE + c] = D(var[c]);
            for (i64 c = wide; c < WIDE; ++c)
                to[WIDE + c] = 0;
        }
    }
};

// Whether all indices are in [0, B): they address memory.
inline bool in_range(const i64 *indices, i64 count, i64 B) {
    i64 outside = 0;
#pragma omp simd reduction(| : outside)
    for (i64 i = 0; i < count; ++i)
        outside |= i64(indices[i] < 0) | i64(indices[i] >= B);
    return !outside;
}

// The moments of N drawn samples (DRAWN,), the mean relative to `around`. Each drawn row is read once for both moments,
// relative to the first drawn one: an outlier that was not drawn costs no digits, and one that was drawn makes the
// variance large. Loops over packs are unrolled, so that packs stay in registers.
template <bool WITH_VAR, class D, i64 P>
void pool_drawn(const Copied<D, P> &x, const i64 *drawn, i64 N, D *mean, D *var) {
    constexpr i64 LANES = Pack<D>::LANES;
    const D *first = x.rows + drawn[0] * x.step;
    Pack<D> base[P], total[P] = {}, total_square[P] = {};
#pragma GCC unroll 8
    for (i64 p = 0; p < P; ++p)
        base[p].load_from(first + p * LANES);
    for (i64 from = 0; from < N; from += BLOCK) {
        const i64 to = N - from < BLOCK ? N : from + BLOCK;
        Pack<D> sums[P] = {}, squares[P] = {};
        for (i64 j = from; j < to; ++j) {
            const D *row = x.rows + drawn[j] * x.step;
#pragma GCC unroll 8
            for (i64 p = 0; p < P; ++p) {
                Pack<D> d;
                d.load_from(row + p * LANES);
                d.lanes -= base[p].lanes;
                sums[p].lanes += d.lanes;
                squares[p].lanes += d.lanes * d.lanes;
                if constexpr (WITH_VAR) {
                    d.load_from(row + DRAWN<D, P> + p * LANES);
                    squares[p].lanes += d.lanes;
                }
            }
        }
#pragma GCC unroll 8
        for (i64 p = 0; p < P; ++p) {
            total[p].lanes += sums[p].lanes;
            total_square[p].lanes += squares[p].lanes;
        }
    }
    const D share = D(1) / D(N);
#pragma GCC unroll 8
    for (i64 p = 0; p < P; ++p) {
        Pack<D> d, start;
        start.load_from(x.offset + p * LANES);
        d.lanes = total[p].lanes * share;
        total_square[p].lanes = total_square[p].lanes * share - d.lanes * d.lanes;
        d.lanes = start.lanes + (base[p].lanes + d.lanes);
        std::memcpy(mean + p * LANES, &d, VECTOR);
        std::memcpy(var + p * LANES, &total_square[p], VECTOR);
    }
#pragma omp simd
    for (i64 c = 0; c < DRAWN<D, P>; ++c)
        var[c] = var[c] < 0 ? 0 : var[c];
}

}  // namespace ghostnoise::GN_ISA

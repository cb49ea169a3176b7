// What the passes over x share: tensors in both layouts, the split of work over threads, and how results are written.
//
// The passes are plain C++ without torch's headers and without randomness, compiled once for each instruction set; its
// name GN_ISA is also that of their namespace. Loops are marked for vectorization; only marked reductions may be
// reassociated, since the statistics rely on x - rough being computed as written.
//
// A tensor is (B, C, S) in one of two layouts: rows, where the S positions of each (b, c) are contiguous, and
// channels-last, where the C channels of each (b, s) are. Arithmetic is in float, and in double for double; long sums
// are accumulated in double.

#pragma once

#include "tables.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ghostnoise::GN_ISA {

struct Shape {
    i64 B, C, S;
};

template <class T> struct Tensor {  // strides over b, and over c (rows) or s (channels-last); the third stride is 1
    T *at;
    i64 b, inner;

    T *row(i64 sample, i64 i) const { return at + sample * b + i * inner; }
};

constexpr i64 TILE = 512;  // channels of a tile in channels-last passes, whose accumulators fit a core's first cache
constexpr i64 RUN =
    256;  // positions that a lane or a channel sums in the arithmetic of x before the sum is added in double
// Positions up to which the sums of a few packs of channels are made at a time, in registers: of moments, which read x
// twice, while it fits a core's first cache, and of gradients. With 64 positions of x and dy, the latter were slower
// than rows of all channels, which the processor foresees.
constexpr i64 FEW_POSITIONS = 64, FEW_SUMMED = 16;
constexpr i64 SHORT = 1024;  // positions up to which several rows are processed together

template <class Part> void for_steps(i64 end, i64 step, Part part) {
    for (i64 from = 0; from < end; from += step)
        part(from, end - from < step ? end : from + step);
}

// Runs part(b, from, to) over the samples and over steps of `count` channels or positions.
template <class Part> void for_parts(i64 B, i64 count, i64 step, i64 threads, Part part) {
    const i64 parts = (count + step - 1) / step;
    in_parallel(threads, B * parts, [=](i64 begin, i64 end, i64) {
        i64 b = begin / parts, p = begin % parts;
        for (i64 unit = begin; unit < end; ++unit) {
            part(b, p * step, count - p * step < step ? count : (p + 1) * step);
            if (++p == parts) {
                p = 0;
                ++b;
            }
        }
        fence();
    });
}

// Channels per call of a part in rows passes: more where rows are short.
template <class A> i64 rows_step(i64 S) { return S <= 64 ? 64 : S <= SHORT ? Pack<A>::LANES : 1; }

// Calls run with the number of positions, as a compile-time constant where it is a common small number.
template <class Run> void with_positions(i64 S, Run run) {
    if (S == 16)
        run(std::integral_constant<i64, 16>());
    else if (S == 64)
        run(std::integral_constant<i64, 64>());
    else
        run(S);
}

// Whether to use non-temporal stores: for results that the caches could not hold, or parts of such, in rows of whole,
// aligned lines.
template <class T> bool streams(const Shape &n, i64 row, const Tensor<T> &to, bool part_of_large = false) {
    constexpr i64 LANES = 64 / sizeof(T), LARGE = i64(1) << 23;
    const bool aligned =
        reinterpret_cast<std::uintptr_t>(to.at) % 64 == 0 && to.b % LANES == 0 && to.inner % LANES == 0;
    const bool large = n.B * n.C * n.S * i64(sizeof(T)) >= LARGE || part_of_large;
    return large && row % LANES == 0 && aligned;
}

// Maps the memory of a result on all threads, before they write it part by part: in a small part, all of them write to
// the same huge page, and would wait for the one that maps it. Malloc maps a result of this size anew each time.
inline void populate(const void *at, i64 bytes, i64 threads) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    constexpr std::uintptr_t PAGE = std::uintptr_t(1) << 21;
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(at);
    const i64 from = i64((begin + PAGE - 1) / PAGE), end = i64((begin + std::uintptr_t(bytes)) / PAGE);
    if (bytes < i64(1) << 25)
        return;
    in_parallel(threads, end - from, [=](i64 begin, i64 stop, i64) {
        for (i64 page = from + begin; page < from + stop; ++page)  // where this fails, the first write maps the page
            madvise(reinterpret_cast<void *>(std::uintptr_t(page) * PAGE), PAGE, MADV_POPULATE_WRITE);
    });
#else
    (void)at, (void)bytes, (void)threads;
#endif
}

template <class T> Tensor<T> with_huge_pages(const Shape &n, const Tensor<T> &to) {
    if (to.b == n.C * n.S)
        request_huge_pages(to.at, n.B * n.C * n.S * i64(sizeof(T)));
    return to;
}

// Writes value(i) to each i of a row.
template <class T, class Length, class Value> void fill(T *to, Length length, bool non_temporal, Value value) {
    constexpr i64 LANES = 64 / sizeof(T);
    if (!non_temporal) {
#pragma omp simd
        for (i64 i = 0; i < length; ++i)
            store(to[i], value(i));
        return;
    }
    for (i64 i = 0; i < length; i += LANES) {
        alignas(64) T line[LANES];
#pragma omp simd
        for (i64 k = 0; k < LANES; ++k)
            store(line[k], value(i + k));
        stream(to + i, line);
    }
}

template <class... Value> void clear(i64 count, Value *...values) {
    (std::memset(values, 0, sizeof(Value) * count), ...);
}

// Runs part(r, s, count) over the packs of `rows` rows from `from` to `to`; the last pack of a row may be partial.
template <class A, class Count, class Part> void for_packs(Count rows, i64 from, i64 to, Part part) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (i64 r = 0; r < rows; ++r) {
        i64 s = from;
        for (; s + LANES <= to; s += LANES)
            part(r, s, std::integral_constant<i64, LANES>());
        if (s < to)
            part(r, s, to - s);
    }
}

// Runs block(c, rows) over channels, with as many rows at a time as a pack has lanes.
template <class A, class Block> void for_blocks(i64 from, i64 to, Block block) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (; from + LANES <= to; from += LANES)
        block(from, std::integral_constant<i64, LANES>());
    if (from < to)
        block(from, to - from);
}

// Runs part(s, c, count) over positions and packs of channels; the count of a full pack is a compile-time constant.
template <class A, class Part> void for_tile_packs(i64 from, i64 to, i64 wide, Part part) {
    constexpr i64 LANES = Pack<A>::LANES;
    for (i64 s = from; s < to; ++s) {
        i64 c = 0;
        for (; c + LANES <= wide; c += LANES)
            part(s, c, std::integral_constant<i64, LANES>());
        if (c < wide)
            part(s, c, wide - c);
    }
}

// Runs part(c, packs, count) over channels, a few packs at a time, whose sums stay in registers; a pack has `count`
// channels.
template <class A, class Part> void for_channel_packs(i64 from, i64 to, Part part) {
    constexpr i64 LANES = Pack<A>::LANES, PACKS = 4;
    const std::integral_constant<i64, LANES> full;
    const std::integral_constant<i64, 1> one;
    for (; from + PACKS * LANES <= to; from += PACKS * LANES)
        part(from, std::integral_constant<i64, PACKS>(), full);
    for (; from + LANES <= to; from += LANES)
        part(from, one, full);
    if (from < to)
        part(from, one, to - from);
}

// Adds a pack to the values at `to`, an array whose length is a multiple of a pack.
template <class A> void add(A *to, const Pack<A> &pack) {
    Pack<A> sum;
    std::memcpy(&sum, to, VECTOR);
    sum.lanes += pack.lanes;
    std::memcpy(to, &sum, VECTOR);
}

// Calls run with a value of the type of x.
template <class Run> void with_type(Dtype dtype, Run run) {
    switch (dtype) {
    case Dtype::FLOAT: return run(float());
    case Dtype::DOUBLE: return run(double());
    case Dtype::BFLOAT16: return run(bfloat16());
    case Dtype::FLOAT16: return run(float16());
    }
}

// The same for a type whose arithmetic is A.
template <class A, class Run> void with_type_of(Dtype dtype, Run run) {
    if constexpr (std::is_same_v<A, double>)
        run(double());
    else if (dtype == Dtype::BFLOAT16)
        run(bfloat16());
    else if (dtype == Dtype::FLOAT16)
        run(float16());
    else
        run(float());
}

inline i64 size_of(Dtype dtype) { return dtype == Dtype::DOUBLE ? 8 : dtype == Dtype::FLOAT ? 4 : 2; }

template <class T> Tensor<const T> tensor(const Input &x) { return {static_cast<const T *>(x.at), x.b, x.inner}; }
template <class T> Tensor<T> tensor(const Shape &n, const Output &y) {
    return with_huge_pages(n, Tensor<T>{static_cast<T *>(y.at), y.b, y.inner});
}
template <class A> Rows<A> rows(const Table &table, i64 C) {
    return {static_cast<const A *>(table.at), table.per_row, table.last, C};
}

}  // namespace ghostnoise::GN_ISA

// What the passes, the pools and the tables share: element types and their arithmetic, vectors, rows of tables, and the
// names of exported functions.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

using i64 = std::int64_t;

struct bfloat16 {
    std::uint16_t bits;
};

template <class T> struct Arithmetic { using type = float; };
template <> struct Arithmetic<double> { using type = double; };

inline float load(float value) { return value; }
inline double load(double value) { return value; }
inline float load(bfloat16 value) {
    std::uint32_t bits = std::uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float &to, float value) { to = value; }
inline void store(double &to, double value) { to = value; }
inline void store(bfloat16 &to, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t even = bits + 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
    to.bits = std::uint16_t((value != value ? (bits | 0x400000u) : even) >> 16);
}

#ifdef __FLT16_MAX__
using float16 = _Float16;
inline float load(float16 value) { return float(value); }
inline void store(float16 &to, float value) { to = float16(value); }
#endif

// Writes 64 bytes past the caches, where there is an instruction for it: what is written is then not read first.
inline void stream(void *to, const void *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i *>(to), _mm512_load_si512(from));
#elif defined(__AVX2__)
    const __m256i *source = static_cast<const __m256i *>(from);
    for (int k = 0; k < 2; ++k)
        _mm256_stream_si256(static_cast<__m256i *>(to) + k, _mm256_load_si256(source + k));
#elif defined(__SSE2__)
    const __m128i *source = static_cast<const __m128i *>(from);
    for (int k = 0; k < 4; ++k)
        _mm_stream_si128(static_cast<__m128i *>(to) + k, _mm_load_si128(source + k));
#else
    std::memcpy(to, from, 64);
#endif
}

// Makes what was streamed visible to the threads that come after.
inline void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// 64 bytes in a register, whatever its width: the compiler cuts them into what the instruction set has.
template <class A> struct Pack {
    static constexpr i64 LANES = 64 / sizeof(A);
    A lanes __attribute__((vector_size(64)));

    template <class T> void load_from(const T *from) {
        alignas(64) A line[LANES];
#pragma omp simd
        for (i64 l = 0; l < LANES; ++l)
            line[l] = load(from[l]);
        std::memcpy(&lanes, line, 64);
    }
    // The first `count` lanes; the others are `rest`.
    template <class T> void load_part(const T *from, i64 count, A rest) {
        alignas(64) A line[LANES];
        for (i64 l = 0; l < LANES; ++l)
            line[l] = rest;
        for (i64 l = 0; l < count; ++l)
            line[l] = load(from[l]);
        std::memcpy(&lanes, line, 64);
    }
};

// Lane l of the result is the sum over lanes l and l ^ H: of b where l has the bit H, else of a.
template <i64 H, class A, i64... L>
inline void halve(Pack<A> &a, const Pack<A> &b, std::integer_sequence<i64, L...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GN_SHUFFLE
#endif
#endif
#ifdef GN_SHUFFLE
    constexpr i64 N = Pack<A>::LANES;
    a.lanes = __builtin_shufflevector(a.lanes, b.lanes, ((L & H) ? L + N : L)...) +
              __builtin_shufflevector(a.lanes, b.lanes, ((L & H) ? (L ^ H) + N : (L ^ H))...);
#else
    const Pack<A> from = a;
    ((a.lanes[L] = (L & H) ? b.lanes[L] + b.lanes[L ^ H] : from.lanes[L] + from.lanes[L ^ H]), ...);
#endif
}

// Lane l of the first pack becomes the sum over the lanes of pack l, of as many packs as a pack has lanes.
template <i64 H = 0, class A> inline void sum_lanes(Pack<A> *packs) {
    constexpr i64 N = Pack<A>::LANES, HALF = H ? H : N / 2;
#pragma GCC unroll 8
    for (i64 i = 0; i < HALF; ++i)
        halve<HALF>(packs[i], packs[i + HALF], std::make_integer_sequence<i64, N>());
    if constexpr (HALF > 1)
        sum_lanes<HALF / 2>(packs);
}

// A table of which each row serves `each` consecutive samples, the last row those left over too.
template <class A> struct Rows {
    const A *at;
    i64 each, last, C;

    const A *of(i64 b) const {
        const i64 row = b / each;
        return at + (row < last ? row : last) * C;
    }
};

// The moments of n samples, of some channels.
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

// Channels that one tile of a table keeps in registers.
constexpr i64 CHUNK = 64;

// Runs tile(g, first channel, channels) over G groups of rows and tiles of channels.
template <i64 WIDE = CHUNK, class Tile> void for_columns(i64 G, i64 C, i64 threads, Tile tile) {
    const i64 tiles = (C + WIDE - 1) / WIDE;
#pragma omp parallel for collapse(2) num_threads(int(threads)) schedule(static)
    for (i64 t = 0; t < tiles; ++t)
        for (i64 g = 0; g < G; ++g)
            tile(g, t * WIDE, C - t * WIDE < WIDE ? C - t * WIDE : WIDE);
}

// Calls run with true or false as a constant.
template <class Run> void with_flag(bool flag, Run run) {
    if (flag)
        run(std::true_type());
    else
        run(std::false_type());
}

// What standardize makes of statistics (R, C), one table after another.
template <class A> struct Standard {
    A *center, *lost, *rstd, *factor, *shift;

    Standard(A *at, i64 size)
        : center(at), lost(at + size), rstd(at + 2 * size), factor(at + 3 * size), shift(at + 4 * size) {}
};

// What noise m and k on a normalized x comes to, where all samples share its statistics: y = k·factor·(x - center) +
// bias - weight·k·(m - rest), with rest = rstd·lost. Rows of C: one place for all that round the same.
template <class A> struct Blend {
    static constexpr i64 ROWS = 5;
    A *center, *factor, *rest, *gain, *bias;
    i64 C;

    Blend(A *at, i64 C)
        : center(at), factor(at + C), rest(at + 2 * C), gain(at + 3 * C), bias(at + 4 * C), C(C) {}

    void fill(const A *standard, const A *weight, const A *added) const {
        const Standard<A> stats(const_cast<A *>(standard), C);
        for (i64 c = 0; c < C; ++c) {
            center[c] = stats.center[c];
            factor[c] = stats.factor[c];
            rest[c] = stats.rstd[c] * stats.lost[c];
            gain[c] = weight ? weight[c] : A(1);
            bias[c] = added ? added[c] : A(0);
        }
    }
    A scale(i64 c, A k) const { return k * factor[c]; }
    A shift(i64 c, A m, A k) const { return bias[c] - gain[c] * k * (m - rest[c]); }
};

} // namespace

#define GN_JOIN_(name, isa) gn_##name##_##isa
#define GN_JOIN(name, isa) GN_JOIN_(name, isa)
#define GN_EXPORT(name) extern "C" int GN_JOIN(name, GN_ISA)

// Element types, the arithmetic they are computed in, and vectors of the width that the instruction set has.

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

template <class T> struct Arithmetic {
    using type = float;
};
template <> struct Arithmetic<double> {
    using type = double;
};

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

// Writes 64 bytes with a non-temporal store where the instruction set has one, so that the line is not read first.
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

// Orders non-temporal stores before whatever the other threads do next.
inline void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// The bytes of a register. Wider vectors would be correct too, but compilers keep them in memory.
#if defined(__AVX512F__)
constexpr i64 VECTOR = 64;
#elif defined(__AVX2__)
constexpr i64 VECTOR = 32;
#else
constexpr i64 VECTOR = 16;
#endif

// A register of values.
template <class A> struct Pack {
    static constexpr i64 LANES = VECTOR / sizeof(A);
    A lanes __attribute__((vector_size(VECTOR)));

    template <class T> void load_from(const T *from) {
        if constexpr (std::is_same_v<T, A>) {
            std::memcpy(&lanes, from, VECTOR);
        } else if constexpr (std::is_same_v<T, float>) {
            float half __attribute__((vector_size(VECTOR / 2)));
            std::memcpy(&half, from, VECTOR / 2);
            lanes = __builtin_convertvector(half, decltype(lanes));
        } else {
            alignas(VECTOR) A line[LANES];
#pragma omp simd
            for (i64 l = 0; l < LANES; ++l)
                line[l] = load(from[l]);
            std::memcpy(&lanes, line, VECTOR);
        }
    }
    // Loads the first `count` lanes and sets the remaining ones to `rest`.
    template <class T> void load_part(const T *from, i64 count, A rest) {
        alignas(VECTOR) A line[LANES];
        for (i64 l = 0; l < LANES; ++l)
            line[l] = rest;
        for (i64 l = 0; l < count; ++l)
            line[l] = load(from[l]);
        std::memcpy(&lanes, line, VECTOR);
    }
};

// Sets lane l of `a` to the sum of lanes l and l ^ H, taken from b where l has the bit H and from a elsewhere.
template <i64 H, class A, i64... L>
inline void add_halves(Pack<A> &a, const Pack<A> &b, std::integer_sequence<i64, L...>) {
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

// Sets lane l of the first pack to the sum of all lanes of pack l; there are as many packs as lanes.
template <i64 H = 0, class A> inline void sum_lanes(Pack<A> *packs) {
    constexpr i64 N = Pack<A>::LANES, HALF = H ? H : N / 2;
#pragma GCC unroll 8
    for (i64 i = 0; i < HALF; ++i)
        add_halves<HALF>(packs[i], packs[i + HALF], std::make_integer_sequence<i64, N>());
    if constexpr (HALF > 1)
        sum_lanes<HALF / 2>(packs);
}

}  // namespace

// Element types, the arithmetic they are computed in, and vectors of the width that the instruction set has.

#pragma once

#include "platform.h"
#include "kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace ghostnoise::GN_ISA {

constexpr i64 LINE = 64;  // bytes of a line of the caches

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

#if defined(GN_FLOAT16_TYPE)
using float16 = _Float16;
inline float load(float16 value) { return float(value); }
inline void store(float16 &to, float value) { to = float16(value); }
#else
struct float16 {
    std::uint16_t bits;
};

inline float load(float16 value) {
    const std::uint32_t sign = std::uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    const float subnormal = float(rest) * 5.9604644775390625e-8f;                      // multiples of 2^-24
    std::uint32_t bits = (rest << 13) + (rest < 0x7c00u ? 0x38000000u : 0x70000000u);  // infinite or not a number
    if (rest < 0x400u)
        std::memcpy(&bits, &subnormal, 4);
    bits |= sign;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float16 &to, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    std::uint32_t half;
    if (size > 0x7f800000u)
        half = 0x7e00u | ((size >> 13) & 0x3ffu);  // not a number
    else if (size >= 0x477ff000u)
        half = 0x7c00u;  // rounds to infinity
    else if (size >= 0x38800000u)
        half = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;  // to nearest, ties to even
    else {
        float magnitude;  // subnormal: the sum with 0.5 rounds to a multiple of 2^-24, the spacing of subnormal values
        std::memcpy(&magnitude, &size, 4);
        magnitude += 0.5f;
        std::memcpy(&half, &magnitude, 4);
        half -= 0x3f000000u;
    }
    to.bits = std::uint16_t(sign | half);
}
#endif

// Writes 64 bytes with a non-temporal store where the instruction set has one, so that the line is not read first.
inline void stream(void *to, const void *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i *>(to), _mm512_load_si512(from));
#elif defined(__AVX2__)
    const __m256i *source = static_cast<const __m256i *>(from);
    for (int k = 0; k < 2; ++k)
        _mm256_stream_si256(static_cast<__m256i *>(to) + k, _mm256_load_si256(source + k));
#elif defined(GN_SSE2)
    const __m128i *source = static_cast<const __m128i *>(from);
    for (int k = 0; k < 4; ++k)
        _mm_stream_si128(static_cast<__m128i *>(to) + k, _mm_load_si128(source + k));
#else
    std::memcpy(to, from, 64);
#endif
}

// Orders non-temporal stores before whatever the other threads do next.
inline void fence() {
#if defined(GN_SSE2)
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

#if !defined(GN_VECTOR_TYPES)
// The operations on vectors that are used here.
template <class A> struct alignas(VECTOR) Vector {
    static constexpr i64 LANES = VECTOR / sizeof(A);
    A lane[LANES];

    A &operator[](i64 l) { return lane[l]; }
    const A &operator[](i64 l) const { return lane[l]; }
    template <class Change> Vector &apply(Change change) {
        for (i64 l = 0; l < LANES; ++l)
            change(l);
        return *this;
    }
    Vector &operator+=(const Vector &other) {
        return apply([&](i64 l) { lane[l] += other.lane[l]; });
    }
    Vector &operator-=(const Vector &other) {
        return apply([&](i64 l) { lane[l] -= other.lane[l]; });
    }
    Vector &operator*=(const Vector &other) {
        return apply([&](i64 l) { lane[l] *= other.lane[l]; });
    }
    Vector &operator-=(A value) {
        return apply([&](i64 l) { lane[l] -= value; });
    }
    Vector &operator*=(A value) {
        return apply([&](i64 l) { lane[l] *= value; });
    }
    friend Vector operator*(const Vector &a, const Vector &b) { return Vector(a) *= b; }
    friend Vector operator*(const Vector &a, A value) { return Vector(a) *= value; }
    friend Vector operator+(const Vector &a, const Vector &b) { return Vector(a) += b; }
    friend Vector operator-(const Vector &a, const Vector &b) { return Vector(a) -= b; }
};
#endif

// A register of values.
template <class A> struct Pack {
    static constexpr i64 LANES = VECTOR / sizeof(A);
#if defined(GN_VECTOR_TYPES)
    A lanes __attribute__((vector_size(VECTOR)));
#else
    Vector<A> lanes;
#endif

    template <class T> void load_from(const T *from) {
#if defined(GN_VECTOR_TYPES)
        if constexpr (std::is_same_v<T, float> && std::is_same_v<A, double>) {
            float half __attribute__((vector_size(VECTOR / 2)));
            std::memcpy(&half, from, VECTOR / 2);
            lanes = __builtin_convertvector(half, decltype(lanes));
            return;
        }
#endif
        if constexpr (std::is_same_v<T, A>) {
            std::memcpy(&lanes, from, VECTOR);
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

// The first `count` values; the remaining lanes are `rest`.
template <class A, class T, class Count> Pack<A> values(const T *from, Count count, A rest) {
    Pack<A> pack;
    if constexpr (std::is_same_v<Count, std::integral_constant<i64, Pack<A>::LANES>>)
        pack.load_from(from);
    else
        pack.load_part(from, count, rest);
    return pack;
}

// Rounds a product now: fused with a later sum it would be rounded once, unlike a product that is stored in a table.
template <class A> GN_INLINE void rounded(Pack<A> &product) {
#if defined(GN_VECTOR_TYPES) && defined(__AVX512F__)
    asm("" : "+v"(product.lanes));
#elif defined(GN_VECTOR_TYPES) && defined(__SSE2__)
    asm("" : "+x"(product.lanes));
#elif defined(GN_VECTOR_TYPES) && defined(__aarch64__)
    asm("" : "+w"(product.lanes));
#else
    (void)product;
#endif
}

// Sets lane l of `a` to the sum of lanes l and l ^ H, taken from b where l has the bit H and from a elsewhere.
template <i64 H, class A, i64... L>
inline void add_halves(Pack<A> &a, const Pack<A> &b, std::integer_sequence<i64, L...>) {
#if defined(GN_VECTOR_TYPES) && defined(__has_builtin)
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

}  // namespace ghostnoise::GN_ISA

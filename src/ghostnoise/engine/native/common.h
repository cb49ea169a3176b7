// What the passes and the pools share: element types and their arithmetic, and the names of exported functions.

#pragma once

#include <cstdint>
#include <cstring>
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

// Channels that one tile keeps in registers.
constexpr i64 CHUNK = 64;

} // namespace

#define GN_JOIN_(name, isa) gn_##name##_##isa
#define GN_JOIN(name, isa) GN_JOIN_(name, isa)
#define GN_EXPORT(name) extern "C" int GN_JOIN(name, GN_ISA)

// The differences between compilers and systems: attributes of functions, prefetching, and whether there are vector
// types.

#pragma once

// Of functions in loops that are to be vectorized.
#if defined(_MSC_VER)
#define GN_INLINE __forceinline
#define GN_NOINLINE __declspec(noinline)
#else
#define GN_INLINE inline __attribute__((always_inline))
#define GN_NOINLINE __attribute__((noinline))
#endif

// Requests a line of memory that is soon read (GN_WILL_READ) or overwritten. Rows of a tile of channels are far apart,
// so the processor does not foresee them.
#if defined(_MSC_VER)
#define GN_WILL_READ(at) (void)(at)
#define GN_WILL_WRITE(at) (void)(at)
#else
#define GN_WILL_READ(at) __builtin_prefetch(at, 0)
#define GN_WILL_WRITE(at) __builtin_prefetch(at, 1)
#endif

// GN_PORTABLE selects the code for compilers without GCC's extensions, so that it can be tested with GCC.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(GN_PORTABLE)
#define GN_VECTOR_TYPES
#endif
#if defined(__FLT16_MAX__) && !defined(GN_PORTABLE)
#define GN_FLOAT16_TYPE
#endif

#if defined(__SSE2__) || defined(_M_X64)
#define GN_SSE2
#include <immintrin.h>
#endif

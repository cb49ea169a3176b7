// The kernels for the instruction set of this processor.

#pragma once

#include "kernels.h"

#include <cstdlib>
#include <cstring>

#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
#include <intrin.h>
#endif

// The instruction sets that the kernels were compiled for.
#if defined(GN_WITH_BASELINE)
namespace ghostnoise::baseline { extern const Kernels kernels; }
#endif
#if defined(GN_WITH_AVX2)
namespace ghostnoise::avx2 { extern const Kernels kernels; }
#endif
#if defined(GN_WITH_AVX512)
namespace ghostnoise::avx512 { extern const Kernels kernels; }
#endif

namespace ghostnoise {

inline bool requests_huge_pages() {
    const char *value = std::getenv("GHOSTNOISE_HUGE_PAGES");
    return !value || std::strcmp(value, "0") != 0;
}

// The kernels for the best instruction set that this processor and system have; null if there are none.
inline const Kernels *best_kernels() {
    bool avx2 = false, avx512 = false;
#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
    int first[4], seventh[4];
    __cpuidex(first, 1, 0);
    __cpuidex(seventh, 7, 0);
    const unsigned features = unsigned(first[2]), more = unsigned(seventh[1]);
    const unsigned needed = 1u << 12 | 1u << 29 | 1u << 27;           // FMA, F16C, OSXSAVE
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // AVX-512 F, DQ, BW and VL
    if ((features & needed) == needed) {
        const unsigned long long saved = _xgetbv(0);  // the registers that the system saves: YMM, and masks and ZMM
        avx512 = (more & wide) == wide && (saved & 0xe6) == 0xe6;
        avx2 = (more & 1u << 5) && (saved & 0x6) == 0x6;
    }
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("fma");
    avx2 = fma && __builtin_cpu_supports("avx2");
    avx512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    if (const char *best = std::getenv("GHOSTNOISE_LEVEL")) {  // so that a machine can test all of them
        avx512 = avx512 && std::strcmp(best, "avx512") == 0;
        avx2 = avx2 && std::strcmp(best, "baseline") != 0;
    }
    (void)avx2, (void)avx512;
#if defined(GN_WITH_AVX512)
    if (avx512)
        return &avx512::kernels;
#endif
#if defined(GN_WITH_AVX2)
    if (avx2)
        return &avx2::kernels;
#endif
#if defined(GN_WITH_BASELINE)
    return &baseline::kernels;
#else
    return nullptr;
#endif
}

inline const Kernels *const kernels = best_kernels();

}  // namespace ghostnoise

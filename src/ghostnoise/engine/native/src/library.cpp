// Functions that are called once, when the library is loaded.

#include "platform.h"

#if defined(_MSC_VER) && defined(GN_X86)
#include <intrin.h>
#endif

// The number that setup.py computes from abi.py. A library whose number differs from that of the Python sources was
// built from other sources, and is not used.
GN_PUBLIC long long gn_abi() { return GN_ABI; }

// The best instruction set that this processor and system have: 2 AVX-512, 1 AVX2, 0 the default of the compiler.
GN_PUBLIC int gn_level() {
#if defined(GN_X86) && defined(_MSC_VER)
    int first[4], seventh[4];
    __cpuidex(first, 1, 0);
    __cpuidex(seventh, 7, 0);
    const unsigned features = unsigned(first[2]), more = unsigned(seventh[1]);
    const unsigned fma = 1u << 12, f16c = 1u << 29, osxsave = 1u << 27;
    const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW and VL
    if ((features & (fma | f16c | osxsave)) != (fma | f16c | osxsave))
        return 0;
    const unsigned long long saved = _xgetbv(0);  // the registers that the system saves: YMM, and the masks and ZMM
    if ((more & avx512) == avx512 && (saved & 0xe6) == 0xe6)
        return 2;
    if ((more & avx2) == avx2 && (saved & 0x6) == 0x6)
        return 1;
#elif defined(GN_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

// Whether the library was built with OpenMP; without it, every function runs in the calling thread.
GN_PUBLIC int gn_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Whether huge pages are requested for large results; set once, before the first call of any other function.
extern "C" int gn_huge_pages_requested;
int gn_huge_pages_requested = 1;
GN_PUBLIC void gn_request_huge_pages(int requested) { gn_huge_pages_requested = requested; }

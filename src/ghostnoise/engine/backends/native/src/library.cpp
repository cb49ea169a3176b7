// What is asked of the library once, when it is loaded.

// The number that setup.py computes from abi.py. A library whose number differs from that of the Python sources was
// built from other sources, and is not used.
extern "C" long long gn_abi() { return GN_ABI; }

// The best instruction set that this processor has: 2 AVX-512, 1 AVX2, 0 the default of the compiler.
extern "C" int gn_level() {
#if defined(GN_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

// Whether huge pages are requested for large results; set once, before the first call of any other function.
extern "C" {
int gn_huge_pages_requested = 1;
void gn_request_huge_pages(int requested) { gn_huge_pages_requested = requested; }
}

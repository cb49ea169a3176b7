// The operators of the namespace `ghostnoise` for CPUs, on torch's stable ABI. Python defines their schemas
// (engine/ops.py); a kernel receives its arguments in the order of its schema.
//
// Tensors are read through the C functions below torch::stable::Tensor, and the arguments one by one rather than with
// TORCH_BOX: with small inputs, reference-counted wrappers would take as long as the arithmetic, and TORCH_BOX of torch
// 2.10 to 2.13 loses the memory of each string argument.

#include "operators.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ghostnoise {

void request_huge_pages(const void *at, i64 bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    static const bool requested = requests_huge_pages();
    constexpr std::uintptr_t PAGE = std::uintptr_t(1) << 21;
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(at);
    const std::uintptr_t from = (begin + PAGE - 1) / PAGE * PAGE, end = (begin + std::uintptr_t(bytes)) / PAGE * PAGE;
    if (requested && end > from)
        madvise(reinterpret_cast<void *>(from), end - from, MADV_HUGEPAGE);  // only a request: failing is harmless
#else
    (void)at, (void)bytes;
#endif
}

void run_shares(i64 shares, void (*share)(void *context, i64 k), void *context) {
    struct Call {
        void (*share)(void *, i64);
        void *context;
    } call = {share, context};
    const auto run = [](std::int64_t begin, std::int64_t end, void *given) {
        for (i64 k = begin; k < end; ++k)
            static_cast<Call *>(given)->share(static_cast<Call *>(given)->context, k);
    };
    succeed(torch_parallel_for(0, shares, 1, run, &call));
}

}  // namespace ghostnoise

// The instruction set of the kernels that run, for `ghostnoise doctor`; null if the library was built for others, and
// has not registered any kernel.
#if defined(_WIN32)
extern "C" __declspec(dllexport)
#else
extern "C" __attribute__((visibility("default")))
#endif
const char *ghostnoise_level() {
    return ghostnoise::kernels ? ghostnoise::kernels->level : nullptr;
}

STABLE_TORCH_LIBRARY_IMPL(ghostnoise, CPU, m) {
    if (!ghostnoise::kernels)
        return;
    m.impl("moments", &ghostnoise::operators::moments);
    m.impl("transform", &ghostnoise::operators::transform);
    m.impl("gradient_sums", &ghostnoise::operators::gradient_sums);
    m.impl("input_gradient", &ghostnoise::operators::input_gradient);
    m.impl("ghost_batches", &ghostnoise::operators::ghost_batches);
    m.impl("ghost_batches_backward", &ghostnoise::operators::ghost_batches_backward);
    m.impl("excluding_sample", &ghostnoise::operators::excluding_sample);
    m.impl("excluding_sample_backward", &ghostnoise::operators::excluding_sample_backward);
    m.impl("drawn_samples", &ghostnoise::operators::drawn_samples);
    m.impl("normalizing_scale", &ghostnoise::operators::normalizing_scale);
    m.impl("normalizing_scale_backward", &ghostnoise::operators::normalizing_scale_backward);
    m.impl("normalize", &ghostnoise::operators::normalize);
    m.impl("normalize_backward", &ghostnoise::operators::normalize_backward);
    m.impl("ghost_noise", &ghostnoise::operators::ghost_noise);
}

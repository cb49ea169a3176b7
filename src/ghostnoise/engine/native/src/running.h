// Running statistics, which the forward pass of a normalizer updates in place.

#pragma once

#include "layouts.h"

namespace ghostnoise {

// The number of batches that were tracked.
inline i64 count_of(const char *name, const char *what, const Tensor &count) {
    if (count.dtype != INT64 || (count.dims != 0 && !(count.dims == 1 && count.sizes[0] == 1)))
        fail(name, what, " of shape ", shape(count), "; it must be an int64 scalar");
    return *static_cast<const i64 *>(count.read());
}

// from + factor * (to - from), exactly `from` or `to` where the factor is 0 or 1, as torch.lerp computes it.
template <class T> T interpolate(T from, double to, double factor) {
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const A start = A(from), end = A(to), gap = end - start, weight = A(factor);
    return T(factor < 0.5 ? start + weight * gap : end - gap * (A(1) - weight));
}

// Updates running statistics towards the moments of a batch, and the number of batches, unless the updated values are
// not finite. Each of the three may be absent.
struct Running {
    const Tensor &mean, &var, &count;
    std::optional<double> momentum;

    explicit operator bool() const {
        return (mean || var || count) && (momentum || count);  // an average needs the count
    }
    void check(const char *name, i64 C) const {
        for (const Tensor *buffer : {&mean, &var})
            if (*buffer) {
                check_channels(name, "a running statistic", *buffer, C);
                with_elements(name, "a running statistic", *buffer, [](auto) {});
                if (C > 1 && buffer->strides[0] == 0)
                    fail(name, "an expanded running statistic; its elements must have memory of their own");
            }
        if (count)
            count_of(name, "num_batches_tracked", count);
    }
    void update(const char *name, i64 C, const double *to_mean, const double *to_var) const {
        i64 *const batches = static_cast<i64 *>(count.write());
        const double factor = momentum ? *momentum : 1.0 / double(*batches + 1);
        double sum = 0;  // 0 if all values are finite, else NaN
        const auto each = [&](const Tensor &buffer, const double *to, auto use) {
            if (buffer)
                with_elements(name, "a running statistic", buffer, [&](auto *type) {
                    auto *at = static_cast<decltype(type)>(buffer.write());
                    for (i64 c = 0; c < C; ++c)
                        use(at[c * buffer.strides[0]], interpolate(at[c * buffer.strides[0]], to[c], factor));
                });
        };
        const auto sum_up = [&](const auto &, auto updated) { sum += 0 * double(updated); };
        const auto store = [](auto &old, auto updated) { old = updated; };
        each(mean, to_mean, sum_up);
        each(var, to_var, sum_up);
        for (i64 c = 0; !mean && !var && c < C; ++c)
            sum += 0 * (to_mean[c] + to_var[c]);
        if (sum != 0)
            return;
        each(mean, to_mean, store);
        each(var, to_var, store);
        if (batches)
            ++*batches;
    }
};

}  // namespace ghostnoise

// The passes over x, and pools of tables.

#include "layouts.h"
#include "operators.h"

#include <cmath>

namespace ghostnoise::operators {

void moments(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "moments";
    Arguments arguments(stack, given, 1);
    const Tensor x = arguments.tensor();
    const Batch batch(name, x, false);
    const Pass &n = batch.n;
    Tensor mean = table(n.B, n.C, FLOAT64), var = table(n.B, n.C, FLOAT64);
    double *to_mean = static_cast<double *>(mean.write()), *to_var = static_cast<double *>(var.write());
    if (batch.elements())
        check(name, kernels->moments(n, batch.input(), to_mean, to_var));
    for (i64 k = 0; n.S == 0 && k < n.B * n.C; ++k)
        to_mean[k] = to_var[k] = NAN;
    give(stack, mean, var);
}

void transform(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "transform";
    Arguments arguments(stack, given, 4);
    const Tensor x = arguments.tensor(), center = arguments.tensor(), scale = arguments.tensor();
    const Tensor shift = arguments.tensor();
    Batch batch(name, x, true);
    const Pass &n = batch.n;
    i64 R = 1;
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable scales = given_table(name, "scale", scale, batch, R);
    const GivenTable shifts = given_table(name, "shift", shift, batch, R);
    if (batch.elements()) {
        Memory memory;
        const i64 size = R * n.C * batch.arithmetic_bytes();
        char *to = static_cast<char *>(memory.bytes(3 * size));
        kernels->convert_linear(batch.wide(), threads_for(R * n.C), R, n.C, centers, scales, shifts, to);
        const auto rows = [&](int k) { return Table{to + k * size, R == 1 ? n.B : 1, R - 1}; };
        check(name, kernels->transform(n, false, batch.input(), rows(0), rows(1), rows(2), batch.output()));
        batch.finish();
    }
    give(stack, batch.made);
}

void gradient_sums(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "gradient_sums";
    Arguments arguments(stack, given, 3);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), center = arguments.tensor();
    const Batch batch(name, x, false);
    const Pass &n = batch.n;
    Tensor copied;
    const Input gradient = batch.gradient(name, dy, copied);
    i64 R = 1;
    const GivenTable centers = given_table(name, "center", center, batch, R);
    Tensor total = table(n.B, n.C, FLOAT64), moment = table(n.B, n.C, FLOAT64);
    double *to_total = static_cast<double *>(total.write()), *to_moment = static_cast<double *>(moment.write());
    if (batch.elements()) {
        Memory memory;
        const i64 size = n.B * n.C * batch.arithmetic_bytes(), threads = threads_for(n.B * n.C);
        char *rounded = static_cast<char *>(memory.bytes(R * n.C * batch.arithmetic_bytes()));
        char *sums = static_cast<char *>(memory.bytes(2 * size));
        kernels->convert(batch.wide(), threads, R, n.C, centers, rounded);
        check(name, kernels->gradient_sums(n, gradient, batch.input(), {rounded, R == 1 ? n.B : 1, R - 1}, sums,
                                           sums + size));
        kernels->widen_sums(batch.wide(), threads, n.B, n.C, centers, sums, sums + size, to_total, to_moment);
    }
    for (i64 k = 0; n.S == 0 && k < n.B * n.C; ++k)
        to_total[k] = to_moment[k] = 0;
    give(stack, total, moment);
}

void input_gradient(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "input_gradient";
    Arguments arguments(stack, given, 6);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), scale = arguments.tensor();
    const Tensor center = arguments.tensor(), slope = arguments.tensor(), offset = arguments.tensor();
    Batch batch(name, x, true);
    const Pass &n = batch.n;
    Tensor copied;
    const Input gradient = batch.gradient(name, dy, copied);
    i64 R = 1, scale_rows = 1;
    const GivenTable scales = given_table(name, "scale", scale, batch, scale_rows);
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable slopes = given_table(name, "slope", slope, batch, R);
    const GivenTable offsets = given_table(name, "offset", offset, batch, R);
    if (batch.elements()) {
        Memory memory;
        const i64 bytes = batch.arithmetic_bytes(), size = R * n.C * bytes;
        char *to = static_cast<char *>(memory.bytes(3 * size));
        char *factor = static_cast<char *>(memory.bytes(scale_rows * n.C * bytes));
        char *ones = static_cast<char *>(memory.bytes(n.C * bytes));
        const double one = 1;
        const bool wide = batch.wide();
        kernels->convert_linear(wide, threads_for(R * n.C), R, n.C, centers, slopes, offsets, to);
        kernels->convert(wide, threads_for(scale_rows * n.C), scale_rows, n.C, scales, factor);
        kernels->convert(wide, 1, 1, n.C, {&one, true, 0, 0}, ones);
        const auto rows = [&](int k) { return Table{to + k * size, R == 1 ? n.B : 1, R - 1}; };
        check(name, kernels->input_gradient(n, false, gradient, batch.input(),
                                            {factor, scale_rows == 1 ? n.B : 1, scale_rows - 1}, {ones, n.B, 0},
                                            rows(0), rows(1), rows(2), batch.output()));
        batch.finish();
    }
    give(stack, batch.made);
}

static void check_table(const char *name, const Tensor &table) {
    if (table.dims != 2)
        fail(name, "a table of shape ", shape(table), "; it must have the shape (B, C)");
}

void excluding_sample(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "excluding_sample";
    Arguments arguments(stack, given, 3);
    const Tensor mean = arguments.tensor(), var = arguments.tensor();
    const auto ghost_size = arguments.take<std::optional<i64>>();
    check_table(name, mean);
    const i64 B = mean.sizes[0], C = mean.sizes[1];
    Memory memory;
    i64 G;
    const i64 *starts = ghost_batches(name, ghost_size, B, G, memory);
    Tensor copied_mean, copied_var, made_mean = table(B, C, FLOAT64), made_var = table(B, C, FLOAT64);
    const double *from_mean = statistics(name, "mean", mean, B, C, copied_mean);
    const double *from_var = statistics(name, "var", var, B, C, copied_var);
    if (B > 0 && C > 0)
        kernels->excluding_sample(threads_for(B * C), G, starts, C, from_mean, from_var,
                                  static_cast<double *>(made_mean.write()), static_cast<double *>(made_var.write()));
    give(stack, made_mean, made_var);
}

void excluding_sample_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "excluding_sample_backward";
    Arguments arguments(stack, given, 6);
    const Tensor g_mean = arguments.tensor(), g_var = arguments.tensor(), mean = arguments.tensor();
    const Tensor var = arguments.tensor(), pooled = arguments.tensor();
    const auto ghost_size = arguments.take<std::optional<i64>>();
    check_table(name, mean);
    const i64 B = mean.sizes[0], C = mean.sizes[1];
    Memory memory;
    i64 G;
    const i64 *starts = ghost_batches(name, ghost_size, B, G, memory);
    Tensor copied[4], made_mean = table(B, C, FLOAT64), made_var = table(B, C, FLOAT64);
    const double *from[] = {statistics(name, "g_mean", g_mean, B, C, copied[0]),
                            statistics(name, "g_var", g_var, B, C, copied[1]),
                            statistics(name, "mean", mean, B, C, copied[2]),
                            statistics(name, "pooled_mean", pooled, B, C, copied[3])};
    if (B > 0 && C > 0)
        kernels->excluding_sample_backward(threads_for(B * C), G, starts, C, from[0], from[1], from[2], from[3],
                                           static_cast<double *>(made_mean.write()),
                                           static_cast<double *>(made_var.write()));
    give(stack, made_mean, made_var);
}

void pool_drawn(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "pool_drawn";
    Arguments arguments(stack, given, 3);
    const Tensor mean = arguments.tensor(), var = arguments.tensor(), indices = arguments.tensor();
    check_table(name, mean);
    Tensor copied_mean, copied_var, copied;
    const i64 B = mean.sizes[0], C = mean.sizes[1], *drawn = rows_of_indices(name, indices, copied);
    const i64 K = indices.sizes[0], N = indices.sizes[1];
    Tensor made_mean = table(K, C, FLOAT64), made_var = table(K, C, FLOAT64);
    const double *from_mean = statistics(name, "mean", mean, B, C, copied_mean);
    const double *from_var = statistics(name, "var", var, B, C, copied_var);
    if (K > 0 && C > 0)
        check(name, kernels->pool_drawn(threads_for(K * C * N), B, C, K, N, from_mean, from_var, drawn,
                                        static_cast<double *>(made_mean.write()),
                                        static_cast<double *>(made_var.write())));
    give(stack, made_mean, made_var);
}

}  // namespace ghostnoise::operators

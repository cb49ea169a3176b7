// The passes over x, and pools of tables.

#include "layouts.h"
#include "operators.h"

#include <cmath>

namespace ghostnoise::operators {

namespace {

// A part of the batch, whose converted tables stay in a core's cache, and what it starts with.
struct Part {
    Pass n;
    i64 b, rows;  // its first sample, and the rows of its tables
    bool large;   // whether the result, of which this is a part, is written with non-temporal stores

    GivenTable table(const GivenTable &x) const {
        return {static_cast<const char *>(x.at) + b * x.row * (x.wide ? 8 : 4), x.wide, x.row, x.channel};
    }
    Input input(const Input &x) const { return {static_cast<const char *>(x.at) + b * x.b * bytes(), x.b, x.inner}; }
    Output output(const Output &y) const { return {static_cast<char *>(y.at) + b * y.b * bytes(), y.b, y.inner}; }
    Table converted(const char *at) const { return {at, rows == 1 ? n.B : 1, rows - 1}; }
    i64 threads(i64 R) const { return threads_for(R * n.C); }

    i64 bytes() const { return n.dtype == Dtype::DOUBLE ? 8 : n.dtype == Dtype::FLOAT ? 4 : 2; }
};

// Runs step(part) over the batch, in parts where tables have a row for each sample (R > 1).
template <class Step> void for_parts(const Pass &n, i64 R, Step step) {
    constexpr i64 ENTRIES = 2 * GRAIN, LARGE = i64(1) << 23;
    const i64 most = R == 1 || n.B * n.C <= ENTRIES ? n.B : n.C < ENTRIES ? ENTRIES / n.C : 1;
    Part part = {n, 0, 0, false};
    part.large = n.B * n.C * n.S * part.bytes() >= LARGE;
    for (; part.b < n.B; part.b += most) {
        part.n.B = n.B - part.b < most ? n.B - part.b : most;
        part.n.threads = threads_for(part.n.B * n.C * n.S);
        part.rows = R == 1 ? 1 : part.n.B;
        step(part);
    }
}

i64 most_entries(const Pass &n, i64 R) {
    i64 most = 0;
    for_parts(n, R, [&](const Part &part) { most = part.rows > most ? part.rows : most; });
    return most * n.C;
}

// A table (R, C) of zeros that share their memory.
Tensor zeros(i64 R, i64 C) {
    const i64 sizes[] = {R, C}, strides[] = {0, 0};
    Tensor made = empty(2, sizes, strides, FLOAT64);
    if (R * C > 0)
        *static_cast<double *>(made.write()) = 0;
    return made;
}

}  // namespace

void moments(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "moments";
    Arguments arguments(stack, given, 1);
    const Tensor x = arguments.tensor();
    const Batch batch(name, x, false);
    const Pass &n = batch.n;
    const bool single = n.S == 1;
    Tensor mean = table(n.B, n.C, FLOAT64), var = single ? zeros(n.B, n.C) : table(n.B, n.C, FLOAT64);
    double *to_mean = static_cast<double *>(mean.write()), *to_var = static_cast<double *>(var.write());
    if (batch.elements())
        check(name, kernels->moments(n, batch.input(), to_mean, single ? nullptr : to_var));
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
    i64 R = 1;
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable scales = given_table(name, "scale", scale, batch, R);
    const GivenTable shifts = given_table(name, "shift", shift, batch, R);
    if (batch.elements() && batch.n.S == 1 && batch.n.last && R > 1) {
        kernels->transform_single(batch.n, batch.input(), centers, scales, shifts, batch.output());
        batch.finish();
    } else if (batch.elements()) {
        Memory memory;
        char *to = static_cast<char *>(memory.bytes(3 * most_entries(batch.n, R) * batch.arithmetic_bytes()));
        const Input from = batch.input();
        const Output result = batch.output();
        for_parts(batch.n, R, [&](const Part &part) {
            const i64 C = part.n.C, size = part.rows * C * batch.arithmetic_bytes();
            kernels->convert_linear(batch.wide(), part.threads(part.rows), part.rows, C, part.table(centers),
                                    part.table(scales), part.table(shifts), to);
            check(name, kernels->transform(part.n, part.large, part.input(from), part.converted(to),
                                           part.converted(to + size), part.converted(to + 2 * size),
                                           part.output(result)));
        });
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
    if (batch.elements() && n.S == 1 && n.last) {
        kernels->gradient_sums_single(n, gradient, batch.input(), centers, to_total, to_moment);
    } else if (batch.elements()) {
        Memory memory;
        const i64 bytes = batch.arithmetic_bytes(), most = most_entries(n, 2) * bytes;
        char *rounded = static_cast<char *>(memory.bytes(3 * most)), *sums = rounded + most;
        const Input from = batch.input();
        for_parts(n, 2, [&](Part part) {
            const i64 C = n.C, samples = part.n.B, size = samples * C * bytes;
            part.rows = R == 1 ? 1 : samples;
            const GivenTable around = part.table(centers);
            kernels->convert(batch.wide(), part.threads(part.rows), part.rows, C, around, rounded);
            check(name, kernels->gradient_sums(part.n, part.input(gradient), part.input(from),
                                               part.converted(rounded), sums, sums + size));
            kernels->widen_sums(batch.wide(), part.threads(samples), samples, C, around, sums, sums + size,
                                to_total + part.b * C, to_moment + part.b * C);
        });
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
    Tensor copied;
    const Input gradient = batch.gradient(name, dy, copied);
    i64 R = 1;
    const GivenTable scales = given_table(name, "scale", scale, batch, R);
    const GivenTable centers = given_table(name, "center", center, batch, R);
    const GivenTable slopes = given_table(name, "slope", slope, batch, R);
    const GivenTable offsets = given_table(name, "offset", offset, batch, R);
    if (batch.elements()) {
        Memory memory;
        const i64 C = batch.n.C, bytes = batch.arithmetic_bytes(), most = most_entries(batch.n, R) * bytes;
        char *to = static_cast<char *>(memory.bytes(4 * most + C * bytes)), *ones = to + 4 * most;
        const double one = 1;
        const bool wide = batch.wide();
        kernels->convert(wide, 1, 1, C, {&one, true, 0, 0}, ones);
        const Input from = batch.input();
        const Output result = batch.output();
        for_parts(batch.n, R, [&](const Part &part) {
            const i64 rows = part.rows, size = rows * C * bytes, threads = part.threads(rows);
            kernels->convert_linear(wide, threads, rows, C, part.table(centers), part.table(slopes),
                                    part.table(offsets), to);
            kernels->convert(wide, threads, rows, C, part.table(scales), to + 3 * size);
            check(name, kernels->input_gradient(part.n, part.large, part.input(gradient), part.input(from),
                                                part.converted(to + 3 * size), {ones, part.n.B, 0},
                                                part.converted(to), part.converted(to + size),
                                                part.converted(to + 2 * size), part.output(result)));
        });
        batch.finish();
    }
    give(stack, batch.made);
}

// Tables of the moments of samples or pools (R, C) in double, or copies of them.
struct Tables {
    const char *name;
    i64 R, C;
    Tensor copied[4];
    int copies = 0;

    Tables(const char *name, const Tensor &x) : name(name), R(x.sizes[0]), C(x.sizes[1]) {}

    const double *of(const char *what, const Tensor &x, i64 rows) {
        return statistics(name, what, x, rows, C, copied[copies++]);
    }
    // Null for zeros that share their memory, as those of samples with a single position.
    const double *variances(const char *what, const Tensor &x) {
        const bool shared = x.dims == 2 && x.dtype == FLOAT64 && !x.strides[0] && !x.strides[1] && R * C > 0;
        return shared && *static_cast<const double *>(x.read()) == 0 ? nullptr : of(what, x, R);
    }
};

void check_table(const char *name, const Tensor &table) {
    if (table.dims != 2)
        fail(name, "a table of shape ", shape(table), "; it must have the shape (B, C)");
}

// Runs run(ghost batches, starts, mean, var, to_mean, to_var) on the moments of samples, and returns those of pools.
template <class Run> void pool(const char *name, StableIValue *stack, std::uint64_t given, bool one_row, Run run) {
    Arguments arguments(stack, given, 3);
    const Tensor mean = arguments.tensor(), var = arguments.tensor();
    const i64 ghost_size = arguments.take<i64>();
    check_table(name, mean);
    Tables tables(name, mean);
    Memory memory;
    i64 G;
    const i64 *starts = ghost_batches(name, ghost_size, tables.R, G, memory), rows = one_row && G == 1 ? 1 : tables.R;
    const double *from_mean = tables.of("mean", mean, tables.R), *from_var = tables.variances("var", var);
    Tensor made_mean = table(rows, tables.C, FLOAT64), made_var = table(rows, tables.C, FLOAT64);
    if (tables.R > 0 && tables.C > 0)
        run(threads_for(tables.R * tables.C), G, starts, tables.C, from_mean, from_var,
            static_cast<double *>(made_mean.write()), static_cast<double *>(made_var.write()));
    give(stack, made_mean, made_var);
}

// The same for the gradients of samples, from those of pools. Without `needs_var`, that of the variance is empty.
template <class Run>
void pool_backward(const char *name, StableIValue *stack, std::uint64_t given, bool one_row, Run run) {
    Arguments arguments(stack, given, 6);
    const Tensor g_mean = arguments.tensor(), g_var = arguments.tensor(), mean = arguments.tensor();
    const Tensor pooled = arguments.tensor();
    const i64 ghost_size = arguments.take<i64>();
    const bool needs_var = arguments.take<bool>();
    check_table(name, mean);
    Tables tables(name, mean);
    Memory memory;
    i64 G;
    const i64 *starts = ghost_batches(name, ghost_size, tables.R, G, memory), rows = one_row && G == 1 ? 1 : tables.R;
    const double *from[] = {tables.of("g_mean", g_mean, rows), tables.of("g_var", g_var, rows),
                            tables.of("mean", mean, tables.R), tables.of("pooled", pooled, rows)};
    Tensor made_mean = table(tables.R, tables.C, FLOAT64), made_var = table(needs_var ? rows : 0, tables.C, FLOAT64);
    if (tables.R > 0 && tables.C > 0)
        run(threads_for(tables.R * tables.C), G, starts, tables.C, from[0], from[1], from[2], from[3],
            static_cast<double *>(made_mean.write()), needs_var ? static_cast<double *>(made_var.write()) : nullptr);
    give(stack, made_mean, made_var);
}

void ghost_batches(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    pool("ghost_batches", stack, given, true, kernels->ghost_batches);
}

void ghost_batches_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    pool_backward("ghost_batches_backward", stack, given, true, kernels->ghost_batches_backward);
}

void excluding_sample(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    pool("excluding_sample", stack, given, false, kernels->excluding_sample);
}

void excluding_sample_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    pool_backward("excluding_sample_backward", stack, given, false, kernels->excluding_sample_backward);
}

void drawn_samples(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "drawn_samples";
    Arguments arguments(stack, given, 3);
    const Tensor mean = arguments.tensor(), var = arguments.tensor(), indices = arguments.tensor();
    check_table(name, mean);
    Tables tables(name, mean);
    Tensor copied;
    const i64 B = tables.R, C = tables.C, *drawn = rows_of_indices(name, indices, copied);
    const i64 K = indices.sizes[0], N = indices.sizes[1];
    const double *from_mean = tables.of("mean", mean, B), *from_var = tables.variances("var", var);
    Tensor made_mean = table(K, C, FLOAT64), made_var = table(K, C, FLOAT64);
    if (K > 0 && C > 0)
        check(name, kernels->pool_drawn(threads_for(K * C * N), B, C, K, N, from_mean, from_var, drawn,
                                        static_cast<double *>(made_mean.write()),
                                        static_cast<double *>(made_var.write())));
    give(stack, made_mean, made_var);
}

void normalizing_scale(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalizing_scale";
    Arguments arguments(stack, given, 4);
    const Tensor var = arguments.tensor(), weight = arguments.optional_tensor();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    check_table(name, var);
    Tables tables(name, var);
    Memory memory;
    Tensor made = table(tables.R, tables.C, FLOAT64);
    kernels->normalizing_scale(threads_for(tables.R * tables.C), tables.R, tables.C, tables.of("var", var, tables.R),
                               values<double>(name, "weight", weight, tables.C, memory), eps, min_std * min_std,
                               static_cast<double *>(made.write()));
    give(stack, made);
}

void normalizing_scale_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalizing_scale_backward";
    Arguments arguments(stack, given, 5);
    const Tensor gradient = arguments.tensor(), var = arguments.tensor(), weight = arguments.optional_tensor();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    check_table(name, var);
    Tables tables(name, var);
    Memory memory;
    Tensor to_var = table(tables.R, tables.C, FLOAT64), to_weight = channels(weight ? tables.C : 0, FLOAT64);
    kernels->normalizing_scale_backward(
        threads_for(tables.R * tables.C), tables.R, tables.C, tables.of("gradient", gradient, tables.R),
        tables.of("var", var, tables.R), values<double>(name, "weight", weight, tables.C, memory), eps,
        min_std * min_std, static_cast<double *>(to_var.write()),
        weight ? static_cast<double *>(to_weight.write()) : nullptr);
    give(stack, to_var, to_weight);
}

}  // namespace ghostnoise::operators

// Whole methods: the forward and the backward pass of normalizers, and noise alone.

#include "layouts.h"
#include "operators.h"
#include "running.h"

namespace ghostnoise::operators {

namespace {

Geometry geometry(const char *name, const Batch &batch, std::optional<i64> ghost_size, bool exclusive,
                  Memory &memory) {
    const Pass &n = batch.n;
    if (!batch.elements())
        fail(name, "x has no values; it must have one for each sample and channel");
    i64 G;
    const i64 *starts = ghost_batches(name, ghost_size, n.B, G, memory);
    Geometry made = {};
    made.dtype = n.dtype;
    made.last = n.last;
    made.exclusive = exclusive;
    made.threads = torch_threads();  // tables may justify more threads than x does
    made.B = n.B;
    made.C = n.C;
    made.S = n.S;
    made.per_pool = exclusive || G == n.B ? 1 : starts[1];
    made.G = G;
    made.starts = starts;
    return made;
}

// The limits r_max and d_max after `count` batches: those of Batch Normalization for `warmup` batches, then linear to
// the final ones.
void limit(Renormalization &to, double r_max, double d_max, const Tensor &count, i64 batches, i64 warmup,
           i64 transition) {
    double progress = 1;
    if (count && transition == 0)
        progress = batches >= warmup;
    else if (count)
        progress = double(batches - warmup) / double(transition);
    progress = progress < 0 ? 0 : progress > 1 ? 1 : progress;
    to.r_max = 1 + (r_max - 1) * progress;
    to.d_max = d_max * progress;
}

// A row of drawn samples for each sample.
void draw(const char *name, const Tensor &indices, i64 B, Tensor &copied, NoiseSource &to) {
    to.indices = rows_of_indices(name, indices, copied);
    to.N = indices.sizes[1];
    if (indices.sizes[0] != B)
        fail(name, "indices of shape ", shape(indices), "; they must be int64 and have the shape (B, N)");
}

// The seed and the law of noise as law.h takes them.
void draw_from_law(const char *name, const Tensor &seed, const Tensor &law, const Tensor &quantiles,
                   const Batch &batch, NoiseSource &to) {
    const auto dense = [](const Tensor &x, std::int32_t dtype, i64 count) {
        i64 values = 1;
        for (i64 d = 0; d < x.dims; ++d)
            values *= x.sizes[d];
        return x && x.dtype == dtype && values == count && is_contiguous(x);
    };
    constexpr i64 NUMBERS = 6, QUANTILES = 2 * 4 * 224;
    if (!dense(seed, INT64, 1) || !dense(law, FLOAT64, NUMBERS) || !dense(quantiles, batch.arithmetic(), QUANTILES))
        fail(name, "noise from a law needs an int64 seed (1,), a law of ", NUMBERS,
             " float64 numbers, and quantiles (2, 4, 224) in the dtype of the arithmetic, all contiguous");
    to.seed = static_cast<const i64 *>(seed.read());
    to.law = static_cast<const double *>(law.read());
    to.quantiles = quantiles.read();
}

}  // namespace

void normalize(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalize";
    Arguments arguments(stack, given, 26);
    const Tensor x = arguments.tensor(), weight = arguments.optional_tensor(), bias = arguments.optional_tensor();
    const Tensor running_mean = arguments.optional_tensor(), running_var = arguments.optional_tensor();
    const Tensor tracked = arguments.optional_tensor();
    const auto momentum = arguments.take<std::optional<double>>();
    const char towards = arguments.letter();  // "whole", "unbiased" or "ghosts"
    const auto ghost_size = arguments.take<std::optional<i64>>();
    const bool exclusive = arguments.take<bool>();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    const Tensor indices = arguments.optional_tensor(), seed = arguments.optional_tensor();
    const Tensor law = arguments.optional_tensor(), quantiles = arguments.optional_tensor();
    const double noise_eps = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>();
    const Tensor reference_mean = arguments.optional_tensor(), reference_var = arguments.optional_tensor();
    const Tensor reference_count = arguments.optional_tensor();
    const auto r_max = arguments.take<std::optional<double>>();
    const double d_max = arguments.take<double>();
    const i64 warmup_steps = arguments.take<i64>(), transition_steps = arguments.take<i64>();

    Memory memory;
    Batch batch(name, x, true);
    const i64 B = batch.n.B, C = batch.n.C, S = batch.n.S;
    NormalizeCall call = {};
    call.geometry = geometry(name, batch, ghost_size, exclusive, memory);
    const bool one_pool = call.geometry.G == 1 && !exclusive, noisy = indices || seed;
    if (noisy ? !one_pool || r_max || (!shift && !scale) || (indices && seed) : shift || scale)
        fail(name, "noise needs indices or a seed, shift or scale, one pool of all samples, and no renormalization");
    if (r_max && !one_pool)
        fail(name, "renormalization needs one pool of all samples");
    if (towards != 'w' && towards != 'u' && (towards != 'g' || exclusive))
        fail(name, "running statistics are updated towards 'whole', 'unbiased', or without exclusive pools 'ghosts'");
    const Running running = {running_mean, running_var, tracked, momentum};
    running.check(name, C);
    call.weight = parameter(name, "weight", weight, batch, memory);
    call.bias = parameter(name, "bias", bias, batch, memory);
    call.eps = eps;
    call.least = min_std * min_std;
    call.noise.eps = noise_eps;
    Tensor drawn;
    if (indices)
        draw(name, indices, B, drawn, call.noise);
    else if (seed)
        draw_from_law(name, seed, law, quantiles, batch, call.noise);

    const i64 kept = exclusive ? S > 1 ? B : 0 : call.geometry.G;
    Tensor stats = tables(2, kept, C, FLOAT64);
    Tensor extra = tables(r_max ? 2 : i64(shift) + i64(scale), r_max ? 1 : B, C, batch.arithmetic());
    if (kept) {
        call.mean = static_cast<double *>(stats.write());
        call.var = call.mean + kept * C;
    }
    char *const extra_at = static_cast<char *>(extra.write());
    call.m = shift ? extra_at : nullptr;
    call.k = scale ? extra_at + (shift ? B * C * batch.arithmetic_bytes() : 0) : nullptr;
    if (r_max) {
        const bool live = !reference_mean && !reference_var;
        const Tensor &from_mean = live ? running_mean : reference_mean, &from_var = live ? running_var : reference_var;
        const Tensor &count = reference_count ? reference_count : tracked;
        if (!from_mean || !from_var)
            fail(name, "renormalization needs reference statistics or running statistics, a mean and a variance");
        Renormalization &to = call.renormalization;
        to.mean = values<double>(name, "a reference mean", from_mean, C, memory);
        to.var = values<double>(name, "a reference variance", from_var, C, memory);
        to.r = extra_at;
        to.d = extra_at + C * batch.arithmetic_bytes();
        limit(to, *r_max, d_max, count, count ? count_of(name, "a count of batches", count) : 0, warmup_steps,
              transition_steps);
    }
    if (running) {
        call.population = {towards == 'g', memory.of<double>(C), nullptr};
        call.population.var = memory.of<double>(C);
    }
    const Input input = batch.input();
    const Output output = batch.output();
    call.x = input.at;
    call.y = output.at;
    call.geometry.x_b = call.geometry.dy_b = input.b;
    call.geometry.x_inner = call.geometry.dy_inner = input.inner;
    call.geometry.made_b = output.b;
    call.geometry.made_inner = output.inner;
    check(name, kernels->normalize(call));
    batch.finish();
    if (running) {
        const double values = double(B * S), bessel = towards == 'u' ? values / (values - 1) : 1;
        for (i64 c = 0; c < C; ++c)
            call.population.var[c] *= bessel;
        running.update(name, C, call.population.mean, call.population.var);
    }
    give(stack, batch.made, stats, extra);
}

void normalize_backward(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "normalize_backward";
    Arguments arguments(stack, given, 12);
    const Tensor dy = arguments.tensor(), x = arguments.tensor(), weight = arguments.optional_tensor();
    const Tensor stats = arguments.tensor(), extra = arguments.tensor();
    const auto ghost_size = arguments.take<std::optional<i64>>();
    const bool exclusive = arguments.take<bool>();
    const double eps = arguments.take<double>(), min_std = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>(), needs_x = arguments.take<bool>();

    Memory memory;
    Batch batch(name, x, needs_x);
    const i64 B = batch.n.B, C = batch.n.C, S = batch.n.S;
    NormalizeBackwardCall call = {};
    call.geometry = geometry(name, batch, ghost_size, exclusive, memory);
    Tensor copied, copied_stats, copied_extra;
    const Input gradient = batch.gradient(name, dy, copied), input = batch.input();
    call.weight = parameter(name, "weight", weight, batch, memory);
    call.eps = eps;
    call.least = min_std * min_std;
    const i64 kept = exclusive ? S > 1 ? B : 0 : call.geometry.G;
    const auto saved = [&](const char *what, const Tensor &x, i64 count, i64 rows, std::int32_t dtype, Tensor &copy) {
        if (x.dtype != dtype || x.dims != 3 || x.sizes[0] != count || x.sizes[1] != rows || x.sizes[2] != C)
            fail(name, what, " of shape ", shape(x), "; it must be what `normalize` has returned");
        const bool dense = !count || !rows || is_contiguous(x);
        if (!dense)
            copy = copy_in_layout(x, false);
        return static_cast<const char *>((dense ? x : copy).read());
    };
    call.mean = reinterpret_cast<const double *>(saved("stats", stats, 2, kept, FLOAT64, copied_stats));
    call.var = kept ? call.mean + kept * C : nullptr;
    const i64 components = i64(shift) + i64(scale), bytes = batch.arithmetic_bytes();
    const bool renormalized = !components && extra.dims && extra.sizes[0];
    const char *extra_at = saved("extra", extra, renormalized ? 2 : components, renormalized ? 1 : B,
                                 batch.arithmetic(), copied_extra);
    call.m = shift ? extra_at : nullptr;
    call.k = scale ? extra_at + (shift ? B * C * bytes : 0) : nullptr;
    call.r = renormalized ? extra_at : nullptr;
    call.d = renormalized ? extra_at + C * bytes : nullptr;
    if ((components || renormalized) && (call.geometry.G > 1 || exclusive))
        fail(name, "noise and renormalization need one pool of all samples");
    Tensor g_weight = channels(C, batch.arithmetic()), g_bias = channels(C, batch.arithmetic());
    call.dy = gradient.at;
    call.x = input.at;
    call.g_weight = g_weight.write();
    call.g_bias = g_bias.write();
    call.geometry.x_b = input.b;
    call.geometry.x_inner = input.inner;
    call.geometry.dy_b = gradient.b;
    call.geometry.dy_inner = gradient.inner;
    if (needs_x) {
        const Output output = batch.output();
        call.dx = output.at;
        call.geometry.made_b = output.b;
        call.geometry.made_inner = output.inner;
    } else {
        batch.made = channels(0, x.dtype);
    }
    check(name, kernels->normalize_backward(call));
    batch.finish();
    give(stack, batch.made, g_weight, g_bias);
}

void ghost_noise(StableIValue *stack, std::uint64_t given, std::uint64_t) {
    constexpr const char *name = "ghost_noise";
    Arguments arguments(stack, given, 5);
    const Tensor x = arguments.tensor(), indices = arguments.tensor();
    const double eps = arguments.take<double>();
    const bool shift = arguments.take<bool>(), scale = arguments.take<bool>();

    Memory memory;
    Batch batch(name, x, true);
    const i64 B = batch.n.B, C = batch.n.C;
    GhostNoiseCall call = {};
    call.geometry = geometry(name, batch, std::nullopt, false, memory);
    if (!shift && !scale)
        fail(name, "neither shift nor scale; one of them must be True");
    Tensor drawn, factor = table(scale ? B : 0, C, batch.arithmetic());
    draw(name, indices, B, drawn, call.noise);
    call.noise.eps = eps;
    call.m = shift ? memory.bytes(B * C * batch.arithmetic_bytes()) : nullptr;
    call.k = scale ? factor.write() : nullptr;
    const Input input = batch.input();
    const Output output = batch.output();
    call.x = input.at;
    call.y = output.at;
    call.geometry.x_b = input.b;
    call.geometry.x_inner = input.inner;
    call.geometry.made_b = output.b;
    call.geometry.made_inner = output.inner;
    check(name, kernels->ghost_noise(call));
    batch.finish();
    give(stack, batch.made, factor);
}

}  // namespace ghostnoise::operators

// All steps of a normalizer's forward pass, and all steps of its backward pass, in one call each: the passes over x and
// the tables between them. The threads stay awake from step to step, and tables that only the next step needs are in
// scratch memory.
//
// Ghost batches do not depend on each other, so all steps run on a few of them, then on the next few: where tables are
// large, as with few positions, they stay in the caches from step to step.

#include "exclusive.h"
#include "gradients.h"
#include "passes.h"

namespace {

// What stays the same from call to call; fused.py lists the numbers in this order, and then the starts.
struct Geometry {
    i64 last, threads, grain, C, S;
    i64 x_b, x_inner, dy_b, dy_inner, made_b, made_inner;  // the last two are the strides of y, or dx
    i64 exclusive, per_pool, B, G;

    i64 pools() const { return exclusive ? B : G; }
    i64 many(i64 elements) const { return elements >= grain ? threads : 1; }
    // Whether to run on tiles of channels (single_position.h); with few tiles, the steps use more threads.
    bool tiles(i64 samples, i64 most) const {
        const i64 available = (C + TILE_CHANNELS - 1) / TILE_CHANNELS;
        return S == 1 && last && available >= many(B * C) && samples <= most;
    }
    bool exclusive_tiles(const i64 *starts) const { return exclusive && tiles(largest(G, starts), EXCLUSIVE_SAMPLES); }
    // Whether to make the tables of exclusive statistics on tiles of channels (exclusive.h).
    bool exclusive_tables(const i64 *starts) const {
        const i64 available = (C + TILE_CHANNELS - 1) / TILE_CHANNELS;
        return exclusive && S > 1 && available >= table_threads() && largest(G, starts) <= EXCLUSIVE_SAMPLES;
    }
    i64 table_threads() const { return many(B * C * EXCLUSIVE_WORK); }
    // Requests memory for a dense result; with several ghost batches it is written in parts (`for_parts_of_batch`).
    void request_memory(const void *result, i64 bytes) const {
        request_huge_pages(result, B * C * S * bytes);
        if (G > 1)
            populate(result, B * C * S * bytes, threads);
    }
};

// Noise from N drawn samples, or from a law.
struct Drawn {
    const i64 *indices;
    i64 N;
    const i64 *seed;
    const double *law;
    const void *quantiles;
    double eps;
};

// Batch Renormalization: from the pool's statistics towards reference statistics, within limits.
template <class A> struct Renormalization {
    const double *mean, *var, *limits;  // the reference (C,), r_max and d_max
    A *r, *d;
};

constexpr i64 LAW = 16;  // the work of a draw from a law, in elements that are only copied

template <class A> constexpr i64 TABLES = sizeof(A) == sizeof(double);  // the dtype of tables in A

inline void *offset(void *at, i64 by, i64 size) { return at ? static_cast<char *>(at) + by * size : at; }

// The moments of samples; the variance is null where it is zero.
struct Samples {
    i64 means;
    void *mean;
    double *var;

    Samples from(i64 at) const { return {means, offset(mean, at, means ? 8 : 4), offset(var, at)}; }
};

// Some consecutive ghost batches: the geometry with their numbers, their starts relative to the first of them, and how
// many samples and pools precede them.
struct Part {
    Geometry geometry;
    const i64 *starts;
    i64 sample, pool;
    bool large;  // whether the whole result is written with non-temporal stores

    // Threads of a pass over x.
    i64 many() const { return geometry.many(geometry.B * geometry.C * geometry.S); }
};

constexpr i64 LARGE = i64(1) << 23;   // bytes of a result that passes write with non-temporal stores
constexpr i64 CACHED = i64(1) << 22;  // bytes of x in a part of a large batch: the next step finds it in the caches

// Runs step(part) over all ghost batches, until it returns other than OK.
template <class Step> int for_parts_of_batch(const Geometry &n, const i64 *starts, i64 bytes, Step step) {
    const bool large = n.B * n.C * n.S * bytes >= LARGE;
    // A small x stays in the caches, but where a dozen tables have a row for each sample, these may not: then a part is
    // the least that is worth the threads. Tables of ghost batches are smaller, and are passed between cores at each
    // step, so few steps matter more than caches.
    const i64 entries = n.exclusive ? n.grain : 64 * n.grain;
    const Scratch<i64> relative(n.G + 1);
    if (!relative.at)
        return OUT_OF_MEMORY;
    for (i64 g = 0, end = 0; g < n.G; g = end) {
        i64 count = 0;
        for (; end < n.G && (large ? count * n.C * n.S * bytes < CACHED : count * n.C < entries); ++end)
            count = starts[end + 1] - starts[g];
        for (i64 k = g; k <= end; ++k)
            relative.at[k - g] = starts[k] - starts[g];
        Part part = {n, relative.at, starts[g], n.exclusive ? starts[g] : g, large};
        part.geometry.B = count;
        part.geometry.G = end - g;
        if (const int status = step(part))
            return status;
    }
    return OK;
}

inline double clip(double value, double low, double high) {  // NaN stays NaN
    return value < low ? low : value > high ? high : value;
}

template <class A> struct Forward {
    i64 dtype, bytes;
    void *x, *y;
    const A *weight, *bias;
    Floor floor;
    Drawn drawn;
    Renormalization<A> renormalization;
    Samples samples;
    double *means, *vars;  // of the pools; null: they are not needed afterwards
    A *m, *k;              // shift and scale of the noise

    int operator()(const Part &part) const {
        const Geometry &n = part.geometry;
        const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), many = part.many(), at = part.sample * C;
        const bool exclusive = n.exclusive_tables(part.starts);
        const Scratch<A> tables(Coefficients<A>::TABLES * R * C);
        const Scratch<double> pooled(means || exclusive ? 0 : 2 * R * C);
        if (!tables.at || !pooled.at)
            return OUT_OF_MEMORY;
        const Samples own = samples.from(at);
        void *from = offset(x, part.sample * n.x_b, bytes), *to = offset(y, part.sample * n.made_b, bytes);
        if (S > 1)
            if (const int status = GN_FUNCTION(moments)(dtype, n.last, many, B, C, S, from, n.x_b, n.x_inner,
                                                        static_cast<double *>(own.mean), own.var))
                return status;
        if (exclusive) {
            A *center = tables.at, *factor = center + R * C, *shift = factor + R * C;
            if (const int status =
                    exclusive_affine(n.table_threads(), n.G, part.starts, C, static_cast<double *>(own.mean), own.var,
                                     floor, weight, bias, center, factor, shift))
                return status;
            return GN_FUNCTION(transform)(dtype, n.last, many, B, C, S, part.large, from, n.x_b, n.x_inner, center, 1,
                                          R - 1, factor, 1, R - 1, shift, 1, R - 1, to, n.made_b, n.made_inner);
        }
        double *mean = means ? means + part.pool * C : pooled.at, *var = means ? vars + part.pool * C : mean + R * C;
        GN_FUNCTION(pool)(own.means, n.exclusive, n.many(B * C), n.G, part.starts, C, own.mean, own.var, mean, var);
        const Coefficients<A> pools(tables.at, R * C);
        GN_FUNCTION(coefficients)
        (TABLES<A>, n.many(R * C), R, C, mean, var, floor.eps, floor.least, weight, bias, tables.at);
        if (drawn.indices || drawn.seed)
            return with_noise(n, from, mean, var, pools, to);
        if (renormalization.mean)
            renormalize(C, mean, var, pools);
        return GN_FUNCTION(transform)(dtype, n.last, many, B, C, S, part.large, from, n.x_b, n.x_inner, pools.center,
                                      n.per_pool, R - 1, pools.factor, n.per_pool, R - 1, pools.shift, n.per_pool,
                                      R - 1, to, n.made_b, n.made_inner);
    }

    // All samples share one pool. The affine map that follows normalization becomes weight * r and bias + weight * d.
    void renormalize(i64 C, const double *mean, const double *var, const Coefficients<A> &pool) const {
        const double r_max = renormalization.limits[0], d_max = renormalization.limits[1];
        for (i64 c = 0; c < C; ++c) {
            const double reference_std = std::sqrt(floor.of(renormalization.var[c]));
            const A r = A(clip(std::sqrt(floor.of(var[c])) / reference_std, 1 / r_max, r_max));
            const A d = A(clip((mean[c] - renormalization.mean[c]) / reference_std, -d_max, d_max));
            pool.factor[c] *= r;
            const A shift = pool.factor[c] * pool.rounding[c] + (weight ? weight[c] * d : d);
            pool.shift[c] = bias ? shift + bias[c] : shift;
            renormalization.r[c] = r;
            renormalization.d[c] = d;
        }
    }

    // All samples share one pool.
    int with_noise(const Geometry &n, void *from, double *mean, double *var, const Coefficients<A> &pool,
                   void *to) const {
        const i64 B = n.B, C = n.C;
        const Scratch<double> rest(2 * C);
        const Scratch<A> rows(NoisyAffine<A>::ROWS * C);
        if (!rest.at || !rows.at)
            return OUT_OF_MEMORY;
        double *margin = rest.at, *unit = rest.at + C;
        for (i64 c = 0; c < C; ++c) {
            margin[c] = noise_margin(drawn.eps, pool.rstd[c]);
            unit[c] = double(A(1) / (pool.rstd[c] * pool.rstd[c]));  // the variance that normalization maps to 1
        }
        // If the means of the samples are x itself, unless y is so large that it is written past the caches.
        const bool at_once = samples.mean == x && n.made_b == C && B * C * bytes < LARGE;
        if (at_once)
            request_huge_pages(to, B * C * bytes);
        if (const int status = GN_FUNCTION(noise_tables)(
                samples.means, TABLES<A>, n.many(B * C * (drawn.seed ? LAW : drawn.N)), B, C, B, drawn.N, samples.mean,
                samples.var, drawn.indices, mean, nullptr, nullptr, drawn.seed, drawn.law, drawn.quantiles,
                m != nullptr, k != nullptr, drawn.seed ? unit : var, margin, pool.center, weight, bias, m, k, nullptr,
                nullptr, at_once ? to : nullptr))
            return status;
        if (at_once)
            return OK;
        const NoisyAffine<A> affine(rows.at, C);
        affine.fill(pool, weight, bias, C);
        return GN_FUNCTION(noisy_transform)(dtype, n.last, n.many(B * C * n.S), B, C, n.S, from, n.x_b, n.x_inner,
                                            rows.at, m, k, to, n.made_b, n.made_inner);
    }
};

template <class A> struct Backward {
    i64 dtype, bytes;
    void *dy, *x, *dx;
    const A *weight;
    Floor floor;
    Samples saved;
    A *m, *k, *g_weight, *g_bias;
    double *carried;

    // Calls run with a value of the type of x.
    template <class Run> void with_type(Run run) const {
        if constexpr (std::is_same_v<A, double>)
            run(double());
        else if (dtype == 2)
            run(bfloat16());
        else if (dtype == 3)
            run(float16());
        else
            run(float());
    }

    int operator()(const Part &part) const {
        const Geometry &n = part.geometry;
        if (n.exclusive_tables(part.starts) && saved.means == 1 && saved.var && !m && !k)
            return exclusive(part);
        const i64 B = n.B, C = n.C, S = n.S, R = n.pools(), size = R * C, many = part.many(), at = part.sample * C;
        const Scratch<double> pooled(n.exclusive ? 2 * size : 0);
        const bool single = S == 1 && n.last && !n.exclusive;  // dy and x themselves serve as sums
        const Scratch<A> tables((Coefficients<A>::TABLES + 5) * size + (single ? C : 2 * B * C));
        if (!pooled.at || !tables.at)
            return OUT_OF_MEMORY;
        void *gradient = offset(dy, part.sample * n.dy_b, bytes), *from = offset(x, part.sample * n.x_b, bytes);
        const Samples own = saved.from((n.exclusive ? part.sample : part.pool) * C);
        if (n.exclusive)
            GN_FUNCTION(pool)
        (own.means, 1, n.many(B * C), n.G, part.starts, C, own.mean, own.var, pooled.at, pooled.at + size);
        const double *mean = n.exclusive ? pooled.at : static_cast<double *>(own.mean);
        const double *var = n.exclusive ? pooled.at + size : own.var;
        const Coefficients<A> pools(tables.at, size);
        GN_FUNCTION(coefficients)
        (TABLES<A>, n.many(size), R, C, mean, var, floor.eps, floor.least, weight, nullptr, tables.at);
        A *g_mean = tables.at + Coefficients<A>::TABLES * size, *g_var = g_mean + size, *center = g_var + size;
        A *slope = center + size, *shift = slope + size, *total = shift + size, *moment = total + B * C;
        A *gain = offset(k, at);
        if (single) {
            with_type([&](auto type) {
                using T = decltype(type);
                statistics_gradient<A>(n.many(B * C), B, C, R, n.per_pool,
                                       SingleSums<T, A>{in<T>(gradient), n.dy_b, in<T>(from), n.x_b, C},
                                       SampleNoise<A>{m, k}.from(at), tables.at, var, floor, g_weight, g_bias, g_mean,
                                       g_var, carried);
            });
        } else {
            if (const int status =
                    GN_FUNCTION(gradient_sums)(dtype, n.last, many, B, C, S, gradient, n.dy_b, n.dy_inner, from, n.x_b,
                                               n.x_inner, pools.center, n.per_pool, R - 1, total, moment))
                return status;
            GN_FUNCTION(statistics_gradient)
            (TABLES<A>, n.many(B * C), B, C, R, n.per_pool, total, moment, offset(m, at), gain, tables.at, var,
             floor.eps, floor.least, g_weight, g_bias, g_mean, g_var, carried);
        }
        if (!dx)
            return OK;
        if (n.exclusive)
            GN_FUNCTION(exclusive_linear_term)
        (TABLES<A>, own.means, n.many(B * C), n.G, part.starts, C, S, own.mean, mean, g_mean, g_var, center, slope,
         shift);
        else GN_FUNCTION(linear_term)(TABLES<A>, n.many(size), n.G, part.starts, C, S, mean, g_mean, g_var, center,
                                      slope, shift);
        A *ones = total;  // the sums are no longer needed
        for (i64 c = 0; !k && c < C; ++c)
            ones[c] = 1;
        return GN_FUNCTION(input_gradient)(dtype, n.last, many, B, C, S, part.large, gradient, n.dy_b, n.dy_inner, from,
                                           n.x_b, n.x_inner, pools.factor, n.per_pool, R - 1, k ? gain : ones, 1,
                                           k ? B - 1 : 0, center, n.per_pool, R - 1, slope, n.per_pool, R - 1, shift,
                                           n.per_pool, R - 1, offset(dx, part.sample * n.made_b, bytes), n.made_b,
                                           n.made_inner);
    }

    // Exclusive statistics of samples with several positions.
    int exclusive(const Part &part) const {
        const Geometry &n = part.geometry;
        const i64 B = n.B, C = n.C, S = n.S, size = B * C, many = part.many(), threads = n.table_threads();
        const PooledTiles pooled(B, C);
        const Scratch<A> tables(6 * size + C);
        if (!tables.at)
            return OUT_OF_MEMORY;
        void *gradient = offset(dy, part.sample * n.dy_b, bytes), *from = offset(x, part.sample * n.x_b, bytes);
        const Samples own = saved.from(part.sample * C);
        const double *mean = static_cast<double *>(own.mean);
        A *center = tables.at, *factor = center + size, *slope = factor + size, *shift = slope + size;
        A *total = shift + size, *moment = total + size, *ones = moment + size;
        if (const int status = exclusive_centers(threads, n.G, part.starts, C, mean, own.var, pooled, center))
            return status;
        if (const int status = GN_FUNCTION(gradient_sums)(dtype, n.last, many, B, C, S, gradient, n.dy_b, n.dy_inner,
                                                          from, n.x_b, n.x_inner, center, 1, B - 1, total, moment))
            return status;
        if (const int status =
                exclusive_terms(threads, n.G, part.starts, C, S, mean, pooled, floor, weight, total, moment, g_weight,
                                g_bias, carried, factor, center, dx ? slope : nullptr, shift))
            return status;
        if (!dx)
            return OK;
        for (i64 c = 0; c < C; ++c)
            ones[c] = 1;
        return GN_FUNCTION(input_gradient)(dtype, n.last, many, B, C, S, part.large, gradient, n.dy_b, n.dy_inner, from,
                                           n.x_b, n.x_inner, factor, 1, B - 1, ones, B, 0, center, 1, B - 1, slope, 1,
                                           B - 1, shift, 1, B - 1, offset(dx, part.sample * n.made_b, bytes), n.made_b,
                                           n.made_inner);
    }
};

// Copies samples with a single position, which are their own means, to a table (B, C) in the arithmetic of x.
template <class T, class A> int copy_samples(i64 threads, const Geometry &n, const T *x, A *to) {
    const i64 step = n.last ? 1 : n.x_inner;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (i64 b = 0; b < n.B; ++b) {
        const T *row = x + b * n.x_b;
        if (step == 1)
#pragma omp simd
            for (i64 c = 0; c < n.C; ++c)
                to[b * n.C + c] = load(row[c]);
        else
            for (i64 c = 0; c < n.C; ++c)
                to[b * n.C + c] = load(row[c * step]);
    }
    return OK;
}

// Copies running statistics before they are updated.
template <class A> void copy_reference(i64 C, const A *mean, const A *var, double *to_mean, double *to_var) {
    for (i64 c = 0; c < C; ++c) {
        to_mean[c] = double(mean[c]);
        to_var[c] = double(var[c]);
    }
}

// Batch Renormalization makes weight * r the weight of the affine map; `to` has room for it.
template <class A> void fold_weight(i64 C, const A *weight, const A *r, A *to) {
    for (i64 c = 0; c < C; ++c)
        to[c] = weight ? weight[c] * r[c] : r[c];
}

// The gradient of the weight itself, from the gradients of weight * r and of the bias.
template <class A> void unfold_gradient(i64 C, const A *r, const A *d, const A *g_bias, A *g_weight) {
    for (i64 c = 0; c < C; ++c)
        g_weight[c] = r[c] * g_weight[c] + d[c] * g_bias[c];
}

// The moments (C,) that running statistics are updated towards: those of the whole batch, or the averages over samples
// of the moments of their ghost batches.
void population_moments(const Geometry &n, const i64 *starts, const Samples &samples, const double *means,
                        const double *vars, bool averages, double *mean, double *var) {
    if (n.exclusive) {
        const i64 whole[2] = {0, n.B};
        GN_FUNCTION(pool)(samples.means, 0, n.many(n.B * n.C), 1, whole, n.C, samples.mean, samples.var, mean, var);
        return;
    }
    for (i64 c = 0; c < n.C; ++c)
        mean[c] = var[c] = 0;
    const auto share = [=](i64 g) { return double(starts[g + 1] - starts[g]) / double(n.B); };
    for (i64 g = 0; g < n.G; ++g)
        for (i64 c = 0; c < n.C; ++c)
            mean[c] += share(g) * means[g * n.C + c];
    for (i64 g = 0; g < n.G; ++g)
        for (i64 c = 0; c < n.C; ++c) {
            const double d = averages ? 0 : means[g * n.C + c] - mean[c];
            var[c] += share(g) * (vars[g * n.C + c] + d * d);
        }
}

// clang-format off
#define GN_TILES(call)                                                                                                 \
    switch (dtype) {                                                                                                   \
        case 0: { using T = float; using A = float; status = call; break; }                                            \
        case 1: { using T = double; using A = double; status = call; break; }                                          \
        case 2: { using T = bfloat16; using A = float; status = call; break; }                                         \
        case 3: { using T = float16; using A = float; status = call; break; }                                          \
        default: return UNKNOWN_DTYPE;                                                                                 \
    }
// clang-format on

inline i64 size_of(i64 dtype) { return dtype == 1 ? 8 : dtype == 0 ? 4 : 2; }

}  // namespace

// Sets status to the result of a step over all ghost batches.
#define GN_FUSED(...)                                                                                                  \
    if (dtype == 1) {                                                                                                  \
        using A = double;                                                                                              \
        status = for_parts_of_batch(n, starts, bytes, __VA_ARGS__);                                                    \
    } else {                                                                                                           \
        using A = float;                                                                                               \
        status = for_parts_of_batch(n, starts, bytes, __VA_ARGS__);                                                    \
    }

GN_EXPORT(fused_forward)(const ForwardCall *call) {
    const auto [dtype, geometry, x, weight, bias, eps, least, indices, N, seed, law, quantiles, noise_eps, means, mean,
                var, pooled_mean, pooled_var, m, k, live, reference_mean, reference_var, limits, r, d, population,
                bessel, buffers, running_mean, running_var, count, factor, y] = *call;
    const Geometry &n = *reinterpret_cast<const Geometry *>(geometry);
    const i64 *starts = geometry + sizeof(Geometry) / sizeof(i64), bytes = size_of(dtype), C = n.C;
    const bool exclusive_tiles = n.exclusive_tiles(starts), noisy_tiles = indices && n.tiles(n.B, TILE_SAMPLES);
    const bool plain = !n.exclusive && !indices && !seed && !reference_mean;
    const bool half_tiles = plain && bytes == 2 && n.tiles(largest(n.G, starts), TILE_SAMPLES);
    const bool tiles = exclusive_tiles || noisy_tiles || half_tiles, copies = !mean && n.S == 1 && !tiles;
    const Scratch<double> moments(mean || tiles ? 0 : copies ? n.B * C : 2 * n.B * C);
    if (!moments.at)
        return OUT_OF_MEMORY;
    const i64 many = n.many(n.B * C);
    int status = OK;
    if (copies)
        GN_TILES((copy_samples<T, A>(many, n, in<T>(x), reinterpret_cast<A *>(moments.at))));
    const Samples samples = {means, mean ? mean : moments.at, mean || n.S == 1 ? var : moments.at + n.B * C};
    for (void *table : {m, k})  // in the arithmetic of x
        request_huge_pages(table, table ? n.B * C * (dtype == 1 ? 8 : 4) : 0);
    if (n.made_b == C * n.S)
        n.request_memory(y, bytes);
    if (live && buffers == 1)
        copy_reference(C, in<double>(running_mean), in<double>(running_var), reference_mean, reference_var);
    else if (live)
        copy_reference(C, in<float>(running_mean), in<float>(running_var), reference_mean, reference_var);
    if (exclusive_tiles) {
        GN_TILES((exclusive_forward<T, A>(many, n.G, starts, C, in<T>(x), n.x_b, in<A>(weight), in<A>(bias),
                                          {eps, least}, out<T>(y), n.made_b)));
    } else if (half_tiles) {
        GN_TILES((inclusive_forward<T, A>(many, n.G, starts, C, in<T>(x), n.x_b, in<A>(weight), in<A>(bias),
                                          {eps, least}, pooled_mean, pooled_var, out<T>(y), n.made_b)));
    } else if (noisy_tiles) {
        GN_TILES((noisy_forward<T, A>(many, n.B, C, in<T>(x), n.x_b, in<A>(weight), in<A>(bias), {eps, least},
                                      {indices, N, noise_eps, out<A>(m), out<A>(k)}, pooled_mean, pooled_var, out<T>(y),
                                      n.made_b)));
    } else {
        GN_FUSED(Forward<A>{dtype,
                            bytes,
                            x,
                            y,
                            in<A>(weight),
                            in<A>(bias),
                            {eps, least},
                            {indices, N, seed, law, quantiles, noise_eps},
                            {reference_mean, reference_var, limits, out<A>(r), out<A>(d)},
                            samples,
                            pooled_mean,
                            pooled_var,
                            out<A>(m),
                            out<A>(k)});
    }
    if (status || !population)
        return status;
    const Scratch<double> stats(2 * C);
    if (!stats.at)
        return OUT_OF_MEMORY;
    population_moments(n, starts, samples, pooled_mean, pooled_var, population == 2, stats.at, stats.at + C);
    for (i64 c = 0; c < C; ++c)
        stats.at[C + c] *= bessel;
    return GN_FUNCTION(update_running)(buffers, C, running_mean, running_var, count, stats.at, stats.at + C, factor);
}

GN_EXPORT(fused_backward)(const BackwardCall *call) {
    const auto [dtype, geometry, dy, x, given_weight, eps, least, means, mean, var, m, k, r, d, to_weight, to_bias,
                dx] = *call;
    const Geometry &n = *reinterpret_cast<const Geometry *>(geometry);
    const i64 *starts = geometry + sizeof(Geometry) / sizeof(i64), bytes = size_of(dtype), C = n.C;
    int status = OK;
    const Scratch<double> carried(2 * C), folded(r ? C : 0);
    if (!carried.at || !folded.at)
        return OUT_OF_MEMORY;
    const void *weight = r ? folded.at : given_weight;
    if (r && dtype == 1)
        fold_weight(C, in<double>(given_weight), in<double>(r), folded.at);
    else if (r)
        fold_weight(C, in<float>(given_weight), in<float>(r), reinterpret_cast<float *>(folded.at));
    if (dx && n.made_b == C * n.S)
        n.request_memory(dx, bytes);
    if (!m && !k && !r && n.exclusive_tiles(starts)) {
        GN_TILES((exclusive_backward<T, A>(n.many(n.B * C), n.G, starts, C, in<T>(dy), n.dy_b, in<T>(x), n.x_b,
                                           in<A>(weight), {eps, least}, out<A>(to_weight), out<A>(to_bias), out<T>(dx),
                                           n.made_b)));
        return status;
    }
    std::memset(carried.at, 0, sizeof(double) * 2 * C);
    GN_FUSED(Backward<A>{dtype,
                         bytes,
                         dy,
                         x,
                         dx,
                         in<A>(weight),
                         {eps, least},
                         {means, mean, var},
                         out<A>(m),
                         out<A>(k),
                         out<A>(to_weight),
                         out<A>(to_bias),
                         carried.at});
    if (r && dtype == 1)
        unfold_gradient(C, in<double>(r), in<double>(d), in<double>(to_bias), out<double>(to_weight));
    else if (r)
        unfold_gradient(C, in<float>(r), in<float>(d), in<float>(to_bias), out<float>(to_weight));
    return status;
}

GN_EXPORT(fused_noise)(const NoiseCall *call) {
    const auto [dtype, geometry, x, indices, N, eps, m, k] = *call;
    const Geometry &n = *reinterpret_cast<const Geometry *>(geometry);
    const i64 *starts = geometry + sizeof(Geometry) / sizeof(i64), B = n.B, C = n.C, many = n.many(B * C);
    const i64 tables = dtype == 1;  // their dtype
    const bool single = n.S == 1, itself = single && dtype <= 1 && n.last && n.x_b == C;
    const Scratch<double> own(itself ? 0 : single ? B * C : 2 * B * C), rows(3 * C);
    if (!own.at || !rows.at)
        return OUT_OF_MEMORY;
    double *var = single ? nullptr : own.at + B * C;
    double *pooled_mean = rows.at, *pooled_var = rows.at + C, *margin = rows.at + 2 * C;
    int status = OK;
    if (!single)
        status = GN_FUNCTION(moments)(dtype, n.last, n.many(B * C * n.S), B, C, n.S, x, n.x_b, n.x_inner, own.at, var);
    else if (!itself)
        GN_TILES((copy_samples<T, A>(many, n, in<T>(x), reinterpret_cast<A *>(own.at))));
    if (status)
        return status;
    const Samples samples = {single ? tables : 1, itself ? x : own.at, var};
    GN_FUNCTION(pool)(samples.means, 0, many, 1, starts, C, samples.mean, var, pooled_mean, pooled_var);
    for (i64 c = 0; c < C; ++c)
        margin[c] = eps;
    return GN_FUNCTION(noise_tables)(samples.means, tables, n.many(B * C * N), B, C, B, N, samples.mean, var, indices,
                                     pooled_mean, nullptr, nullptr, nullptr, nullptr, nullptr, m != nullptr,
                                     k != nullptr, pooled_var, margin, nullptr, nullptr, nullptr, m, k, nullptr,
                                     nullptr, nullptr);
}
